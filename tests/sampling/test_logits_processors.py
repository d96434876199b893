"""Thresholds, penalties and log-probabilities against transformers' processors and plain definitions."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.row_options import OF_PARAMS, ROW_OPTIONS, AdmittedRow
from nanoinfer.lora.adapter_slots import AdapterSlots
from nanoinfer.ops.filter_threshold.spec import thresholds
from nanoinfer.ops.gumbel_max.spec import line_tables, sample, sample_and_append
from nanoinfer.runner.pooler import Pooler
from nanoinfer.sampling.logit_bias import LogitBias
from nanoinfer.sampling.logits_processors import Lines
from nanoinfer.sampling.logprobs import compute_logprobs
from nanoinfer.sampling.min_tokens import MinTokens
from nanoinfer.sampling.penalties import penalise
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.sampling_params import SamplingParams

NEAR = 1e-6  # of probability: at the cut-off, rounding decides


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lines_of(rows: list[int], context_lens: Tensor) -> Lines:
    """Lines of a step that draws for these rows."""
    return Lines([*range(len(rows))], rows, torch.tensor(rows), context_lens)


def lowest(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The threshold of each row of the logits, all with the same options."""
    return thresholds(logits, torch.tensor([[temperature, top_k, top_p, min_p]]).expand(len(logits), 4))


def allowed_by_transformers(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(torch.zeros(len(scores), 1, dtype=torch.long), scores.clone()) > -math.inf


# --- thresholds ---


@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.integers(2, 300),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 2, 20, 150]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(0, 1000),
)
def test_the_allowed_tokens_are_those_of_transformers(
    vocab_size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = spread * randn(3, vocab_size, seed=seed)
    options = (temperature, top_k, top_p, min_p)
    mine = logits >= lowest(logits, *options).unsqueeze(1)
    theirs = allowed_by_transformers(logits, *options)
    # What differs is one token whose removal or keeping moves the kept share by rounding alone.
    probabilities = (logits / temperature).softmax(dim=1).double()
    shares = probabilities / probabilities.amax(dim=1, keepdim=True)
    left = torch.where(shares >= min_p, probabilities, 0.0)
    if top_k:
        best = left.topk(min(top_k, vocab_size), dim=1)
        left = torch.zeros_like(left).scatter_(1, best.indices, best.values)
    left /= left.sum(dim=1, keepdim=True)
    for row in (mine != theirs).any(dim=1).nonzero().flatten().tolist():
        for token in (mine[row] != theirs[row]).nonzero().flatten().tolist():
            before = left[row][probabilities[row] > probabilities[row, token]].sum().item()
            share = shares[row, token].item()
            assert abs(before - top_p) < NEAR or abs(share - min_p) < NEAR, (row, token)


def test_each_option_says_what_it_keeps() -> None:
    logits, with_ties = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log(), torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])

    def num_kept(logits: Tensor = logits, **options: float) -> int:
        return int((logits >= lowest(logits, **options)).sum())  # type: ignore[arg-type]

    assert [num_kept(top_k=k) for k in (0, 1, 3, 5, 100)] == [5, 1, 3, 5, 5]
    assert [num_kept(top_p=p) for p in (0.01, 0.49, 0.51, 0.69, 0.71, 0.96, 1.0)] == [1, 1, 2, 2, 3, 5, 5]
    assert [num_kept(min_p=p) for p in (0.0, 0.09, 0.11, 0.31, 0.41, 1.0)] == [5, 5, 4, 2, 1, 1]
    assert num_kept(top_k=2, top_p=0.71) == 1, "of what top_k has left, the first has 0.714"
    assert num_kept(min_p=0.25, top_p=0.75) == 2, "of what min_p has left, the first two have 0.82"
    assert num_kept(min_p=0.25, top_k=3, top_p=0.58) == 1, "of what both have left, the first has 0.588"
    assert num_kept(top_p=0.71, temperature=100.0) == 4, "hot: nearly a fifth each"
    assert num_kept(min_p=0.35, temperature=0.5) == 1, "cold: 0.16 of the first"
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": math.exp(-1) - 1e-6}):
        assert num_kept(with_ties, **options) == 4, "ties with the last token kept are kept"


def test_rows_that_ask_for_nothing_have_no_threshold() -> None:
    logits = randn(4, 50)
    limits = torch.tensor([[1.0, 0, 1, 0], [0, 3, 0.5, 0.5], [0, 0, 0, 0], [1, 3, 1, 0]])
    found = thresholds(logits, limits)
    assert found[:3].tolist() == [-math.inf] * 3
    assert found[3] == logits[3].topk(3).values[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_still_yields_no_token(value: float, dtype: torch.dtype) -> None:
    logits = randn(3, 100).to(dtype)
    logits[1, 7] = value
    found = lowest(logits, top_k=3, top_p=0.9, min_p=0.1)
    token_ids, context_lens = torch.zeros(4, 3, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    ids = sample_and_append(logits, found, torch.arange(3), torch.ones(4), torch.arange(4), token_ids, context_lens)
    assert (ids >= 0).tolist() == [True, False, True]
    assert token_ids[1, 1] == 0


# --- draws ---


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.6, 20, 0.95, 0.0), (1.5, 30, 0.9, 0.05)],
)
def test_draws_follow_the_truncated_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = 1.5 * randn(1, 64, seed=3)
    bound = lowest(logits, temperature, top_k, top_p, min_p)
    allowed = allowed_by_transformers(logits, temperature, top_k, top_p, min_p).squeeze(0)
    weights = torch.where(allowed, (logits[0] / temperature).exp(), 0.0).double()
    num_kept = int(allowed.sum())
    assert 1 < num_kept < 40
    num_draws = 20_000
    rows, context_lens = torch.arange(num_draws), torch.ones(num_draws, dtype=torch.int32)
    token_ids = torch.zeros(num_draws, 2, dtype=torch.int32)
    temperatures = torch.full((num_draws,), temperature)
    ids = sample_and_append(
        logits.expand(num_draws, -1), bound.expand(num_draws), rows, temperatures, rows, token_ids, context_lens
    )
    observed = ids.bincount(minlength=64)[weights > 0].double()
    assert observed.sum() == num_draws, "nothing else is ever drawn"
    expected = (weights / weights.sum())[weights > 0] * num_draws
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    degrees = num_kept - 1
    # Wilson and Hilferty's approximation of the value that is passed once in a thousand times.
    critical = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < critical


def test_a_draw_above_the_lowest_logit_is_the_draw_without_a_threshold() -> None:
    logits, rows = randn(5, 200), torch.tensor([0, 3, -1, 1, 2])
    temperatures, seeds = torch.tensor([1.0, 0.0, 2.0, 0.7, 0.0]), torch.arange(5) * 2**33
    token_ids, context_lens = torch.zeros(5, 9, dtype=torch.int32), torch.tensor([3, 7, 1, 5, 0], dtype=torch.int32)
    positions = context_lens[rows]
    expected = torch.where(rows >= 0, sample(logits, temperatures[rows], seeds[rows], positions), -1)
    bounds = torch.full((5,), -math.inf)
    ids = sample_and_append(logits, bounds, rows, temperatures, seeds, token_ids, context_lens)
    assert ids.tolist() == expected.tolist()
    assert context_lens.tolist() == [4, 8, 2, 6, 0], "the row of -1 is left as it was"


# --- biases ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_biases_and_ids_beyond_the_vocabulary_do_no_harm(dtype: torch.dtype) -> None:
    processor = LogitBias(torch.zeros(8, 1, dtype=torch.int32), 50)
    values = {3: [7, 49, 50, 1.5, -2.25, 9.0], 5: [0, 1e9], 6: [7, 0.5]}  # the ids, then their biases
    processor.admit([AdmittedRow(row, 1, 1, {"logit_bias": numbers}) for row, numbers in values.items()])
    processor.release([6, 7])
    assert [*processor.by_row] == [3, 5]
    logits, rows = randn(4, 50).to(dtype), [5, 2, 3, 6]
    unchanged = logits.clone()
    expected = logits.clone().float()
    for line, token_id, bias in ((0, 0, 1e9), (2, 7, 1.5), (2, 49, -2.25)):
        expected[line, token_id] += bias
    lines = lines_of(rows, torch.zeros(8, dtype=torch.int32))
    assert processor.places(lines) == [0, 2]
    actual = processor.apply(logits, lines, [0, 2])
    assert torch.equal(actual, expected)
    assert torch.equal(logits, unchanged)


# --- min_tokens ---


def test_stop_tokens_are_forbidden_before_a_position_and_a_row_that_has_come_there_is_left_alone() -> None:
    """Row 2 has a prompt of 3 tokens and may stop from position 5 on; row 1 was computed again with 2 of 3 tokens."""
    context_lens = torch.tensor([0, 6, 3], dtype=torch.int32)
    processor, logits = MinTokens(torch.zeros(3, 8, dtype=torch.int32), 10), randn(2, 10).bfloat16()
    processor.admit(
        [
            AdmittedRow(2, num_tokens=3, num_prompt_tokens=3, options={"min_tokens": [2, 4, 7, 10]}),
            AdmittedRow(1, num_tokens=6, num_prompt_tokens=4, options={"min_tokens": [3, 7]}),
            AdmittedRow(0, num_tokens=6, num_prompt_tokens=4, options={"min_tokens": [2, 7]}),
        ]
    )
    assert [row in processor.by_row for row in range(3)] == [False, True, True], "row 0 has its 2 tokens"
    lines, unchanged, found = lines_of([2, 1], context_lens), logits.clone(), []
    for _ in range(2):
        changed = processor.apply(logits, lines, processor.places(lines))
        found.append([(changed[line] == -math.inf).nonzero().flatten().tolist() for line in range(2)])
        context_lens[1:] += 1
    assert found == [[[4, 7], [7]], [[4, 7], []]]
    assert not processor.by_row
    assert torch.equal(logits, unchanged)


def test_each_line_of_a_row_is_judged_by_its_own_position() -> None:
    processor = MinTokens(torch.zeros(1, 8, dtype=torch.int32), 10)
    processor.admit([AdmittedRow(0, num_tokens=4, num_prompt_tokens=2, options={"min_tokens": [4, 9]})])
    rows, lens, counts = torch.tensor([0]), torch.tensor([4], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    tables = line_tables(rows, counts, 3, torch.zeros(1), torch.zeros(1).long(), lens)
    lines = Lines([0, 1, 2], [0, 0, 0], rows.repeat(3), lens, 3, tables)
    changed = processor.apply(torch.zeros(3, 10), lines, [0, 1, 2])
    assert changed[:, 9].tolist() == [-math.inf, -math.inf, 0.0]
    assert 0 in processor.by_row, "of these tokens only the first may count"


# --- penalties ---


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=12),
    completion=st.lists(st.integers(0, 19), max_size=12),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
)
def test_penalties_are_those_of_the_definition(
    prompt: list[int], completion: list[int], presence: float, frequency: float, repetition: float
) -> None:
    logits = 3 * randn(2, 20)
    known = prompt + completion
    token_ids = torch.full((2, 30), 19, dtype=torch.int32)  # what lies behind the known tokens does not count
    token_ids[0, : len(known)] = torch.tensor(known)
    context_lens = torch.tensor([len(known), 0], dtype=torch.int32)
    prompt_lens, penalties = torch.tensor([len(prompt), 0]), torch.tensor([[presence, frequency, repetition]] * 2)
    actual = penalise(logits, token_ids, context_lens, prompt_lens, penalties)
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([known]), logits[:1].clone())
    for token, count in Counter(completion).items():
        expected[0, token] -= presence + count * frequency
    torch.testing.assert_close(actual, torch.cat((expected, logits[1:])))


# --- log-probabilities ---


@pytest.mark.parametrize("num_best", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_a_float32_softmax(dtype: torch.dtype, num_best: int) -> None:
    logits = (4 * randn(6, 100)).to(dtype)
    token_ids = torch.tensor([0, 5, 99, 50, 3, 3], dtype=torch.int32)
    expected = logits.double().log_softmax(dim=1)
    places = compute_logprobs(logits, token_ids, num_best).to_positions()
    for row, (rank, ids, logprobs) in enumerate(places):
        assert ids[0] == token_ids[row]
        assert logprobs == pytest.approx(expected[row, ids].tolist(), abs=1e-5)
        assert logprobs[1:] == sorted(logprobs[1:], reverse=True)
        assert len(ids) == 1 + num_best
        order = sorted(range(100), key=lambda i: (-float(logits[row, i]), i))
        assert rank == order.index(ids[0]) + 1
        assert sorted(logprobs[1:]) == pytest.approx(sorted(expected[row].topk(num_best).values.tolist()), abs=1e-5)


def test_of_equal_logits_the_lower_id_ranks_first_as_in_greedy_decoding() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    ranks = [compute_logprobs(logits, torch.tensor([i]), 0).to_positions()[0][0] for i in range(4)]
    assert ranks == [4, 1, 2, 3]


# --- options ---


def test_every_option_that_a_row_is_told_of_is_read_once() -> None:
    sampler = Sampler(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 8, TensorParallel())
    read = [name for state in (*sampler.states, Pooler, AdapterSlots) for name in state.reads]
    assert sorted(read) == sorted(ROW_OPTIONS)


def test_the_default_of_an_option_asks_for_nothing() -> None:
    """So a request that leaves an option out pays nothing for it."""
    neutral = {name: option.neutral for name, option in OF_PARAMS.items() if option.neutral is not None}
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert neutral == {name: defaults[name] for name in neutral}
    assert {defaults[name] for name in OF_PARAMS.keys() - neutral.keys()} == {None, 0}
