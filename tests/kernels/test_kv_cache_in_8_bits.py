"""Writing a KV cache in 8 bits, and widening it, in Triton's interpreter, against the specifications.

Reading: test_attention_kernels.py.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.layers.attention.backend import TorchBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata
from nanoinfer.ops.kv_cache import spec
from nanoinfer.ops.kv_cache.spec import LayerCache, quantize_vectors
from tests.attention_cases import FP8, INT8, Case, Layer, assert_close, random_step

pytest.importorskip("triton")

from nanoinfer.layers.attention import triton as triton_backend
from nanoinfer.layers.attention.triton import TritonBackend
from nanoinfer.ops.kv_cache import triton as kernels
from tests.kernels.helpers import exact_fp8, loops_are_interpreted

__all__ = ["exact_fp8"]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    pytest.mark.usefixtures("exact_fp8"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy warns of NaN
]
FORMATS = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
BAD = [float("nan"), float("inf"), float("-inf")]


@dataclass
class Write:
    """Eight tokens, of which two have no slot, and the cache of 48 slots that they are written to."""

    cache_dtype: torch.dtype
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    has_norms: bool = True
    rotary_dim: int | None = None
    dtype: torch.dtype = torch.float32
    slots: tuple[int, ...] = (33, -1, 0, 15, 16, -1, 47, 20)

    def qkv(self) -> Tensor:
        size = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (3 * torch.randn(8, size, generator=torch.Generator().manual_seed(0))).to(self.dtype)

    def run(self, function: Any, qkv: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], LayerCache]:
        generator = torch.Generator().manual_seed(1)
        weights = None
        if self.has_norms:
            weights = tuple((1 + 0.3 * torch.randn(self.head_dim, generator=generator)).to(self.dtype) for _ in "qk")
        angles = torch.randn(40, (self.rotary_dim or self.head_dim) // 2, generator=generator)
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        shape = (48 // self.block_size, self.num_kv_heads, self.block_size, self.head_dim)
        k, v = (torch.full(shape, -7, dtype=torch.int8).to(self.cache_dtype) for _ in "kv")
        k_scales, v_scales = (torch.full(shape[:-1], -7.0) for _ in "kv")
        cache = LayerCache(k, v, k_scales, v_scales)
        positions = torch.tensor([0, 1, 2, 39, 39, 7, 20, 0])
        slots = torch.tensor(self.slots)
        qkv = qkv.clone()
        return function(qkv, weights, 1e-5, positions, table, cache, slots), cache

    def assert_kernel_equals_specification(self, qkv: Tensor | None = None) -> LayerCache:
        """Compare the caches bit by bit, given the same keys and values: these may differ in their last bit."""
        qkv = self.qkv() if qkv is None else qkv
        (q, k, v), cache = self.run(kernels.norm_rope_store, qkv)
        specification, _ = self.run(spec.norm_rope_store, qkv)
        for ours, expected in zip((q, k, v), specification, strict=True):
            eps = 4 * torch.finfo(self.dtype).eps
            torch.testing.assert_close(ours, expected, rtol=eps, atol=eps, equal_nan=True)
        kept = [token for token, slot in enumerate(self.slots) if slot >= 0]
        blocks = torch.tensor([self.slots[token] // self.block_size for token in kept])
        offsets = torch.tensor([self.slots[token] % self.block_size for token in kept])
        for x, values, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
            assert scales is not None
            expected_values, expected_scales = quantize_vectors(x[kept], self.cache_dtype)
            assert torch.equal(values[blocks, :, offsets].float(), expected_values.float())
            torch.testing.assert_close(scales[blocks, :, offsets], expected_scales, rtol=0, atol=0, equal_nan=True)
            untouched = torch.ones(scales.shape[0], scales.shape[2], dtype=torch.bool)
            untouched[blocks, offsets] = False
            assert (scales.transpose(1, 2)[untouched] == -7).all()
            assert (values.float().transpose(1, 2)[untouched] == -7).all()
        return cache


@FORMATS
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 128, "has_norms": False, "dtype": torch.float16},
        {"head_dim": 80, "rotary_dim": 40},
        {"head_dim": 256, "num_heads": 3, "num_kv_heads": 1, "dtype": torch.bfloat16},
        {"head_dim": 96, "num_heads": 7, "num_kv_heads": 7, "block_size": 48},
        {"num_heads": 16, "num_kv_heads": 8},
    ],
    ids=str,
)
def test_keys_and_values_are_rounded_as_by_the_specification(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    replace(Write(dtype), **changes).assert_kernel_equals_specification()


@FORMATS
def test_zeros_and_outliers_are_rounded_as_by_the_specification(dtype: torch.dtype) -> None:
    step = Write(dtype, has_norms=False)
    heads = step.qkv().view(8, 8, 64)
    heads[0, 4:] = 0
    heads[2, :, 9] = 3000.0
    heads[3, 6:] = 1e-41
    heads[4, 6:] = 3e38
    cache = step.assert_kernel_equals_specification(heads.view(8, -1))
    assert cache.k_scales is not None
    assert not cache.k_scales[2, :, 1].any(), "slot 33"


@FORMATS
@pytest.mark.parametrize("bad", BAD)
def test_nan_and_infinity_spoil_their_own_vector_alone(dtype: torch.dtype, bad: float) -> None:
    step = Write(dtype, has_norms=False)
    heads = step.qkv().view(8, 8, 64)
    heads[0, 7, 40] = bad  # the second KV head's value of the token in slot 33
    heads[2, 4, 3] = bad  # the first KV head's key of the one in slot 0
    cache = step.assert_kernel_equals_specification(heads.view(8, -1))
    assert cache.k_scales is not None
    assert cache.v_scales is not None
    assert cache.v_scales.isnan().nonzero().tolist() == [[2, 1, 1]]
    assert cache.k_scales.isnan().nonzero().tolist() == [[0, 0, 0]]


# --- and read again ---


@loops_are_interpreted
@FORMATS
def test_small_values_keep_their_digits_in_float16(dtype: torch.dtype) -> None:
    """The scale of a value of 0.001 is 2e-6 or 8e-6, and times a weight it is no normal number of float16."""
    for case in (Case(Layer(cache_dtype=dtype), (33, 70)), Case(Layer(cache_dtype=dtype), (33, 70), (33, 5))):
        step = case.step(dtype=torch.float16)
        values = (step.cache.v.float() / 127 * 1e-3).unbind()
        v, scales = quantize_vectors(torch.stack(values), dtype)
        step.cache = replace(step.cache, v=v, v_scales=torch.where(step.cache.v_scales.isnan(), torch.nan, scales))
        actual, expected = step.run(TritonBackend(step.spec)).float(), step.run_specification()
        assert (actual - expected).abs().max() < 4e-3 * expected.abs().max()


@loops_are_interpreted
@FORMATS
@pytest.mark.parametrize("query_lens", [None, (40, 17, 3)], ids=["decode", "prefill"])
def test_a_token_of_nan_spoils_its_own_sequence_alone(dtype: torch.dtype, query_lens: tuple[int, ...] | None) -> None:
    step = Case(Layer(num_kv_heads=1, cache_dtype=dtype), (40, 33, 3), query_lens).step()
    backend = TritonBackend(step.spec)
    expected = step.run(backend)
    metadata = step.metadata
    assert step.cache.v_scales is not None
    step.cache.v_scales[metadata.block_tables[1, 0], 0, 2] = torch.nan
    actual = step.run(backend)
    if isinstance(metadata, PrefillMetadata):
        spoilt = slice(40, 57)
        assert actual[spoilt].isnan().all()
    else:
        assert isinstance(metadata, DecodeMetadata)
        spoilt = slice(1, 2)
        assert actual[spoilt].isnan().all()
    actual[spoilt] = expected[spoilt]
    assert_close(actual, expected)


# --- widening ---


@loops_are_interpreted
@FORMATS
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_blocks_are_widened_as_by_the_specification(dtype: torch.dtype, head_dim: int) -> None:
    layer = Layer(head_dim=head_dim, block_size=48, cache_dtype=dtype)
    cache = random_step(layer, [300], [3]).cache
    block_ids = torch.tensor([5, 0, 2], dtype=torch.int32)
    expected = torch.full((4, *cache.k.shape[1:]), 7.0, dtype=torch.float16)
    actual = expected.clone()
    kernels.widen_blocks(cache.k, cache.k_scales, block_ids, actual)
    spec.widen_blocks(cache.k, cache.k_scales, block_ids, expected)
    assert torch.equal(actual.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert (actual[3] == 7).all(), "only the first places are written"


@FORMATS
@pytest.mark.parametrize("num_more", [0, 3])  # the host's count is an upper bound
def test_a_step_over_widened_blocks_reads_what_it_reads_in_the_cache(dtype: torch.dtype, num_more: int) -> None:
    """Two chunks have the same blocks; tables end in blocks that nobody reads, of which one is not there."""
    step = random_step(Layer(cache_dtype=dtype), [40, 40, 7, 100], [10, 20, 7, 1])
    metadata = step.metadata
    assert isinstance(metadata, PrefillMetadata)
    tables = metadata.block_tables
    tables[1] = tables[0]
    tables[2, 1:] = 10**6
    num_read = 3 + 1 + 7
    step.metadata = metadata = replace(metadata, num_blocks=num_read + num_more)
    blocks = triton_backend.list_blocks(metadata, len(step.cache.k), 16)
    assert blocks is not None
    assert sorted(blocks.block_ids[:num_read].tolist()) == blocks.block_ids[:num_read].tolist()
    wide = triton_backend.widened_cache(step.cache, blocks, torch.float32)
    expected = step.run(TorchBackend(step.spec))
    step.cache, step.metadata = wide, replace(metadata, block_tables=blocks.block_tables)
    # `k` and `v` of the step are those before rounding, so a chunk without a prefix has to read the cache, too.
    k, v = (side[blocks.block_tables[2, 0].long()][:, :7].transpose(0, 1) for side in (wide.k, wide.v))
    step.k = step.k.clone()
    step.k[30:37], step.v[30:37] = k, v
    assert_close(step.run(TorchBackend(step.spec)), expected)


def test_more_blocks_than_there_is_room_for_are_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    step = random_step(Layer(cache_dtype=INT8), [40, 100], [10, 1])
    assert isinstance(step.metadata, PrefillMetadata)
    assert triton_backend.list_blocks(step.metadata, len(step.cache.k), 16) is not None
    assert triton_backend.list_blocks(replace(step.metadata, num_blocks=0), len(step.cache.k), 16) is None
    monkeypatch.setattr(triton_backend, "MAX_WIDENED_TOKENS", 16 * (step.metadata.num_blocks - 1))
    assert triton_backend.list_blocks(step.metadata, len(step.cache.k), 16) is None
