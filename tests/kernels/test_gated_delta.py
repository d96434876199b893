"""The kernels of linear attention in Triton's interpreter, against their twins, and these against transformers."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanoinfer.kernels import chunked_delta_rule as chunk_kernels
from nanoinfer.kernels import gated_delta_step as step_kernels
from nanoinfer.layers.linear_attention import delta_rule

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")


class Case(NamedTuple):
    """The arguments of `gated_delta_step`."""

    qkvz: Tensor
    ba: Tensor
    rows: Tensor
    positions: Tensor
    matrices: Tensor
    conv_inputs: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    eps: float = 1e-6

    def clone(self) -> "Case":
        return Case(*(field.clone() if isinstance(field, Tensor) else field for field in self))


def random_case(
    key_heads: int, group: int, key_dim: int, value_dim: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> Case:
    """Rows 3, 0 and 2 of four places; the second of them begins anew, the last is padding."""
    generator = torch.Generator().manual_seed(key_heads * key_dim + value_dim)
    heads = key_heads * group
    channels = 2 * key_heads * key_dim + heads * value_dim

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return Case(
        randn(4, channels + heads * value_dim),
        randn(4, 2 * heads),
        torch.tensor([3, 0, 2, -1], dtype=torch.int32, device=device),
        torch.tensor([7, 0, 2, 0], device=device),
        randn(5, heads, key_dim, value_dim, dtype=torch.float32),
        randn(5, width, channels),
        randn(channels, width),
        randn(heads, dtype=torch.float32),
        randn(heads, dtype=torch.float32),
        randn(value_dim),
    )


def check_step(case: Case, tolerance: float) -> None:
    """The kernel's results and the states that it leaves are those of the twin; the spare place may hold anything."""
    expected, given = case.clone(), case.clone()
    out = delta_rule.gated_delta_step.__wrapped__(*expected)  # type: ignore[attr-defined]
    torch.testing.assert_close(step_kernels.gated_delta_step(*given)[:3], out[:3], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(given.matrices[:4], expected.matrices[:4], atol=tolerance, rtol=tolerance)
    assert torch.equal(given.conv_inputs[:4], expected.conv_inputs[:4])
    assert torch.equal(given.matrices[1], case.matrices[1]), "the state of a row that is not in the step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "sizes", [(2, 2, 16, 16, 4), (1, 3, 8, 12, 2), (2, 1, 24, 8, 4)], ids=["groups", "narrow", "odd sizes"]
)
def test_a_step_of_the_delta_rule_equals_its_twin(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check_step(random_case(*sizes, dtype), 1e-5 if dtype == torch.float32 else 4e-3)


def check_chunks(
    lens: tuple[int, ...], heads: int, key_dim: int, value_dim: int, tolerance: float, decay: float, device: str = "cpu"
) -> None:
    """The kernels' results are those of the twin. decay: how much of a state is lost with a token, at most (log)."""
    generator = torch.Generator().manual_seed(sum(lens) + key_dim)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(randn(sum(lens), heads, key_dim), dim=-1) for _ in range(2))
    k[sum(lens) // 2 :] = k[-1]  # keys that repeat: powers of a chunk's matrix would be huge
    v, beta = randn(sum(lens), heads, value_dim), randn(sum(lens), heads).sigmoid()
    g, initial = -decay * randn(sum(lens), heads).sigmoid(), randn(len(lens), heads, key_dim, value_dim)
    tensors = [x.to(device) for x in (q, k, v, g, beta, initial)]
    expected = delta_rule.chunked_delta_rule.__wrapped__(*tensors, lens)  # type: ignore[attr-defined]
    for actual, wanted in zip(chunk_kernels.chunked_delta_rule(*tensors, lens), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


# Decays are added up over a chunk, so what strong ones leave is known less precisely, by the twin too.
@pytest.mark.parametrize(("decay", "tolerance"), [(0.0, 3e-5), (0.5, 3e-5), (60.0, 2e-3)])
@pytest.mark.parametrize(
    ("lens", "sizes"),
    [((1,), (1, 16, 16)), ((70, 1, 64), (2, 12, 20)), ((3, 130), (1, 24, 40))],
    ids=["a token", "several sequences", "odd sizes"],
)
def test_chunks_of_the_delta_rule_equal_their_twin(
    lens: tuple[int, ...], sizes: tuple[int, int, int], decay: float, tolerance: float
) -> None:
    check_chunks(lens, *sizes, tolerance=tolerance, decay=decay)
