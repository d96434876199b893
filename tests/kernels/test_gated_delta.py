"""The kernels of linear attention in Triton's interpreter, against their specifications."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanoinfer.ops.delta_rule import spec
from nanoinfer.ops.delta_rule import triton as kernels
from tests.kernels.helpers import exact_bfloat16

__all__ = ["exact_bfloat16"]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")


class Case(NamedTuple):
    """The arguments of `gated_delta_step`."""

    qkvz: Tensor
    ba: Tensor
    rows: Tensor
    positions: Tensor
    matrices: Tensor
    conv_inputs: Tensor
    weights: spec.DeltaRuleWeights

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
        spec.DeltaRuleWeights(
            randn(channels, width),
            randn(heads, dtype=torch.float32),
            randn(heads, dtype=torch.float32),
            randn(value_dim),
            1e-6,
        ),
    )


def check_step(case: Case, tolerance: float) -> None:
    """Results and states of the kernel are those of the specification; the spare place may be any."""
    expected, given = case.clone(), case.clone()
    out = spec.gated_delta_step.__wrapped__(*expected)  # type: ignore[attr-defined]
    torch.testing.assert_close(kernels.gated_delta_step(*given)[:3], out[:3], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(given.matrices[:4], expected.matrices[:4], atol=tolerance, rtol=tolerance)
    assert torch.equal(given.conv_inputs[:4], expected.conv_inputs[:4])
    assert torch.equal(given.matrices[1], case.matrices[1]), "the state of a row that is not in the step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "sizes", [(2, 2, 16, 16, 4), (1, 3, 8, 12, 2), (2, 1, 24, 8, 4)], ids=["groups", "narrow", "odd sizes"]
)
def test_a_step_of_the_delta_rule_equals_its_specification(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_step(random_case(*sizes, dtype), 1e-5 if dtype == torch.float32 else 4e-3)


def check_prefill(
    lens: tuple[int, ...],
    starts: tuple[int, ...],
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    decay: float,
    tolerance: float,
    device: str = "cpu",
) -> None:
    """Results and states are those of the specification. decay: the most that a state loses by a token (log)."""
    case = random_case(*sizes, dtype, device)
    generator = torch.Generator().manual_seed(sum(lens))
    num_tokens, num_places = sum(lens), len(lens) + 2

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkvz, ba = randn(num_tokens, case.qkvz.shape[1]), randn(num_tokens, case.ba.shape[1])
    qkvz[num_tokens // 2 :] = qkvz[-1]  # keys that repeat: powers of a chunk's matrix would be huge
    weights = case.weights._replace(a_log=torch.full_like(case.weights.a_log, decay).log())
    # A column of the packet's chunks, as in a step of an engine. Places 0 and the last one are not used.
    rows = torch.arange(len(lens), 0, -1, dtype=torch.int32, device=device).repeat(3, 1).t().contiguous()[:, 0]
    matrices = randn(num_places, *case.matrices.shape[1:], dtype=torch.float32)
    conv_inputs = randn(num_places, *case.conv_inputs.shape[1:])
    for row, start in zip(rows, starts, strict=True):
        if start == 0:
            matrices[row], conv_inputs[row] = float("nan"), float("nan")  # nothing may read these
    contexts = tuple(start + length for start, length in zip(starts, lens, strict=True))
    (expected, *wanted), (out, *states) = (
        (function(qkvz, ba, rows, lens, contexts, *copies, weights), *copies)
        for function in (spec.gated_delta_prefill.__wrapped__, kernels.gated_delta_prefill)  # type: ignore[attr-defined]
        for copies in [(matrices.clone(), conv_inputs.clone())]
    )
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states[0], wanted[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states[1], wanted[1], atol=0, rtol=0, equal_nan=True)


def test_the_layers_of_a_step_share_its_tables_and_steps_and_streams_do_not() -> None:
    cpu = torch.device("cpu")
    of_step = kernels._tables((70, 2), (70, 5), cpu, 0)
    assert [table.tolist() for table in of_step] == [[[0, 70, 0], [70, 2, 3]], [[0, 0], [0, 64], [1, 0]]]
    assert kernels._tables((70, 2), (70, 5), cpu, 0) is of_step
    assert kernels._tables((70, 2), (70, 5), cpu, 1) is not of_step
    assert kernels._tables((2,), (5,), cpu, 1)[0].tolist() == [[0, 2, 3]]


ODD = pytest.param((70, 2, 64, 1), (0, 1, 7, 3), (2, 2, 12, 20, 4), id="several sequences, odd sizes")


# Decays are added up over a chunk, so what strong ones leave is known less precisely, by the specification too.
@pytest.mark.parametrize(("decay", "tolerance"), [(0.0, 1e-4), (0.5, 1e-4), (60.0, 2e-3)])
@pytest.mark.parametrize(
    ("lens", "starts", "sizes"),
    [
        pytest.param((1,), (0,), (1, 1, 16, 16, 4), id="a token"),
        pytest.param((3, 130), (2, 0), (1, 3, 24, 40, 2), id="a narrow convolution"),
        ODD,
    ],
)
def test_a_prefill_step_of_the_delta_rule_equals_its_specification(
    lens: tuple[int, ...],
    starts: tuple[int, ...],
    sizes: tuple[int, int, int, int, int],
    decay: float,
    tolerance: float,
) -> None:
    check_prefill(lens, starts, sizes, torch.float32, decay, tolerance)


@pytest.mark.usefixtures("exact_bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("lens", "starts", "sizes"), [ODD])
def test_inputs_in_16_bits_lose_no_more_in_prefill_than_in_the_specification(
    lens: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_prefill(lens, starts, sizes, dtype, 0.5, 4e-3 if dtype == torch.float16 else 3e-2)
