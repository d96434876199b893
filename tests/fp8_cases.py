"""What FP8 products and experts are held against on any device: float64, and how far from it a kernel may be.

Hopper's tensor cores add up FP8 products with about 14 bits, so a kernel does not equal its specification to the last
bit. Where experts round SwiGLU's results to e4m3, sums that differ by 0.1% round to another neighbour in some 5% of the
cases. The results of kernel and specification then differ by more than 1%, and yet both are equally far from the
unrounded result, about 2.5%.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import QuantizedRows, RowFormat
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.fp8.spec import dequantize_rows, dequantize_weight


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within a share of the size of their row."""
    size = expected.double().square().mean(dim=-1, keepdim=True).sqrt()
    assert ((actual.double() - expected.double()).abs() <= tolerance * (expected.double().abs() + size)).all()


def assert_few_differ(actual: Tensor, expected: Tensor, rtol: float, atol: float = 0.0) -> None:
    """One value in 10,000 may be another, which is near: one that lies between two roundings."""
    actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    assert (actual != expected).sum() <= 1 + 1e-4 * actual.numel()


def unrounded_expert_mlp(
    x: Tensor,
    x_scales: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    down_format: RowFormat,
    expert_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    is_geglu: bool = False,
) -> Tensor:
    """Return what `fp8_expert_mlp` would in float64, with nothing rounded on the way; the formats do not matter."""
    wide = dequantize_rows(QuantizedRows(x, x_scales)).double()
    terms = wide.new_zeros(expert_ids.shape[1], *wide.shape)
    for expert in range(len(gate_up.values)):
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        first, second = (dequantize_weight(*(part[expert] for part in both[:2])).double() for both in (gate_up, down))
        gate, up = (wide[token] @ first.t()).chunk(2, 1)
        activated = F.gelu(gate, approximate="tanh") if is_geglu else F.silu(gate)
        result = (activated * up) @ second.t()
        terms[choice, token] = result * weights[token, choice].unsqueeze(1)
    return terms


def assert_experts_are_as_good_as_specified(actual: Tensor, specified: Tensor, unrounded: Tensor) -> None:
    """Together, pair by pair, and value by value. All: (num_choices, num_tokens, hidden_size).

    specified: what the specification gives. With sums wrong by 0.14%, which is what 4,096 values lose, simulations of
    20,000 pairs found errors of 1.00 to 1.01 times the specification's together, and at most 1.3 times it in a pair; no
    value differed from the specified one by 0.1 of its row.
    """
    error, specified_error = ((result.double() - unrounded).norm(dim=-1) for result in (actual, specified))
    # What a handful of pairs lose also depends on chance.
    assert error.norm() <= (1.05 if error.numel() > 64 else 1.25) * specified_error.norm()
    assert (error <= 1.5 * specified_error).all()
    assert_near(actual, specified, 0.3)
