"""Lines with proposals against single steps: what counts is what single steps draw, whatever the rows ask for."""

import itertools
import random
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoinfer import SamplingParams
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import pack, read_header
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.stopping import Stopping
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.ops.gumbel_max import spec
from nanoinfer.sampling.logits_processors import ROWS_AT_ONCE
from nanoinfer.sampling.logprobs import PositionLogprobs
from nanoinfer.sampling.proposals import Proposals
from nanoinfer.sampling.row_state import admit_rows
from nanoinfer.sampling.sampler import Sampled, Sampler
from nanoinfer.token_ids import NO_TOKEN, NOT_COUNTED

VOCAB_SIZE, NUM_PROMPT_TOKENS, LENGTH = 100, 2, 22
PROMPT = [1, 2]
ALL = range(VOCAB_SIZE)
ONE_RANK = TensorParallel()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(allowed: Collection[int]) -> Any:
    flags = np.zeros(-(-VOCAB_SIZE // 32) * 32, bool)
    flags[[*allowed]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


class Line(NamedTuple):
    """What the host knows of a line: its row, its position, and the completion before it, proposals included."""

    row: int
    position: int
    completion: list[int]


def no_masks(lines: dict[int, Line]) -> TokenMasks | None:
    return None


def of_position(lines: dict[int, Line]) -> TokenMasks:
    """A grammar that allows half of the tokens of a position, in two rows of three."""
    of = {index: line for index, line in lines.items() if line.row % 3}
    masks = [bits([i for i in ALL if (i * 7 + line.position * 13 + line.row) % 5 > 1]) for line in of.values()]
    return TokenMasks(RowMasks([*of], np.array(masks)) if of else None)


def of_last_token(lines: dict[int, Line]) -> TokenMasks:
    """A token set that depends on the token before, in every second row."""
    of = {index: line for index, line in lines.items() if line.row % 2 and line.completion}
    masks = [bits([i for i in ALL if (i + line.completion[-1]) % 3]) for line in of.values()]
    return TokenMasks(token_sets=RowMasks([*of], np.array(masks)) if of else None)


def of_functions(lines: dict[int, Line]) -> TokenMasks:
    """A user's function of the whole completion, in every second row."""

    def halve_what_came(ids: list[int], logits: Tensor) -> Tensor:
        return logits.index_copy(0, torch.tensor(ids).long(), logits[ids] / (1 + len(ids)))

    of = {index: line for index, line in lines.items() if line.row % 2 == 0}
    return TokenMasks(functions={index: ((halve_what_came,), line.completion) for index, line in of.items()})


def of_all(lines: dict[int, Line]) -> TokenMasks:
    return TokenMasks(of_position(lines).grammars, of_last_token(lines).token_sets, of_functions(lines).functions)


Masks = Callable[[dict[int, Line]], TokenMasks | None]
Entries = dict[tuple[int, int], PositionLogprobs]  # by row and position


class Case(NamedTuple):
    """What rows ask for, by row; the logits at each place, (num_rows, LENGTH, VOCAB_SIZE)."""

    params: list[SamplingParams]
    logits: Tensor
    masks: Masks = no_masks
    mode: str = "raw_logprobs"

    def sampler(self, tp: TensorParallel = ONE_RANK) -> Sampler:
        num_rows = len(self.params)
        token_ids = torch.full((num_rows + 1, LENGTH + 1), 99, dtype=torch.int32)
        token_ids[:-1, :NUM_PROMPT_TOKENS] = torch.tensor(PROMPT)
        lens = torch.tensor([NUM_PROMPT_TOKENS] * num_rows + [0], dtype=torch.int32)
        counted = torch.zeros(num_rows + 1, dtype=torch.int32)
        sampler = Sampler(token_ids, lens, VOCAB_SIZE, tp, self.mode, counted)
        seqs = [Sequence(row, PROMPT, params, seed=100 + row) for row, params in enumerate(self.params)]
        for row, seq in enumerate(seqs):
            seq.row = row
            seq.stopping = Stopping.of(seq.sampling_params, NUM_PROMPT_TOKENS, frozenset(), LENGTH, False)
        packet = pack(ScheduledBatch(admitted=seqs))
        header = read_header(packet)
        sampler.admit(header.on_device(torch.from_numpy(header.uploaded(packet))))
        admit_rows(sampler.states, header.on_host(packet))
        return sampler


def draw(
    case: Case, sampler: Sampler, lines: list[Line | None], rows: list[int], proposals: Proposals | None = None
) -> Sampled:
    """Sample these lines; None stands for padding, whose logits are NaN."""
    nan = torch.full((VOCAB_SIZE,), torch.nan, dtype=case.logits.dtype)
    logits = torch.stack([nan if line is None else case.logits[line.row, line.position] for line in lines])
    start, length = sampler.tp.vocab_shard(VOCAB_SIZE)
    masks = case.masks({index: line for index, line in enumerate(lines) if line is not None})
    shard = logits[:, start : start + length].clone()
    return sampler.sample(shard, start, torch.tensor(rows), rows, masks, proposals)


def entries_of(case: Case, sampled: Sampled, lines: list[Line | None]) -> Entries:
    """What the rows that want log-probabilities get."""
    found: Entries = {}
    for some in sampled.logprobs:
        for index, entry in zip(some.batch_indices, some.logprobs.to_positions(), strict=True):
            line = lines[index]
            assert line is not None, "padding has no log-probabilities"
            num_best = case.params[line.row].num_logprobs
            if num_best is not None:
                rank, *lists = entry
                found[line.row, line.position] = PositionLogprobs(rank, *(part[: 1 + num_best] for part in lists))
    return found


def single_steps(case: Case) -> tuple[list[list[int]], Entries]:
    """The tokens of each row, and their log-probabilities."""
    sampler, rows, entries = case.sampler(), [*range(len(case.params))], {}
    tokens: list[list[int]] = [[] for _ in rows]
    for position in range(NUM_PROMPT_TOKENS, LENGTH):
        lines: list[Line | None] = [Line(row, position, tokens[row][:]) for row in rows]
        sampled = draw(case, sampler, lines, rows)
        entries |= entries_of(case, sampled, lines)
        for row, token_id in enumerate(sampled.token_ids.tolist()):
            tokens[row].append(token_id)
    return tokens, entries


def propose(right: list[int], most: int, rng: random.Random) -> list[int]:
    """Up to so many tokens, of which the first few are right."""
    proposed = right[: rng.randint(0, most)]
    if proposed and rng.random() < 0.7:
        wrong = rng.randrange(len(proposed))
        proposed[wrong] = (proposed[wrong] + rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
    return proposed


def several_at_once(
    case: Case, tokens: list[list[int]], num_tokens: int, seed: int, tp: TensorParallel = ONE_RANK
) -> Entries:
    """Draw these tokens again, in steps of several lines of some of the rows; return their log-probabilities."""
    rng, sampler, entries = random.Random(seed), case.sampler(tp), Entries()
    known = [0] * len(tokens)
    while unfinished := [row for row, count in enumerate(known) if count < len(tokens[row])]:
        rows = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        proposed = [propose([max(0, i) for i in tokens[row][known[row] : -1]], num_tokens - 1, rng) for row in rows]
        table, lines = torch.full((len(rows), num_tokens - 1), -1, dtype=torch.int32), list[Line | None]()
        for place, (row, ids) in enumerate(zip(rows, proposed, strict=True)):
            first = NUM_PROMPT_TOKENS + known[row]
            table[place, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            sampler.token_ids[row, first : first + len(ids)] = table[place, : len(ids)]
            completion = tokens[row][: known[row]] + ids
            own: list[Line | None] = [Line(row, first + j, completion[: known[row] + j]) for j in range(len(ids) + 1)]
            lines += own + [None] * (num_tokens - len(own))
        counts = [len(ids) + 1 for ids in proposed]
        proposals = Proposals(table, torch.tensor(counts, dtype=torch.int32), counts)
        sampled = draw(case, sampler, lines, rows, proposals)
        assert sampled.token_ids.shape == (len(rows), num_tokens)
        of_step = entries_of(case, sampled, lines)
        for row, ids, drawn in zip(rows, proposed, sampled.token_ids.tolist(), strict=True):
            right = tokens[row][known[row] : known[row] + len(ids) + 1]
            agreeing = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, right, strict=False))
            num_counted = 1 + len([*agreeing])
            assert drawn == right[:num_counted] + [NOT_COUNTED] * (num_tokens - num_counted)
            assert sampler._draws.num_counted is not None
            assert sampler._draws.num_counted[row] == num_counted
            first = NUM_PROMPT_TOKENS + known[row]
            known[row] += num_counted
            assert sampler.context_lens[row] == NUM_PROMPT_TOKENS + known[row]
            entries |= {key: of_step[key] for j in range(num_counted) if (key := (row, first + j)) in of_step}
            assert sampler.token_ids[row, NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + known[row]].tolist() == [
                max(0, i) for i in tokens[row][: known[row]]
            ]
    return entries


def assert_equal_to_single_steps(case: Case, num_tokens: int, seed: int = 0) -> Entries:
    tokens, expected = single_steps(case)
    assert_near(several_at_once(case, tokens, num_tokens, seed), expected)
    return expected


def assert_near(found: Entries, expected: Entries) -> None:
    assert found.keys() == expected.keys()
    for key, (rank, token_ids, logprobs) in expected.items():
        assert found[key][:2] == (rank, token_ids)
        np.testing.assert_allclose(found[key].logprobs, logprobs, atol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9},
    {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "temperature": 0.0},
    {"repetition_penalty": 1.7},
    {"logit_bias": {3: 4.0, 50: -100.0, 7: 2.0}},
    {"min_tokens": 11, "stop_token_ids": [3, 4, 5, 6, 50, 51], "logit_bias": {3: 5.0, 50: 4.0}},
    {"logprobs": 4},
    {"logprobs": 0, "temperature": 0.0},
    {"logprob_token_ids": [4, 9, 77]},
]


def cases(options: list[dict[str, Any]], num_rows: int, seed: int, **fields: Any) -> Case:
    params = [SamplingParams(max_tokens=LENGTH, **options[row % len(options)]) for row in range(num_rows)]
    # Few likely tokens, so that penalties meet the tokens again.
    logits = 2.0 * randn(num_rows, LENGTH, VOCAB_SIZE, seed=seed) + 3.0 * (torch.arange(VOCAB_SIZE) < 8)
    return Case(params, logits, **fields)


@pytest.mark.parametrize("num_tokens", [2, 4, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_counts_is_what_single_steps_draw(options: dict[str, Any], num_tokens: int) -> None:
    assert_equal_to_single_steps(cases([options], 5, seed=num_tokens), num_tokens)


@pytest.mark.parametrize("num_tokens", [2, 4, 8])
@pytest.mark.parametrize("masks", [no_masks, of_position, of_last_token, of_functions, of_all])
def test_rows_that_ask_for_different_things_share_a_step(masks: Masks, num_tokens: int) -> None:
    """With masks that depend on the tokens before a line, and in steps of more lines than are copied at once."""
    num_rows = 2 * len(OPTIONS)
    assert num_rows * num_tokens > ROWS_AT_ONCE or num_tokens == 2
    for seed in range(2):
        assert_equal_to_single_steps(cases(OPTIONS, num_rows, seed, masks=masks), num_tokens, seed)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_of_lines_are_those_of_single_steps_in_every_mode(mode: str) -> None:
    options = [{**item, "logprobs": 3} for item in OPTIONS if "logprob_token_ids" not in item]
    entries = assert_equal_to_single_steps(cases(options, 2 * len(options), 1, masks=of_all, mode=mode), 4)
    assert len(entries) == 2 * len(options) * (LENGTH - NUM_PROMPT_TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_lines_may_have_16_bits(dtype: torch.dtype) -> None:
    case = cases(OPTIONS, 2 * len(OPTIONS), 3, masks=of_all)
    assert_equal_to_single_steps(case._replace(logits=case.logits.to(dtype)), 4)


@pytest.mark.parametrize("place", range(NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS + 4))
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"logprobs": 1}])
def test_nan_gives_no_token_and_what_came_before_it_counts(options: dict[str, Any], place: int) -> None:
    """Row 1 has NaN; tokens after that do not count, though the proposals of single steps go on from token 0."""
    case = cases([options], 3, seed=5)
    case.logits[1, place, 7] = torch.nan
    tokens, expected = single_steps(case)
    assert [token_ids.index(NO_TOKEN) for token_ids in tokens if NO_TOKEN in token_ids] == [place - NUM_PROMPT_TOKENS]
    sampler, proposals = case.sampler(), Proposals(torch.tensor([row[:3] for row in tokens]).int(), *counts_of(4, 4, 4))
    proposals.token_ids.clamp_(min=0)
    sampler.token_ids[:3, NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + 3] = proposals.token_ids
    lines: list[Line | None] = [Line(row, NUM_PROMPT_TOKENS + j, []) for row in range(3) for j in range(4)]
    sampled = draw(case, sampler, lines, [0, 1, 2], proposals)
    num_counted = place - NUM_PROMPT_TOKENS + 1
    rest = [NOT_COUNTED] * (4 - num_counted)
    assert sampled.token_ids.tolist() == [
        tokens[0][:4],
        [*tokens[1][: num_counted - 1], NO_TOKEN, *rest],
        tokens[2][:4],
    ]
    assert sampler.context_lens.tolist() == [6, NUM_PROMPT_TOKENS + num_counted, 6, 0]
    assert sampler.token_ids[1, place] == 0
    found = entries_of(case, sampled, lines)
    keys = {key for key in found if key[0] != 1 or key[1] < place}
    assert_near({key: found[key] for key in keys}, {key: expected[key] for key in keys})
    assert_equal_to_single_steps(case, 4)


def counts_of(*counts: int) -> tuple[Tensor, list[int]]:
    return torch.tensor(counts, dtype=torch.int32), [*counts]


def test_padding_never_equals_a_line_without_a_token() -> None:
    """A row of two lines, with NaN in the second: its padding is -1, as is the token that is not drawn."""
    case = cases([{"temperature": 0.0}], 1, seed=6)
    case.logits[0, NUM_PROMPT_TOKENS + 1] = torch.nan
    sampler, [tokens] = case.sampler(), single_steps(case)[0]
    proposals = Proposals(torch.tensor([[tokens[0], -1, -1]], dtype=torch.int32), *counts_of(2))
    sampler.token_ids[0, NUM_PROMPT_TOKENS] = tokens[0]
    lines = [Line(0, NUM_PROMPT_TOKENS, []), Line(0, NUM_PROMPT_TOKENS + 1, []), None, None]
    sampled = draw(case, sampler, lines, [0], proposals)
    assert sampled.token_ids.tolist() == [[tokens[0], NO_TOKEN, NOT_COUNTED, NOT_COUNTED]]


def test_a_function_that_fails_at_a_line_lets_the_tokens_before_it_count() -> None:
    def fail_after_two(ids: list[int], logits: Tensor) -> Tensor:
        if len(ids) > 1:
            raise ValueError("too long")
        return logits

    def masks(lines: dict[int, Line]) -> TokenMasks:
        return TokenMasks(functions={index: ((fail_after_two,), line.completion) for index, line in lines.items()})

    case = cases([{"temperature": 1.0}], 2, seed=7)
    tokens, _ = single_steps(case)
    wrong = (tokens[1][0] + 1) % VOCAB_SIZE
    ids = torch.tensor([tokens[0][:3], [wrong, *tokens[1][1:3]]], dtype=torch.int32)
    sampler = case.sampler()
    sampler.token_ids[:2, NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + 3] = ids
    lines: list[Line | None] = [
        Line(row, NUM_PROMPT_TOKENS + j, ids[row, :j].tolist()) for row in range(2) for j in range(4)
    ]
    sampled = draw(case._replace(masks=masks), sampler, lines, [0, 1], Proposals(ids, *counts_of(4, 4)))
    assert sampled.token_ids.tolist() == [[*tokens[0][:2], NO_TOKEN, NOT_COUNTED], [tokens[1][0], *[NOT_COUNTED] * 3]]
    assert [*sampled.errors] == [2, 3, 6, 7], "of each line; those of lines that do not count say nothing"


# --- two ranks ---


class ThreadGroup:
    """Stands for a process group: each rank is a thread."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size, timeout=60), dict[int, Tensor]()

    def of(self, rank: int, size: int) -> TensorParallel:
        return TensorParallel(
            rank, size, group=SimpleNamespace(_allgather_base=self.gather(rank), broadcast=self.send(rank))
        )

    def gather(self, rank: int) -> Callable[..., None]:
        def all_gather(gathered: Tensor, x: Tensor, options: Any) -> None:
            self._given[rank] = x
            self._barrier.wait()
            gathered.copy_(torch.cat([self._given[index] for index in sorted(self._given)]))
            self._barrier.wait()

        return all_gather

    def send(self, rank: int) -> Callable[..., None]:
        def broadcast(tensors: list[Tensor], options: Any) -> None:
            if rank == 0:
                self._given[0] = tensors[0]
            self._barrier.wait()
            if rank > 0:
                tensors[0].copy_(self._given[0])
            self._barrier.wait()

        return broadcast


@pytest.mark.parametrize("num_tokens", [2, 4])
@pytest.mark.parametrize("masks", [no_masks, of_all])
def test_two_ranks_draw_lines_as_one_does(masks: Masks, num_tokens: int) -> None:
    case = cases(OPTIONS, len(OPTIONS), seed=8, masks=masks)
    tokens, expected = single_steps(case)
    group = ThreadGroup(2)

    def of_rank(rank: int) -> Entries:
        return several_at_once(case, tokens, num_tokens, 0, group.of(rank, 2))

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(of_rank, range(2)):
            assert_near(found, expected)


# --- counting ---


def test_tokens_count_up_to_the_first_wrong_proposal() -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, -1, 7]], dtype=torch.int32)
    proposals = torch.tensor([[5, 6], [5, 9], [9, 6], [5, 6], [5, 0]], dtype=torch.int32)
    token_ids, lens = torch.full((6, 8), 99, dtype=torch.int32), torch.tensor([0, 1, 2, 3, 4, 0], dtype=torch.int32)
    rows, num_counted = torch.tensor([4, 3, 2, 1, 0]), torch.full((6,), 77, dtype=torch.int32)
    counted = spec.enter_counted(ids, proposals, counts_of(3, 3, 3, 2, 3)[0], rows, token_ids, lens, num_counted)
    assert counted.tolist() == [[5, 6, 7], [5, 6, -2], [5, -2, -2], [5, 6, -2], [5, -1, -2]]
    assert num_counted.tolist() == [2, 2, 1, 2, 3, 77]
    assert lens.tolist() == [2, 3, 3, 5, 7, 0]
    assert [(token_ids[row] != 99).nonzero().flatten().tolist() for row in rows] == [[6], [4], [2], [2], [1]]
    assert [int(token_ids[row, lens[row] - 1]) for row in rows] == [7, 6, 5, 6, 0], "the proposals are there before"
