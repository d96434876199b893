"""The Triton kernels in Triton's interpreter, on the CPU, against their specifications. On a GPU: tests/gpu.

Those of attention have a file of their own.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.distributed.cuda_ipc import RELEASED
from nanoinfer.ops.activations import spec as activations
from nanoinfer.ops.all_reduce_norm import spec as all_reduce_norm
from nanoinfer.ops.block_tables import spec as table_ops
from nanoinfer.ops.common.symmetric_buffers import BITS, SymmetricBuffers, empty_bits
from nanoinfer.ops.filter_threshold import spec as filter_threshold
from nanoinfer.ops.gumbel_max import spec as gumbel_max
from nanoinfer.ops.gumbel_max.spec import sample
from nanoinfer.ops.kv_cache import spec as kv_cache
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.logits import spec as logit_ops
from nanoinfer.ops.norms import spec as norms

triton = pytest.importorskip("triton")

from nanoinfer.ops.activations import triton as gated_kernels  # noqa: E402
from nanoinfer.ops.all_reduce_norm import triton as all_reduce_kernels  # noqa: E402
from nanoinfer.ops.barrier.triton import barrier  # noqa: E402
from nanoinfer.ops.block_tables import triton as table_kernels  # noqa: E402
from nanoinfer.ops.filter_threshold import triton as threshold_kernels  # noqa: E402
from nanoinfer.ops.gumbel_max.triton import (  # noqa: E402
    GROUP_SIZE,
    TILE_GROUPS,
    best_candidates,
    enter_counted,
    line_tables,
    sample_and_append,
    sample_at,
)
from nanoinfer.ops.kv_cache import triton as kv_cache_kernels  # noqa: E402
from nanoinfer.ops.logits import triton as logit_kernels  # noqa: E402
from nanoinfer.ops.norms import triton as norm_kernels  # noqa: E402
from tests.kernels.helpers import loops_are_interpreted  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")

NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_without_a_gpu_the_kernels_are_interpreted() -> None:
    assert triton.knobs.runtime.interpret


def assert_nearly_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of a few elements: sums are taken in another order, and quotients rounded."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- rms_norm ---


SIZES_AND_DTYPES = [(1, torch.float32), (96, torch.float16), (1000, torch.float32), (1025, torch.float16)]


@pytest.mark.parametrize("num_terms", [1, 3])
@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_a_norm_that_subtracts_the_mean_equals_its_specification(size: int, dtype: torch.dtype, num_terms: int) -> None:
    x, residual = 1 + randn(num_terms, 4, size, dtype=dtype), randn(4, size, seed=1, dtype=dtype)
    weight = randn(size, seed=2)
    arguments = x, residual, weight, 1e-5
    out, total = norm_kernels.add_rms_norm(*arguments, centres=True)
    expected, expected_total = norms.add_rms_norm(*arguments, centres=True)
    assert_nearly_equal(total, expected_total)
    # The specification adds up terms in their own dtype.
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    alone, specification = (module.rms_norm(x[0], weight, 1e-5, centres=True) for module in (norm_kernels, norms))
    torch.testing.assert_close(alone, specification, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_add_layer_norm_equals_its_specification(size: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, residual, weight, bias = (1 + randn(4, size, seed=seed, dtype=dtype) for seed in range(4))
    unchanged, arguments = x.clone(), (residual, weight[0], bias[0] if has_bias else None, 1e-5)
    expected_total = torch.empty_like(x)
    expected = norms.add_layer_norm(x, *arguments, total=expected_total)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(norm_kernels.add_layer_norm(x, *arguments), expected, rtol=0, atol=tolerance)
    assert torch.equal(x, unchanged)
    in_place = norm_kernels.add_layer_norm(x, *arguments, total=x)
    torch.testing.assert_close(in_place, expected, rtol=0, atol=tolerance)
    assert torch.equal(x, expected_total)


def test_add_layer_norm_takes_contiguous_rows_alone() -> None:
    x, weight = randn(4, 8), randn(8)
    with pytest.raises(AssertionError, match="residual must be contiguous"):
        norm_kernels.add_layer_norm(x, randn(8, 4).t(), weight, None, 1e-5)


@pytest.mark.parametrize(("size", "dtype"), [*SIZES_AND_DTYPES, (8192, torch.float16)])
def test_rms_norm_of_rows_of_any_size_equals_its_specification(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(3, size, seed=seed, dtype=dtype) for seed in range(3))
    unchanged = x.clone(), residual.clone()
    assert_nearly_equal(norm_kernels.rms_norm(x, weight[0], 1e-5), norms.rms_norm(x, weight[0], 1e-5))
    part, rows = (torch.cat([x, residual], dim=1) for _ in range(2))  # the rows of x in wider ones, in place
    assert norm_kernels.rms_norm(part[:, :size], weight[0], 1e-5, out=part[:, :size]).shape == x.shape
    norms.rms_norm(rows[:, :size], weight[0], 1e-5, out=rows[:, :size])
    assert_nearly_equal(part, rows)
    assert torch.equal(part[:, size:], residual)
    out, total = norm_kernels.add_rms_norm(x, residual, weight[0], 1e-5)
    expected, expected_total = norms.add_rms_norm(x, residual, weight[0], 1e-5)
    assert torch.equal(total, expected_total), "the sum is rounded before it is normalised"
    assert_nearly_equal(out, expected)
    assert torch.equal(x, unchanged[0])
    assert torch.equal(residual, unchanged[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_add_rms_norm_adds_up_partial_sums_in_float32(dtype: torch.dtype) -> None:
    parts, residual, weight = randn(4, 3, 96), randn(3, 96, seed=1, dtype=dtype), randn(96, dtype=dtype)
    out, total = norm_kernels.add_rms_norm(parts, residual, weight, 1e-5)
    expected, expected_total = norms.add_rms_norm(parts, residual, weight, 1e-5)
    assert out.dtype == total.dtype == dtype
    assert_nearly_equal(total, expected_total)
    assert_nearly_equal(out, expected)
    assert_nearly_equal(total, (parts[0] + parts[1] + parts[2] + parts[3] + residual).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 1024, 1025])
def test_float32_weights_multiply_before_rounding_and_a_sum_is_normalised_before_its_addition(
    size: int, dtype: torch.dtype
) -> None:
    x, residual = randn(3, size, dtype=dtype), randn(3, size, seed=1, dtype=dtype)
    weight, sum_weight, parts = 1 + 0.3 * randn(size, seed=2), 1 + 0.3 * randn(size, seed=3), randn(4, 3, size, seed=4)
    out = norm_kernels.rms_norm(x, weight, 1e-5)
    assert_nearly_equal(out, norms.rms_norm(x, weight, 1e-5))
    assert not torch.equal(out, norms.rms_norm(x, weight.to(dtype), 1e-5))
    for terms in (x, parts, parts.to(dtype)):
        results = norm_kernels.add_rms_norm(terms, residual, weight, 1e-5, sum_weight)
        expected = norms.add_rms_norm(terms, residual, weight, 1e-5, sum_weight)
        for ours, specification in zip(results, expected, strict=True):
            assert_nearly_equal(ours, specification)
        assert not torch.equal(results[1], norms.add_rms_norm(terms, residual, weight, 1e-5)[1])


@pytest.mark.parametrize("has_sum_weight", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(96, torch.float16), (1025, torch.bfloat16)])
def test_add_rms_norm_adds_the_terms_of_other_ranks_and_writes_where_it_is_told(
    size: int, dtype: torch.dtype, has_sum_weight: bool
) -> None:
    x, residual, weight = randn(5, size, dtype=dtype), randn(5, size, seed=1, dtype=dtype), randn(size, dtype=dtype)
    other_terms = randn(3, 7 * size, seed=2, dtype=dtype)[:, : 5 * size].unflatten(1, (5, size))
    sum_weight = 1 + 0.3 * randn(size, seed=3) if has_sum_weight else None
    unchanged, rows = x.clone(), torch.full((7, size), NAN, dtype=dtype)
    out, total = norm_kernels.add_rms_norm(x, residual, weight, 1e-5, sum_weight, other_terms, out=rows[1:6])
    expected = norms.add_rms_norm(torch.stack([x, *other_terms]).float(), residual, weight, 1e-5, sum_weight)
    specification = norms.add_rms_norm(
        x, residual, weight, 1e-5, sum_weight, other_terms, out=torch.empty_like(residual)
    )
    for ours, other, wanted in zip((out, total), specification, expected, strict=True):
        assert_nearly_equal(ours, wanted)
        assert_nearly_equal(other, wanted)
    assert torch.equal(rows[1:6], out)
    assert rows[[0, 6]].isnan().all()
    assert torch.equal(x, unchanged)


def test_rms_norm_reads_rows_out_of_wider_ones() -> None:
    wide, wider, weight = randn(4, 100), randn(4, 200, seed=1), randn(60)
    x, residual = wide[:, 20:80], wider[:, 100:160]
    actual = norm_kernels.add_rms_norm(x, residual, weight, 1e-5)
    for ours, specification in zip(actual, norms.add_rms_norm(x, residual, weight, 1e-5), strict=True):
        assert_nearly_equal(ours, specification)
    with pytest.raises(AssertionError, match="residual must be contiguous in its last dimension"):
        norm_kernels.add_rms_norm(x, wider[:, 0:120:2], weight, 1e-5)


def test_rms_norm_takes_any_shape_keeps_zeros_finite_and_nan_in_its_row() -> None:
    for shape in ((64,), (2, 3, 64), (0, 64)):
        x, weight = randn(*shape), randn(64)
        assert_nearly_equal(norm_kernels.rms_norm(x, weight, 1e-5), norms.rms_norm(x, weight, 1e-5))
    x = torch.tensor([[0.0, 0.0], [NAN, 1.0], [3.0, 3.0]])
    out = norm_kernels.rms_norm(x, torch.ones(2), 1e-6)
    assert out[0].tolist() == [0.0, 0.0]
    assert out[1].isnan().all()
    torch.testing.assert_close(out[2], torch.ones(2))


# --- all_reduce_add_rms_norm ---

NUM_RANKS, NUM_TOKENS, MAX_TOKENS = 4, 6, 8


def bits(x: Tensor) -> Tensor:
    """What is sent for these numbers."""
    return torch.where(x == 0, 0, x.view(BITS[x.dtype]))


class AllRanks:
    """All ranks' buffers, in which one rank finds what the others send it in an all-reduce, before it begins."""

    def __init__(
        self,
        size: int,
        two_shot: bool,
        rank: int,
        normalises_sum: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.empty = empty_bits(dtype)
        self.rank, self.owned = rank, slice(rank, None, NUM_RANKS) if two_shot else slice(None)
        self.terms = (8 * randn(NUM_RANKS, 2, NUM_TOKENS, size)).round().to(dtype)  # whose sums are exact
        self.residual = randn(NUM_TOKENS, size, seed=9, dtype=dtype)
        self.terms[..., 0], self.residual[:, 0] = 0, 0
        self.weights: tuple[Tensor, float, Tensor | None] = (randn(size, dtype=dtype), 1e-5, None)
        if normalises_sum:
            self.weights = 1 + 0.3 * randn(size, seed=10), 1e-5, 1 + 0.3 * randn(size, seed=11)
        self.weights[0][0] = -1  # times zero it is -0.0, which stands for an entry that has not come
        self.parts = self.terms.sum(1, dtype=torch.float32).to(dtype)
        self.expected, self.expected_total = norms.add_rms_norm(self.parts.float(), self.residual, *self.weights)
        self.received = torch.full((NUM_RANKS, NUM_RANKS, MAX_TOKENS, size), self.empty, dtype=BITS[dtype])
        self.outputs = torch.full((NUM_RANKS, MAX_TOKENS, size), self.empty, dtype=BITS[dtype])
        for peer in range(NUM_RANKS):
            if peer != rank:
                self.received[rank, peer, :NUM_TOKENS][self.owned] = bits(self.parts[peer][self.owned])
                if two_shot:
                    rows = slice(peer, NUM_TOKENS, NUM_RANKS)
                    self.outputs[rank, rows] = bits(self.expected[rows])
        self.buffers = SymmetricBuffers(
            rank, MAX_TOKENS, two_shot, tuple(self.received), tuple(self.outputs), torch.zeros(1, dtype=torch.int64)
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Run the kernel of the rank, whose residual is up to date where it owns the rows."""
        residual = torch.full_like(self.residual, torch.nan)
        residual[self.owned] = self.residual[self.owned]
        return all_reduce_kernels.all_reduce_add_rms_norm(self.terms[self.rank], residual, self.buffers, *self.weights)


@loops_are_interpreted
@pytest.mark.parametrize(
    ("normalises_sum", "dtype"),
    [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float16), (False, torch.float32)],
)
def test_in_one_shot_a_rank_reduces_all_rows_for_itself(normalises_sum: bool, dtype: torch.dtype) -> None:
    ranks = AllRanks(97, two_shot=False, rank=1, normalises_sum=normalises_sum, dtype=dtype)
    specification = all_reduce_norm.all_reduce_add_rms_norm(
        ranks.terms[1], ranks.residual, ranks.buffers, *ranks.weights
    )
    torch.testing.assert_close(specification, (ranks.expected, ranks.expected_total))
    out, total = ranks.run()
    assert_nearly_equal(out, ranks.expected)
    assert_nearly_equal(total, ranks.expected_total)
    sent = torch.full_like(ranks.received, ranks.empty)
    sent[[0, 2, 3], 1, :NUM_TOKENS] = bits(ranks.parts[1])
    assert torch.equal(ranks.received, sent), "what came to it is taken away, and all others have its part"
    assert (ranks.outputs == ranks.empty).all()


@loops_are_interpreted
@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize(("size", "normalises_sum"), [(1024, False), (1000, True)])
def test_in_two_shot_a_rank_reduces_its_rows_for_all(size: int, normalises_sum: bool, rank: int) -> None:
    ranks = AllRanks(size, True, rank, normalises_sum)
    out, total = ranks.run()
    owned = slice(rank, None, NUM_RANKS)
    assert_nearly_equal(out, ranks.expected)
    assert_nearly_equal(total[owned], ranks.expected_total[owned])
    sent, outputs = (torch.full_like(places, ranks.empty) for places in (ranks.received, ranks.outputs))
    for peer in range(NUM_RANKS):
        if peer != rank:
            rows = slice(peer, NUM_TOKENS, NUM_RANKS)
            sent[peer, rank, rows] = bits(ranks.parts[rank, rows])
            outputs[peer, rank:NUM_TOKENS:NUM_RANKS] = bits(out[owned])
    assert torch.equal(ranks.received, sent)
    assert torch.equal(ranks.outputs, outputs)


@loops_are_interpreted
@pytest.mark.parametrize(
    ("two_shot", "place"),
    [(False, ("received", 3, 5)), (True, ("received", 3, 2)), (True, ("outputs", 5))],
    ids=["a part, one-shot", "a part", "a row that another owns"],
)
@pytest.mark.parametrize("how", ["comes", "released"])
def test_a_rank_waits_for_what_has_not_come_unless_nobody_comes(
    two_shot: bool, place: tuple[str | int, ...], how: str
) -> None:
    ranks = AllRanks(96, two_shot, rank=2)
    row = getattr(ranks, str(place[0]))[2][place[1:]]
    late, row[95] = row[95].item(), ranks.empty
    has_come = threading.Event()

    def come() -> None:
        has_come.set()
        if how == "comes":
            row[95] = late
        else:
            ranks.buffers.released[0] = RELEASED

    timer = threading.Timer(0.2, come)
    timer.start()
    ranks.run()
    assert has_come.is_set()
    timer.join()


# --- barrier ---


@loops_are_interpreted
def test_a_rank_announces_the_epoch_to_all_and_waits_for_theirs() -> None:
    flags, epoch = torch.full((NUM_RANKS, NUM_RANKS), 6), torch.tensor([5])
    flags[:, 1] = 5
    flags[2, 1] = RELEASED
    addresses = torch.tensor([own.data_ptr() for own in flags])
    barrier(flags[1], addresses, epoch, rank=1)
    assert flags[:, 1].tolist() == [6, 6, RELEASED, 6]
    assert epoch.item() == 6
    flags[:, 1] = 6
    assert (flags == 6).all()
    flags[1, 0] = 7
    flags[1, 2] = RELEASED
    has_come = threading.Event()

    def come() -> None:
        has_come.set()
        flags[1, 3] = 8  # which is further

    timer = threading.Timer(0.2, come)
    timer.start()
    barrier(flags[1], addresses, epoch, rank=1)
    assert has_come.is_set()
    timer.join()


# --- sigmoid_and_mul ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_terms", [None, 1, 4])
@pytest.mark.parametrize("size", [24, 1100])
def test_gates_are_added_up_and_multiply_rows_as_specified(
    size: int, num_terms: int | None, dtype: torch.dtype
) -> None:
    """Of rows that are parts of wider ones, as a product of queries and gates leaves them."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(5, size + 8, generator=generator).to(dtype)[:, :size]
    gates = (3 * torch.randn(num_terms or 1, 5, 2 * size, generator=generator)).to(dtype)[..., :size]
    gates[:, 2, :3] = torch.nan
    gates = gates[0] if num_terms is None else gates
    found, expected = (where.sigmoid_and_mul(x, gates) for where in (gated_kernels, activations))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5, equal_nan=True)
    assert found.is_contiguous()
    assert gated_kernels.sigmoid_and_mul(x[:0], gates[..., :0, :]).shape == (0, size)


# --- silu_and_mul, gelu_tanh_and_mul ---

EXP_OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in the interpreter


@EXP_OVERFLOWS
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_a_gated_activation_of_any_size_equals_its_specification(size: int, dtype: torch.dtype, name: str) -> None:
    kernel, specification = getattr(gated_kernels, name), getattr(activations, name)
    for gate_up in (4 * randn(3, 2 * size, dtype=dtype), randn(4, 2 * size + 10)[:, 5:-5], randn(0, 2 * size)):
        unchanged = gate_up.clone()
        # In float32, PyTorch's GELU loses digits where the gate is nearly closed.
        exact = gate_up.double() if gate_up.dtype == torch.float32 else gate_up
        assert_nearly_equal(kernel(gate_up), specification(exact).to(gate_up.dtype))
        assert torch.equal(gate_up, unchanged)


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_gelu_by_the_error_function_of_any_size_equals_its_specification(size: int, dtype: torch.dtype) -> None:
    """Both lose digits where the gate is nearly closed."""
    for gate_up in (4 * randn(3, 2 * size, dtype=dtype), randn(4, 2 * size + 10)[:, 5:-5], randn(0, 2 * size)):
        found, specification = (where.gelu_and_mul(gate_up) for where in (gated_kernels, activations))
        assert found.dtype == specification.dtype
        torch.testing.assert_close(found, specification, rtol=4 * torch.finfo(gate_up.dtype).eps, atol=1e-5)
    assert gated_kernels.gelu_and_mul(torch.tensor([[-200.0, 200.0, 1.0, 2.0]])).tolist() == [[0.0, 400.0]]


@EXP_OVERFLOWS
def test_a_gate_is_closed_where_its_exponential_overflows() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 2.0]])  # gates, then ups
    assert gated_kernels.silu_and_mul(gate_up).tolist() == [[0.0, 400.0]]
    assert gated_kernels.gelu_tanh_and_mul(gate_up).tolist() == [[0.0, 400.0]]


# --- cap_logits ---


@pytest.mark.parametrize(("size", "dtype"), [*SIZES_AND_DTYPES, (9001, torch.float16)])
def test_a_soft_cap_of_any_row_equals_its_specification_and_leaves_what_lies_between_rows(
    size: int, dtype: torch.dtype
) -> None:
    whole = 40 * randn(3, size + 5, dtype=dtype)
    whole[0, 0], whole[1, 0], whole[2, 0] = math.nan, math.inf, -math.inf
    expected = whole.clone()
    logit_ops.cap_logits(expected[:, :size], 30.0)
    capped = logit_kernels.cap_logits(whole[:, :size], 30.0)
    torch.testing.assert_close(capped, expected[:, :size], rtol=4 * torch.finfo(dtype).eps, atol=1e-5, equal_nan=True)
    assert capped[:, 0].tolist()[1:] == [30.0, -30.0]
    assert torch.equal(whole[:, size:], expected[:, size:])


def test_a_soft_cap_of_no_rows_is_none() -> None:
    assert logit_kernels.cap_logits(randn(0, 7), 30.0).shape == (0, 7)


# --- norm_rope_store ---


@dataclass
class HeadsStep:
    """What the step from the qkv product to attention is given, and a cache of -7 for it to write to."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    has_norms: bool = True
    weight_dtype: torch.dtype | None = None  # of the norms; None for that of the heads
    rotary_dim: int | None = None  # of head_dim; None for all
    interleaved: bool = False
    num_splits: int = 1  # of split-K
    slots: tuple[int, ...] = (33, -1, 0, 15, -1, 16, 47, -1)  # of 48, out of order; -1: no slot

    def run(self, norm_rope_store: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        """The results, by name, of the kernel or of its specification; the packed rows are cut out of wider ones."""
        num_tokens, size = len(self.slots), (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        qkv = 3 * randn(self.num_splits, num_tokens, size + 16, dtype=self.dtype)[:, :, :size]
        qkv = qkv if self.num_splits > 1 else qkv[0]
        weights = None
        if self.has_norms:
            dtype = self.weight_dtype or self.dtype
            weights = tuple(1 + 0.3 * randn(self.head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
        positions = torch.tensor([0, 1, 2, 39, 39, 7, 20, 0])[:num_tokens]
        angles = randn(40, (self.rotary_dim or self.head_dim) // 2, seed=3)
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        shape = (48 // self.block_size, self.num_kv_heads, self.block_size, self.head_dim)
        k_cache, v_cache = (torch.full(shape, -7.0, dtype=self.dtype) for _ in "kv")
        slots = torch.tensor(self.slots, dtype=torch.int64)
        inputs = qkv, weights, 1e-5, positions, table, LayerCache(k_cache, v_cache), slots
        q, k, v = norm_rope_store(*inputs, interleaved=self.interleaved)
        assert q.shape == (num_tokens, self.num_heads, self.head_dim)
        assert k.shape == v.shape == (num_tokens, self.num_kv_heads, self.head_dim)
        return {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}


def assert_step_equals_its_specification(step: HeadsStep) -> dict[str, Tensor]:
    actual, expected = step.run(kv_cache_kernels.norm_rope_store), step.run(kv_cache.norm_rope_store)
    for name in actual:
        assert_nearly_equal(actual[name], expected[name])
    if step.num_splits == 1:
        assert torch.equal(actual["v"], expected["v"])
    return actual


@pytest.mark.parametrize(
    ("head_dim", "has_norms", "dtype"),
    [
        (2, True, torch.float32),
        (64, False, torch.float16),
        (80, True, torch.float16),
        (100, False, torch.float32),
        (256, True, torch.float32),
    ],
)
def test_heads_of_any_size_are_normalised_rotated_and_stored_as_by_the_specification(
    head_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """Five tokens with a slot, three without."""
    out = assert_step_equals_its_specification(HeadsStep(head_dim=head_dim, has_norms=has_norms, dtype=dtype))
    for side in ("k", "v"):
        written = (out[f"{side}_cache"] != -7.0).any(dim=-1)
        assert written.sum() == 5 * 2, "nothing else is written"
        assert torch.equal(out[f"{side}_cache"][2, :, 1], out[side][0]), "slot 33 of blocks of 16"


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("num_splits", "rotary_dim"), [(2, None), (4, 48)])
def test_partial_sums_of_queries_keys_and_values_are_added_up_in_float32(
    num_splits: int, rotary_dim: int | None, has_norms: bool
) -> None:
    step = HeadsStep(num_splits=num_splits, rotary_dim=rotary_dim, has_norms=has_norms, dtype=torch.float16)
    out = assert_step_equals_its_specification(step)
    size = (step.num_heads + 2 * step.num_kv_heads) * step.head_dim
    whole = 3 * randn(num_splits, len(step.slots), size + 16, dtype=torch.float16)[:, :, :size]
    values = whole.float().sum(0)[:, -step.num_kv_heads * step.head_dim :].half()
    assert_nearly_equal(out["v"].flatten(1), values)


def test_float32_weights_multiply_heads_of_16_bits_before_these_are_rounded() -> None:
    step = HeadsStep(head_dim=256, dtype=torch.bfloat16, weight_dtype=torch.float32)
    rounded_before = replace(step, weight_dtype=None).run(kv_cache.norm_rope_store)
    assert not torch.equal(assert_step_equals_its_specification(step)["q"], rounded_before["q"])


@pytest.mark.parametrize(
    "options",
    [{}, {"head_dim": 80, "has_norms": False}, {"rotary_dim": 24}, {"num_splits": 3, "dtype": torch.float16}],
    ids=str,
)
def test_neighbouring_dimensions_are_rotated_together_as_by_the_specification(options: dict[str, Any]) -> None:
    step = HeadsStep(**options, interleaved=True)
    out, halves = (
        assert_step_equals_its_specification(step),
        replace(step, interleaved=False).run(kv_cache.norm_rope_store),
    )
    assert not torch.equal(out["q"], halves["q"])
    assert torch.equal(out["v_cache"], halves["v_cache"])


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (96, 72), (100, 2), (128, 126)])
def test_the_first_dimensions_of_heads_are_rotated_as_by_the_specification(
    head_dim: int, rotary_dim: int, has_norms: bool
) -> None:
    step = HeadsStep(head_dim=head_dim, rotary_dim=rotary_dim, has_norms=has_norms)
    assert_step_equals_its_specification(step)
    whole = replace(step, rotary_dim=None).run(kv_cache.norm_rope_store)
    assert not torch.equal(whole["q"], step.run(kv_cache.norm_rope_store)["q"])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size"), [(1, 1, 1), (3, 3, 3), (10, 5, 16), (7, 1, 48), (16, 8, 16)]
)
def test_any_number_of_heads_equals_its_specification(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    """Programs that hold queries, keys and values together, and heads past the last, included."""
    assert_step_equals_its_specification(HeadsStep(num_heads, num_kv_heads, block_size=block_size, slots=(33, -1, 0)))


@pytest.mark.parametrize("slots", [(-1, -1), ()])
def test_a_step_without_slots_writes_nothing(slots: tuple[int, ...]) -> None:
    out = assert_step_equals_its_specification(HeadsStep(slots=slots))
    assert (out["k_cache"] == -7.0).all()
    assert (out["v_cache"] == -7.0).all()


@pytest.mark.usefixtures("overflows_are_checked")
def test_a_slot_past_two_to_the_31_elements_is_reached() -> None:
    """The caches are 4 GiB of virtual memory each, of which the test touches a page."""
    num_blocks = 2**31 // (2 * 16 * 64) + 1
    k_cache, v_cache = (torch.empty(num_blocks, 2, 16, 64, dtype=torch.float16) for _ in "kv")
    qkv, table = randn(1, 6 * 64, dtype=torch.float16), torch.tensor([[1.0] * 32 + [0.0] * 32])
    zero, last_slot = torch.tensor([0]), torch.tensor([num_blocks * 16 - 1])
    cache = LayerCache(k_cache, v_cache)
    _, k, v = kv_cache_kernels.norm_rope_store(qkv, None, 1e-5, zero, table, cache, last_slot)
    assert torch.equal(k_cache[-1, :, -1], k[0])
    assert torch.equal(v_cache[-1, :, -1], v[0])


def test_norm_rope_store_refuses_what_it_would_misread() -> None:
    qkv, table, zero = randn(1, 3 * 64), randn(1, 64), torch.tensor([0])
    cache, strided = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 32, 64)[:, :, ::2]
    for given, k_cache, v_cache, message in (
        (randn(1, 6 * 64)[:, ::2], cache, cache, "rows of qkv must be contiguous"),
        (qkv, strided, cache, "keys of the cache must be contiguous"),
        (qkv, cache, strided, "values of the cache must be contiguous"),
    ):
        with pytest.raises(AssertionError, match=message):
            kv_cache_kernels.norm_rope_store(given, None, 1e-5, zero, table, LayerCache(k_cache, v_cache), zero)


# --- sample ---

TEMPERATURES = [0.0, 1.0, 0.5, 2.0, 0.0, 100.0, 1e-3, 1.0]
SEEDS = [0, 1, -1, 2**40 + 3, 7, 2**63 - 1, -(2**63), 1]
POSITIONS = [0, 0, 5, 100, 1, 131071, 3, 1]


TILE = TILE_GROUPS * GROUP_SIZE.value


def sampling_arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(TEMPERATURES), torch.tensor(SEEDS), torch.tensor(POSITIONS, dtype=torch.int32)


def sample_triton(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The kernel's ids, from tables of as many rows, in which they must be found."""
    num_rows = len(logits)
    width = max(positions.tolist(), default=0) + 1
    token_ids, context_lens = torch.full((num_rows, width), 7, dtype=torch.int32), positions.int().clone()
    ids = sample_and_append(logits, None, torch.arange(num_rows), temperatures, seeds, token_ids, context_lens)
    assert torch.equal(context_lens, positions.int() + 1)
    assert torch.equal(token_ids[torch.arange(num_rows), positions.long()], ids.clamp(min=0))
    assert (token_ids != 7).sum() <= num_rows
    return ids


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, torch.float32), (1001, torch.float16), (TILE, torch.float32), (2 * TILE + 6, torch.float16)],
)
def test_sample_draws_what_its_specification_draws(vocab_size: int, dtype: torch.dtype) -> None:
    logits = 3 * randn(len(SEEDS), vocab_size, dtype=dtype)
    unchanged = logits.clone()
    ids = sample_triton(logits, *sampling_arguments())
    assert ids.dtype == torch.int32
    assert ids.tolist() == sample(logits.clone(), *sampling_arguments()).tolist()
    assert torch.equal(logits, unchanged)


def test_sample_draws_what_its_specification_draws_from_flat_logits_with_many_seeds() -> None:
    """The noise alone decides: 24 draws from 1,500 ids that are all alike."""
    seeds = torch.arange(24)
    arguments = (torch.ones(24), seeds, (seeds * 3).int())
    logits = torch.zeros(24, 1500)
    ids = sample_triton(logits, *arguments).tolist()
    assert ids == sample(logits.clone(), *arguments).tolist()
    assert len(set(ids)) > 18


def test_sample_reads_rows_of_a_padded_matrix_and_no_rows() -> None:
    padded = randn(len(SEEDS), 600)
    padded[:, 500:] = 1e9
    logits = padded[:, :500]
    expected = sample(logits.clone(), *sampling_arguments())
    assert torch.equal(sample_triton(logits, *sampling_arguments()), expected)
    assert sample_triton(logits[:0], *(argument[:0] for argument in sampling_arguments())).tolist() == []


@pytest.mark.parametrize("best", [[2, 3], [TILE - 1, TILE], [0, TILE, 2 * TILE]])
def test_sample_gives_ties_to_the_lowest_id_within_and_across_tiles(best: list[int]) -> None:
    logits = torch.zeros(1, 3 * TILE)
    logits[0, best] = 1.0
    zero = torch.zeros(1)
    assert sample_triton(logits, zero, zero.long(), zero.int()).tolist() == [best[0]]


def test_sample_never_draws_a_logit_of_minus_infinity() -> None:
    logits = torch.full((len(SEEDS), TILE + 10), -math.inf)
    logits[:, TILE + 7] = -3.0  # the first tile has nothing to give
    assert sample_triton(logits, *sampling_arguments()).tolist() == [TILE + 7] * len(SEEDS)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_the_sampling_kernel_gives_no_token_for_a_row_without_a_finite_best(value: float) -> None:
    logits = torch.zeros(4, TILE + 10)
    logits[1:3, TILE + 5 if value != -math.inf else slice(None)] = value
    numbers = torch.arange(4)
    ids = sample_triton(logits, torch.tensor([0.0, 0.0, 1.0, 1.0]), numbers, numbers.int())
    assert (ids >= 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("first_id", [0, 3 * TILE])
def test_the_best_candidates_of_a_shard_are_those_of_the_specification(first_id: int) -> None:
    logits = 3 * randn(len(SEEDS), TILE + 70)
    logits[3] = -math.inf
    logits[4, 5] = math.nan
    temperatures, seeds, positions = sampling_arguments()
    arguments = (logits, first_id, torch.arange(len(SEEDS)), temperatures, seeds, positions)
    scores, ids = best_candidates(*arguments)
    expected_scores, expected_ids = gumbel_max.best_candidates(*arguments)
    torch.testing.assert_close(scores, expected_scores)
    assert scores.isfinite().tolist() == [True, True, True, False, False, True, True, True]
    assert torch.equal(ids[scores.isfinite()], expected_ids[scores.isfinite()])


def test_a_draw_above_thresholds_equals_its_specification() -> None:
    logits, rows = 3 * randn(len(SEEDS), TILE + 70), torch.tensor([0, 1, 2, -1, 4, 5, 6, 7])
    bounds = torch.tensor([-math.inf, 3.0, 6.0, 0.0, 8.0, 9.0, 1e9, NAN])
    temperatures, seeds, _ = sampling_arguments()
    results = []
    for function in (sample_and_append, gumbel_max.sample_and_append.__wrapped__):
        token_ids, context_lens = torch.full((len(SEEDS), 9), 7, dtype=torch.int32), torch.arange(8).int()
        ids = function(logits, bounds, rows, temperatures, seeds, token_ids, context_lens)
        results.append((ids, token_ids, context_lens))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert (results[0][0] >= 0).tolist() == [True, True, True, False, True, True, False, True]
    assert results[0][2].tolist() == [1, 2, 3, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("bounded", [False, True])
def test_a_draw_at_a_position_is_the_one_that_a_row_of_that_length_gets(bounded: bool) -> None:
    """Lines of one row too, which have a seed in common."""
    logits = 3 * randn(len(SEEDS), TILE + 70)
    logits[5, 3] = math.nan
    temperatures, seeds, positions = sampling_arguments()
    seeds[2:5] = seeds[2]
    thresholds = torch.linspace(2.0, 8.0, len(SEEDS)) if bounded else None
    rows = torch.arange(len(SEEDS))
    ids = sample_at(logits, thresholds, rows, temperatures, seeds, positions)
    assert torch.equal(ids, gumbel_max.sample_at.__wrapped__(logits, thresholds, rows, temperatures, seeds, positions))
    token_ids = torch.zeros(len(SEEDS), int(positions.max()) + 1, dtype=torch.int32)
    appended = sample_and_append(logits, thresholds, rows, temperatures, seeds, token_ids, positions.int().clone())
    assert torch.equal(ids, appended)
    assert ids[5] == -1
    some = torch.tensor([3, -1, 0, 6])
    tables = temperatures, seeds, positions
    skipping = [draw(logits[:4], None, some, *tables) for draw in (sample_at, gumbel_max.sample_at.__wrapped__)]
    assert torch.equal(*skipping)
    assert (skipping[0] >= 0).tolist() == [True, False, True, True]


@pytest.mark.parametrize("num_tokens", [2, 3, 8])
def test_tables_of_lines_equal_their_specification(num_tokens: int) -> None:
    temperatures, seeds, positions = sampling_arguments()
    rows, counts = torch.tensor([5, 0, 3, 6]), torch.tensor([1, num_tokens, num_tokens - 1, 2], dtype=torch.int32)
    arguments = counts, num_tokens, temperatures, seeds, positions.int()
    tables, expected = line_tables(rows, *arguments), gumbel_max.line_tables.__wrapped__(rows, *arguments)
    for mine, theirs in zip(tables, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert tables.rows.view(4, -1)[:, 0].tolist() == [num_tokens * row for row in range(4)]
    assert (tables.rows >= 0).view(4, -1).sum(1).tolist() == counts.tolist()
    assert tables.positions[num_tokens : 2 * num_tokens].tolist() == [int(positions[0]) + j for j in range(num_tokens)]
    assert [len(part) for part in line_tables(rows[:0], counts[:0], *arguments[1:])] == [0] * 4


@pytest.mark.parametrize("num_tokens", [2, 3, 8])
@pytest.mark.parametrize("with_states", [False, True])
def test_counting_tokens_with_proposals_equals_its_specification(num_tokens: int, with_states: bool) -> None:
    rng, num_rows = torch.Generator().manual_seed(num_tokens), 50
    ids = torch.randint(0, 2, (num_rows, num_tokens), generator=rng, dtype=torch.int32)
    ids[torch.rand(ids.shape, generator=rng) < 0.05] = -1  # NaN
    proposals = torch.randint(0, 2, (num_rows, num_tokens - 1), generator=rng, dtype=torch.int32)
    proposals[::3] = ids[::3, :-1].clamp(min=0)
    num_row_tokens = torch.randint(1, num_tokens + 1, (num_rows,), generator=rng, dtype=torch.int32)
    rows, results = torch.randperm(num_rows + 9, generator=rng)[:num_rows], []
    for function in (enter_counted, gumbel_max.enter_counted.__wrapped__):
        token_ids = torch.full((num_rows + 9, 20), 7, dtype=torch.int32)
        context_lens = torch.randint(
            0, 20 - num_tokens, (num_rows + 9,), dtype=torch.int32, generator=rng.manual_seed(3)
        )
        num_counted = torch.full((num_rows + 9,), 99, dtype=torch.int32) if with_states else None
        counted = function(ids, proposals, num_row_tokens, rows, token_ids, context_lens, num_counted)
        results.append([counted, token_ids, context_lens, torch.zeros(1) if num_counted is None else num_counted])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert len({*(results[0][0] >= -1).sum(1).tolist()}) == num_tokens, "every count occurs"
    nothing = [tensor[:0] for tensor in (ids, proposals, num_row_tokens, rows)]
    assert enter_counted(*nothing, token_ids, context_lens, None).shape == (0, num_tokens)


# --- forbid_tokens ---

MASK_TILE = logit_kernels.TILE_GROUPS * logit_kernels.GROUP_SIZE.value


def random_masks(num_masks: int, num_words: int) -> Tensor:
    """Words at random, and whole ones that allow nothing or everything."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (num_masks, num_words), generator=generator).int()
    kinds = torch.randint(0, 3, (num_masks, num_words), generator=generator)
    return torch.where(kinds == 0, 0, torch.where(kinds == 1, -1, words)).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_ids", "first_id"), [(1, 0), (100, 0), (MASK_TILE, 64), (MASK_TILE + 9, 0), (2 * MASK_TILE - 5, 320)]
)
def test_forbidding_tokens_equals_its_specification_to_the_bit(num_ids: int, first_id: int, dtype: torch.dtype) -> None:
    padded = randn(5, num_ids + 30, dtype=dtype)
    padded[1, ::3], padded[3, ::5] = math.nan, math.inf
    expected = padded.clone()
    bits = random_masks(3, (first_id + num_ids) // 32 + 2)[:, :-1]
    lines = torch.tensor([3, 0, 1])
    logit_kernels.forbid_tokens(padded[:, :num_ids], lines, bits, first_id)
    logit_ops.forbid_tokens.__wrapped__(expected[:, :num_ids], lines, bits, first_id)
    assert torch.equal(padded.view(torch.uint8), expected.view(torch.uint8))
    logit_kernels.forbid_tokens(padded, lines[:0], bits[:0])
    assert torch.equal(padded.view(torch.uint8), expected.view(torch.uint8)), "no mask, no change"


def test_forbidding_tokens_refuses_what_it_would_misread() -> None:
    bits, lines = torch.zeros(1, 4).int(), torch.tensor([0])
    for logits, mask, first_id, message in (
        (randn(1, 200)[:, ::2], bits, 0, "logits of a row must be contiguous"),
        (randn(1, 60), bits[:, ::2], 0, "bits of a mask must be contiguous"),
        (randn(1, 60), bits, 16, "first_id=16 lies within a word"),
    ):
        with pytest.raises(AssertionError, match=message):
            logit_kernels.forbid_tokens(logits, lines, mask, first_id)


# --- thresholds ---

LIMITS = torch.tensor(
    [  # temperature, top_k, top_p, min_p
        (0.6, 20, 0.95, 0.0),
        (1.0, 1, 1.0, 0.0),
        (2.0, 50, 0.5, 0.1),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.3),
        (0.5, 300, 1.0, 0.0),
        (1.0, 10**6, 0.3, 0.0),
        (100.0, 0, 0.999, 0.001),
        (0.0, 5, 0.5, 0.5),
        (1.0, 0, 1.0, 0.0),
        (0.0, 0, 0.0, 0.0),
        (1.0, 0, 0.6, 0.3),
        (1.0, 0, 0.95, 1e-6),
        (0.5, 7, 0.9, 0.2),
        (3.0, 40, 1.0, 0.5),
    ]
)


def test_the_kernels_of_thresholds_read_the_temperature_and_then_each_filter() -> None:
    names = ["TEMPERATURE", *map(str.upper, filter_threshold.FILTERS), "NUM_LIMITS"]
    assert [getattr(threshold_kernels, name).value for name in names] == [*range(len(names))]


@loops_are_interpreted
@pytest.mark.parametrize(
    ("vocab_size", "spread", "dtype"),
    [(1, 1.0, torch.float16), (1000, 0.1, torch.bfloat16), (2100, 5.0, torch.float32)],
)
def test_thresholds_allow_what_their_specification_allows(vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    scores = (spread * randn(len(LIMITS), vocab_size)).to(dtype)
    actual = threshold_kernels.thresholds(scores, LIMITS)
    expected = filter_threshold.thresholds.__wrapped__(scores, LIMITS)
    allowed = scores.float() >= actual.unsqueeze(1)
    same = allowed == (scores.float() >= expected.unsqueeze(1))
    # Sums are taken in another order: the token at the cut-off, and its equals, may be in or out.
    assert scores[~same].unique().numel() <= len(LIMITS) // 5
    assert allowed.any(dim=1).all()
    assert same[[1, 4, 5, 8, 9, 10, 14]].all(), "without top_p it is exact"
    assert actual[8:11].tolist() == [-math.inf] * 3
    assert threshold_kernels.thresholds(scores[:0], LIMITS[:0]).shape == (0,)


@loops_are_interpreted
def test_ties_are_kept_whichever_groups_they_are_in() -> None:
    scores = torch.zeros(4, 3000)
    scores[:, [3, 70, 71, 2999]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    limits = torch.tensor([[1, 2, 1, 0], [1, 0, 0.005, 0], [1, 0, 1, 0.3], [1, 0, 1e-30, 0]])
    found = threshold_kernels.thresholds(scores, limits)
    assert (scores >= found.unsqueeze(1)).sum(dim=1).tolist() == [4, 4, 4, 1]


@loops_are_interpreted
@pytest.mark.parametrize("shift", [0.0, -20.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_p_is_a_share_of_what_min_p_has_left(dtype: torch.dtype, shift: float) -> None:
    scores = torch.full((4, 3000), shift - 2.0)  # together these weigh far more than the five at the top
    scores[:, [3, 70, 71, 2000, 2999]] = shift + torch.tensor([1.0, 0.5, 0.25, 0.0, -0.25])
    limits = torch.tensor([[1, 0, 0.9, 0.2], [1, 0, 0.7, 0.2], [1, 3, 0.75, 0.2], [2, 0, 0.999, 0.5]])
    found = threshold_kernels.thresholds(scores.to(dtype), limits)
    expected = filter_threshold.thresholds.__wrapped__(scores.to(dtype), limits)
    for bounds in (found, expected):
        assert (scores.to(dtype).float() >= bounds.unsqueeze(1)).sum(dim=1).tolist() == [5, 3, 2, 5]


@loops_are_interpreted
def test_thresholds_of_rows_that_are_not_finite_hide_nothing() -> None:
    limits, num_rows = LIMITS[[0, 3, 4]].repeat(3, 1), 9
    scores = randn(num_rows, 1000)
    scores[:3, 500], scores[3:6, 500], scores[6:] = NAN, math.inf, -math.inf
    found = threshold_kernels.thresholds(scores, limits)
    seeds, context_lens = torch.zeros(num_rows).long(), torch.ones(num_rows).int()
    token_ids = torch.zeros(num_rows, 2).int()
    ids = sample_and_append(scores, found, torch.arange(num_rows), limits[:, 0], seeds, token_ids, context_lens)
    assert ids.tolist() == [-1] * num_rows


@loops_are_interpreted
def test_thresholds_leave_out_logits_of_minus_infinity() -> None:
    limits = LIMITS[[0, 1, 3, 4, 9, 11]]
    scores = torch.full((6, 1000), -math.inf)
    scores[:, [100, 700]] = torch.tensor([0.0, -0.1])
    found = threshold_kernels.thresholds(scores, limits)
    expected = filter_threshold.thresholds.__wrapped__(scores, limits)
    allowed, wanted = (scores.isfinite() & (scores >= bounds.unsqueeze(1)) for bounds in (found, expected))
    assert torch.equal(allowed, wanted)


# --- the tables ---


@loops_are_interpreted
@pytest.mark.parametrize("max_blocks", [1, 40, 100])
def test_rows_are_read_as_their_specification_reads_them(max_blocks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 999, (6, 16 * max_blocks + 1), generator=generator, dtype=torch.int32)
    block_tables = torch.randint(0, 2**20, (6, max_blocks), generator=generator, dtype=torch.int32)
    context_lens = torch.tensor([1, 16, 16 * max_blocks, 9, 3, 0], dtype=torch.int32)
    rows = torch.tensor([[2, 7], [-1, 7], [0, 7], [1, 7], [-1, 7]], dtype=torch.int32)[:, 0]  # out of wider lines
    arguments = rows, token_ids, context_lens, block_tables, 16
    lens = context_lens.clone()
    lens[2] -= 4  # room for tokens that are not known yet
    several = rows, token_ids, lens, block_tables, 16, 5, torch.tensor([5, 3, 1, 2, 5], dtype=torch.int32)
    for given in (arguments, several) if max_blocks > 1 else (arguments,):
        for actual, expected in zip(table_kernels.read_rows(*given), table_ops.read_rows(*given), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


# --- copy_tokens ---


@pytest.mark.parametrize("sizes", [(128,), (72,), ()])  # of a token: keys, and scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_the_first_tokens_of_blocks_are_copied_as_by_the_specification(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    cache = (100 * randn(2, 7, 3, 48, *sizes)).to(dtype)
    copies = torch.tensor([[5, 0, 47], [5, 1, 1], [2, 6, 33], [3, 4, 0]], dtype=torch.int32)
    actual, expected = cache.clone(), cache.clone()
    table_kernels.copy_tokens(actual, copies)
    table_ops.copy_tokens(expected, copies)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, cache)
    assert torch.equal(actual[:, 0, :, :47], cache[:, 5, :, :47])
    assert torch.equal(actual[:, 0, :, 47:], cache[:, 0, :, 47:])


# --- logit_statistics ---


@pytest.mark.parametrize("num_best", [0, 1, 5])
@pytest.mark.parametrize(("size", "dtype"), [(1000, torch.float32), (4096, torch.float16), (9001, torch.float16)])
def test_statistics_of_logits_are_those_of_the_specification(size: int, dtype: torch.dtype, num_best: int) -> None:
    """In float16 many logits are equal. The rows' chosen ids lie before, in and behind this shard."""
    logits, first_id = randn(7, size, dtype=dtype), 500
    logits[1, 3:] = -math.inf  # fewer finite logits than are asked for
    logits[2] = -math.inf
    logits[3, ::2] = 1.5
    logits[4, [7, size - 1]] = 60.0
    chosen_ids = torch.tensor([0, 502, 501, 500 + size // 2, 507, 10**6, 499 + size], dtype=torch.int32)
    chosen_logits = logits.float().gather(1, (chosen_ids.long() - first_id).clamp(0, size - 1)[:, None])[:, 0]
    arguments = logits, chosen_logits, chosen_ids, first_id, num_best
    actual = logit_kernels.logit_statistics(*arguments)
    expected = logit_ops.logit_statistics.__wrapped__(*arguments)
    for mine, its in zip(actual, expected, strict=True):
        assert mine.dtype == its.dtype
    largest, sums, *exact = zip(actual, expected, strict=True)
    assert torch.equal(*largest)
    torch.testing.assert_close(*sums, rtol=1e-5, atol=0)
    assert all(torch.equal(*pair) for pair in exact)


def test_a_token_of_another_shard_that_cannot_come_has_all_of_this_one_before_it() -> None:
    """Its logit is that of the places behind the last id, which are no tokens."""
    arguments = randn(1, 1000), torch.tensor([-math.inf]), torch.tensor([5000], dtype=torch.int32), 0, 1
    for statistics in (logit_kernels.logit_statistics, logit_ops.logit_statistics.__wrapped__):
        assert statistics(*arguments)[2].tolist() == [1000]


def test_statistics_of_logits_with_nan_are_nan_and_name_tokens_that_there_are() -> None:
    logits = randn(2, 5000)
    logits[0, 4999] = logits[1] = math.nan
    chosen_ids = torch.zeros(2, dtype=torch.int32)
    _, sums, _, best_ids, _ = logit_kernels.logit_statistics(logits, logits[:, 0].clone(), chosen_ids, 0, 3)
    assert sums.isnan().all()
    assert ((best_ids >= 0) & (best_ids < 5000)).all()
