"""Rows of several tokens in linear attention, against single steps over the tokens that counted."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanoinfer.caches.recurrent_states import RecurrentStates, StateLayout
from nanoinfer.ops.delta_rule import spec as single
from nanoinfer.ops.delta_rule import triton as single_kernels
from nanoinfer.ops.delta_rule_lines import spec
from nanoinfer.ops.delta_rule_lines import triton as kernels
from tests.kernels.helpers import exact_bfloat16, loops_are_interpreted

__all__ = ["exact_bfloat16"]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")

NUM_ROWS, NUM_SNAPSHOTS, NUM_LAYERS, MAX_LINES = 4, 2, 2, 8
Sizes = tuple[int, int, int, int, int]  # key heads, value heads of each, key_dim, value_dim, conv_width


class Functions(NamedTuple):
    """What a history runs by. step: of one token, which says what is expected."""

    step: Callable[..., Tensor]
    lines: Callable[..., Tensor]
    flush: Callable[..., None]


STEP, LINES, FLUSH = (
    function.__wrapped__  # type: ignore[attr-defined]
    for function in (single.gated_delta_step, spec.gated_delta_lines, spec.flush_pending)
)
SPEC = Functions(STEP, LINES, FLUSH)
KERNELS = Functions(STEP, kernels.gated_delta_lines, kernels.flush_pending)
ALL_KERNELS = Functions(single_kernels.gated_delta_step, kernels.gated_delta_lines, kernels.flush_pending)


class History:
    """Four rows whose tokens come by several in a step, some of which do not count; and what single steps make of them.

    `expected` has the states after all tokens that counted. Whatever nobody may read is NaN.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, by: Functions, device: str, seed: int) -> None:
        key_heads, group, key_dim, value_dim, self.width = sizes
        heads, self.by, self.device = key_heads * group, by, torch.device(device)
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        channels = 2 * key_heads * key_dim + heads * value_dim
        self.input_sizes = channels + heads * value_dim, 2 * heads
        shape = StateLayout(NUM_LAYERS, (heads, key_dim, value_dim), (self.width, channels), dtype, MAX_LINES)
        self.states, self.expected = (shape.allocate(NUM_ROWS, NUM_SNAPSHOTS, self.device) for _ in range(2))
        assert self.states.pending is not None
        self.num_counted = self.states.pending.num_counted
        for tensor in (*self.states.pending[2:], self.states.matrices, self.states.conv_inputs):
            tensor.fill_(float("nan"))
        self.dtype = dtype
        self.weights = [
            single.DeltaRuleWeights(
                self.randn(channels, self.width),
                self.randn(heads).float(),
                self.randn(heads).float(),
                self.randn(value_dim),
                1e-6,
            )
            for _ in range(NUM_LAYERS)
        ]
        self.positions = [0] * NUM_ROWS

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def inputs(self, num_tokens: int) -> list[tuple[Tensor, ...]]:
        """What the two products of each layer make of so many tokens."""
        return [tuple(self.randn(num_tokens, size) for size in self.input_sizes) for _ in range(NUM_LAYERS)]

    def single_steps(self, layer: int, row: int, lines: tuple[Tensor, ...], states: RecurrentStates) -> Tensor:
        """Compute tokens of a row one by one, from its position on."""
        of_layer = states.layer(layer)
        outs = []
        for index in range(len(lines[0])):
            position = self.tensor([self.positions[row] + index], torch.int64)
            token = [x[[index]] for x in lines]
            places = self.tensor([row]), position, of_layer.matrices, of_layer.conv_inputs
            outs.append(self.by.step(*token, *places, self.weights[layer]))
        return torch.cat(outs)

    def step(self, num_lines: int, tolerance: float) -> None:
        """Compute lines of some rows and of padding; compare them to single steps; then say how many of them count."""
        rows = self.random.sample(range(NUM_ROWS), self.random.randint(1, NUM_ROWS)) + [-1] * self.random.randint(0, 2)
        self.random.shuffle(rows)
        lens = [self.random.randint(1, num_lines) for _ in rows]
        starts = range(0, len(rows) * num_lines, num_lines)
        positions = self.tensor([-7] * (len(rows) * num_lines), torch.int64)  # only those of first lines are read
        positions[::num_lines] = self.tensor([0 if row < 0 else self.positions[row] for row in rows], torch.int64)
        of_rows = self.tensor([[row, 5] for row in rows])[:, 0], positions, self.tensor(lens)
        inputs = self.inputs(len(rows) * num_lines)
        for layer, lines in enumerate(inputs):
            for start, length in zip(starts, lens, strict=True):
                for x in lines:
                    x[start + length : start + num_lines] = float("nan")
            states = self.states.layer(layer)
            states = states.pending, states.matrices, states.conv_inputs
            out = self.by.lines(*lines, *of_rows, *states, self.weights[layer])
            for row, start, length in zip(rows, starts, lens, strict=True):
                assert not out[start + length : start + num_lines].any(), "padding lines"
                if row >= 0:
                    real = slice(start, start + length)
                    trial = RecurrentStates(self.expected.matrices.clone(), self.expected.conv_inputs.clone())
                    expected = self.single_steps(layer, row, tuple(x[real] for x in lines), trial)
                    torch.testing.assert_close(out[real], expected, atol=tolerance, rtol=tolerance)
        for row, start, length in zip(rows, starts, lens, strict=True):
            count = self.random.randint(1, length)
            self.num_counted[row] = count
            if row >= 0:
                for layer, lines in enumerate(inputs):
                    counted = tuple(x[start : start + count] for x in lines)
                    self.single_steps(layer, row, counted, self.expected)
                self.positions[row] += count

    def flush(self, rows: list[int], tolerance: float) -> None:
        """Flush rows; their states are then the expected ones, and no other place has changed."""
        before = self.states.matrices.clone()
        self.by.flush(self.states.matrices, self.states.conv_inputs, self.tensor(rows), self.states.pending)
        assert not self.num_counted[rows].any()
        for row in {*range(NUM_ROWS)} & {*rows}:
            if self.positions[row]:
                of_row = self.states.matrices[:, row], self.expected.matrices[:, row]
                torch.testing.assert_close(*of_row, atol=tolerance, rtol=tolerance)
                kept = [position % self.width for position in range(self.positions[row])][-self.width :]
                assert torch.equal(self.states.conv_inputs[:, row, kept], self.expected.conv_inputs[:, row, kept])
        others = [place for place in range(NUM_ROWS + NUM_SNAPSHOTS) if place not in rows]
        assert torch.equal(self.states.matrices[:, others].nan_to_num(9), before[:, others].nan_to_num(9))

    def step_of_one_token(self, row: int) -> None:
        """Compute a token of a row by itself, which needs states that are flushed."""
        for layer, lines in enumerate(self.inputs(1)):
            for states in (self.expected, self.states):
                self.single_steps(layer, row, lines, states)
        self.positions[row] += 1

    def begin_anew(self, row: int) -> None:
        self.positions[row], self.num_counted[row] = 0, 0


def check_history(
    sizes: Sizes,
    num_lines: int | None,
    dtype: torch.dtype,
    by: Functions,
    tolerance: float,
    num_steps: int,
    device: str = "cpu",
) -> None:
    """num_lines: of each step; None: another number in each."""
    history = History(sizes, dtype, by, device, seed=num_lines or 0)
    draw = history.random
    for _ in range(num_steps):
        history.step(num_lines or draw.choice([1, 2, 4, 8]), tolerance)
        if draw.random() < 0.5:
            rows = draw.sample([*range(NUM_ROWS), -1], draw.randint(2, NUM_ROWS))
            history.flush(rows, tolerance)
            for _ in range(draw.randint(0, 3)):
                history.step_of_one_token(max(rows))
        if draw.random() < 0.2:
            history.begin_anew(draw.randrange(NUM_ROWS))
    history.flush(list(range(NUM_ROWS)), tolerance)


GROUPS, ODD_SIZES = (1, 2, 8, 16, 4), (1, 3, 24, 12, 2)
HISTORIES = [(GROUPS, 1), (GROUPS, 2), (GROUPS, 4), (GROUPS, 8), (ODD_SIZES, None)]


@pytest.mark.parametrize(("sizes", "num_lines"), HISTORIES, ids=str)
def test_the_specification_of_several_tokens_equals_single_steps_over_those_that_counted(
    sizes: Sizes, num_lines: int | None
) -> None:
    check_history(sizes, num_lines, torch.float32, SPEC, 1e-5, num_steps=40)


@loops_are_interpreted
@pytest.mark.parametrize(("sizes", "num_lines"), HISTORIES, ids=str)
def test_several_tokens_equal_single_steps_over_those_that_counted(sizes: Sizes, num_lines: int | None) -> None:
    check_history(sizes, num_lines, torch.float32, KERNELS, 1e-5, num_steps=6)


@loops_are_interpreted
@pytest.mark.usefixtures("exact_bfloat16")
def test_several_tokens_in_16_bits_lose_no_more_than_the_kernel_of_one_token() -> None:
    check_history(ODD_SIZES, 4, torch.bfloat16, ALL_KERNELS, 3e-2, num_steps=4)
