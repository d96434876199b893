"""The kernel that writes keys and values to the paged cache, in Triton's interpreter, against its specification."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.kv_cache import spec
from tests.attention_cases import FP8, INT8

pytest.importorskip("triton")

from nanoinfer.ops.kv_cache import triton as kernels
from tests.kernels.helpers import exact_fp8

__all__ = ["exact_fp8"]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    pytest.mark.usefixtures("exact_fp8"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy warns of NaN
]


@dataclass
class Write:
    """Six tokens, of which two have no slot, and a cache of -7 with 48 slots that they are written to."""

    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"
    slots: tuple[int, ...] = (33, -1, 0, 15, -1, 47)

    def run(self, store: Any, bad: float | None = None) -> list[Tensor]:
        """Return the cache, and its scales; the keys' heads are not the stride that a tensor of its own would have."""
        generator = torch.Generator().manual_seed(0)
        shape = self.num_kv_heads, len(self.slots), self.head_dim
        k, v = (torch.randn(shape, generator=generator).to(self.dtype).transpose(0, 1) for _ in "kv")
        if bad is not None:
            k[2, 1, 3] = v[5, 0, 0] = bad
        sizes = 48 // self.block_size, self.num_kv_heads, self.block_size, self.head_dim
        cache = [torch.full(sizes, -7.0).to(self.cache_dtype or self.dtype) for _ in "kv"]
        scales = [torch.full(sizes[:-1], -7.0) for _ in "kv"] if self.cache_dtype else []
        slots = torch.tensor(self.slots, dtype=torch.int64)
        k, v, slots, *written = (x.to(self.device) for x in (k, v, slots, *cache, *scales))
        store(k, v, spec.LayerCache(*written), slots)
        return [x.cpu() for x in written]

    def assert_kernel_equals_specification(
        self, kernel: Any = kernels.store_keys_values, bad: float | None = None
    ) -> None:
        expected = replace(self, device="cpu").run(spec.store_keys_values.__wrapped__, bad)
        for ours, theirs in zip(self.run(kernel, bad), expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


CASES = [
    {},
    {"head_dim": 24, "num_kv_heads": 3},
    {"head_dim": 256, "num_kv_heads": 5, "block_size": 48, "dtype": torch.float16},
    {"head_dim": 576, "num_kv_heads": 1, "dtype": torch.bfloat16},
    {"head_dim": 8, "num_kv_heads": 200, "slots": (5,)},
    {"cache_dtype": INT8, "head_dim": 80},
    {"cache_dtype": FP8, "num_kv_heads": 3, "dtype": torch.float16},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_keys_and_values_are_where_the_specification_writes_them(changes: dict[str, Any]) -> None:
    replace(Write(), **changes).assert_kernel_equals_specification()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("cache_dtype", [None, INT8, FP8], ids=["plain", "int8", "fp8"])
def test_a_bad_number_is_kept_or_makes_its_scale_nan(bad: float, cache_dtype: torch.dtype | None) -> None:
    Write(cache_dtype=cache_dtype).assert_kernel_equals_specification(bad=bad)


def test_no_tokens_write_nothing() -> None:
    assert all((part == -7).all() for part in Write(slots=()).run(kernels.store_keys_values))
