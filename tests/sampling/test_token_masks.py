"""The masks of a step in the sampler: grammars, token sets and users' functions, and the rows that have none."""

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses import FakeTensorMode

from nanoinfer import SamplingParams
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import pack, read_header
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.ops.logits.spec import forbid_tokens
from nanoinfer.sampling.logprobs import PositionLogprobs
from nanoinfer.sampling.row_state import admit_rows
from nanoinfer.sampling.sampler import NUM_COPIES, NUM_MASKS, ROWS_AT_ONCE, Sampled, Sampler

VOCAB_SIZE = 100  # fills the last word of a mask in part
GREEDY = SamplingParams(temperature=0)
CPU = torch.device("cpu")
FORTY = torch.tensor([40])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(*allowed: Collection[int], vocab_size: int = VOCAB_SIZE, beyond: bool = True) -> NDArray[np.int32]:
    """Masks that allow these ids; beyond: what the bits say that stand for no token."""
    words = -(-vocab_size // 32)
    flags = np.full((len(allowed), 32 * words), beyond)
    flags[:, :vocab_size] = [[i in ids for i in range(vocab_size)] for ids in allowed]
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def row_masks(allowed: dict[int, Collection[int]]) -> RowMasks:
    """Masks by line."""
    return RowMasks([*allowed], bits(*allowed.values()))


def make_sampler(*params: SamplingParams, device: torch.device = CPU, mode: str = "raw_logprobs") -> Sampler:
    """A sampler in which row i is sampled by params[i] from seed i, after a prompt of two tokens; and a spare row."""
    seqs = [Sequence(row, [1, 2], item, seed=row) for row, item in enumerate(params)]
    for row, seq in enumerate(seqs):
        seq.row = row
    token_ids = torch.zeros(len(params) + 1, 8, dtype=torch.int32)
    token_ids[:-1, :2] = torch.tensor([1, 2])
    context_lens = torch.tensor([2] * len(params) + [0], dtype=torch.int32)
    sampler = Sampler(token_ids.to(device), context_lens.to(device), VOCAB_SIZE, TensorParallel(), mode)
    admit(sampler, *seqs)
    return sampler


def admit(sampler: Sampler, *seqs: Sequence) -> None:
    packet = pack(ScheduledBatch(admitted=[*seqs]))
    header = read_header(packet)
    sampler.admit(header.on_device(torch.from_numpy(header.uploaded(packet)).to(sampler.device)))
    admit_rows(sampler.states, header.on_host(packet))


def draw(
    params: list[SamplingParams],
    logits: Tensor,
    masks: TokenMasks | None = None,
    first: int = 0,
    mode: str = "raw_logprobs",
) -> Sampled:
    """Sample for all rows, in the order first, first + 1, ..., 0, 1, ...: lines and rows differ."""
    host_rows = [(first + line) % len(params) for line in range(len(params))]
    sampler = make_sampler(*params, device=logits.device, mode=mode)
    sampled = sampler.sample(logits, 0, torch.tensor(host_rows, device=logits.device), host_rows, masks)
    assert torch.equal(sampler.token_ids[host_rows, 2], sampled.token_ids.clamp(min=0))
    return sampled


def logprobs_of(sampled: Sampled) -> dict[int, PositionLogprobs]:
    """The log-probabilities of the step's tokens that want any, by batch_idx."""
    return {
        batch_idx: position
        for some in sampled.logprobs
        for batch_idx, position in zip(some.batch_indices, some.logprobs.to_positions(), strict=True)
    }


# --- the mask itself ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beyond", [True, False])
def test_forbidden_logits_become_minus_infinity_and_all_others_keep_their_bits(
    dtype: torch.dtype, beyond: bool
) -> None:
    logits = randn(4, VOCAB_SIZE).to(dtype)
    logits[2, :2] = torch.tensor([math.nan, math.inf])
    unchanged = logits.clone()
    allowed = [{0, 31, 32, 63, 99}, set(range(VOCAB_SIZE)), set()]
    forbid_tokens(logits, torch.tensor([2, 0, 3]), torch.from_numpy(bits(*allowed, beyond=beyond)))
    expected = unchanged.clone()
    expected[2, [i for i in range(VOCAB_SIZE) if i not in allowed[0]]] = -math.inf
    expected[3] = -math.inf
    assert torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))


def test_a_shard_of_the_vocabulary_reads_its_own_bits() -> None:
    logits, whole = randn(2, 36), randn(2, 100)
    mask = torch.from_numpy(bits({63, 64, 99}, {70}))
    whole[:, 64:] = logits
    forbid_tokens(logits, torch.tensor([1, 0]), mask, first_id=64)
    forbid_tokens(whole, torch.tensor([1, 0]), mask)
    assert torch.equal(logits, whole[:, 64:])
    assert logits.isfinite().nonzero().tolist() == [[0, 6], [1, 0], [1, 35]]


# --- grammars ---


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_k=5, top_p=0.9)], ids=str)
def test_draws_under_a_mask_follow_the_softmax_of_what_it_allows(params: SamplingParams) -> None:
    num_draws, allowed = 20_000, [3, 8, 31, 32, 64, 90, 99]
    logits = (1.5 * randn(1, VOCAB_SIZE, seed=4)).bfloat16()
    logits[0, 50] = 9.0  # the likeliest by far is forbidden
    scores = logits[0, allowed].double() / params.temperature
    if params.top_k:
        scores[scores < scores.topk(params.top_k).values[-1]] = -math.inf
        ordered = scores.softmax(dim=0).sort(descending=True)
        scores[ordered.indices[ordered.values.cumsum(dim=0) - ordered.values >= params.top_p]] = -math.inf
    masks = TokenMasks(grammars=RowMasks([*range(num_draws)], np.repeat(bits(allowed), num_draws, axis=0)))
    sampled = draw([params] * num_draws, logits.repeat(num_draws, 1), masks)
    observed = sampled.token_ids.bincount(minlength=VOCAB_SIZE)[allowed].double()
    assert observed.sum() == num_draws, "nothing else is ever drawn"
    probabilities = scores.softmax(dim=0)
    assert observed[probabilities == 0].sum() == 0
    expected = (num_draws * probabilities)[probabilities > 0]
    chi_square = ((observed[probabilities > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 28  # at most 6 degrees of freedom, p < 0.0001


def test_rows_with_rules_change_nothing_for_the_others() -> None:
    params = [SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(presence_penalty=1.0, logprobs=2), GREEDY] * 3
    logits = randn(12, VOCAB_SIZE).bfloat16()
    plain = draw(params, logits.clone(), first=5)
    masks = TokenMasks(
        grammars=row_masks({0: {5, 6}, 7: {9}, 11: {1, 2, 3}}),
        token_sets=row_masks({1: range(50), 7: {9, 10}}),
        functions={2: ((lambda _, scores: -scores,), [])},
    )
    masked = logits.clone()
    sampled = draw(params, masked, masks, first=5)
    others = [line for line in range(12) if line not in (0, 1, 2, 7, 11)]
    assert torch.equal(masked[others], logits[others])
    assert torch.equal(sampled.token_ids[others], plain.token_ids[others])
    assert sampled.token_ids[7] == 9
    assert sampled.token_ids[0] in (5, 6)
    assert sampled.token_ids[11] in (1, 2, 3)
    found, expected = logprobs_of(sampled), logprobs_of(plain)
    assert all(found[line] == expected[line] for line in others if line in expected)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.5), SamplingParams(n=1)])
def test_a_mask_that_allows_nothing_yields_no_token(params: SamplingParams) -> None:
    for masks in (TokenMasks(grammars=row_masks({1: ()})), TokenMasks(token_sets=row_masks({1: ()}))):
        sampled = draw([params] * 3, randn(3, VOCAB_SIZE), masks)
        assert (sampled.token_ids >= 0).tolist() == [True, False, True]


# --- log-probabilities ---


def test_raw_logprobs_are_those_before_a_grammar_and_all_else_and_processed_ones_after_it() -> None:
    params = SamplingParams(temperature=0, logprobs=3, presence_penalty=2.0, logit_bias={40: 50.0})
    logits = randn(2, VOCAB_SIZE)
    grammar, token_set = [*range(30, 50)], [*range(35, 45)]
    masks = TokenMasks(
        row_masks({0: grammar}),
        row_masks({0: token_set}),
        {0: ((lambda _, scores: scores.index_fill(0, FORTY, -9.0),), [])},
    )
    biased = logits.double()
    biased[:, 40] += 50.0
    limited = biased[0].clone()
    limited[40] = -9.0  # the function has moved the biased token down
    limited[[i for i in range(VOCAB_SIZE) if i not in token_set]] = -math.inf
    expected = {"raw_logprobs": logits.double(), "processed_logprobs": torch.stack((limited, biased[1]))}
    for mode, scores in expected.items():
        given = logits.clone()
        sampled = draw([params, params], given, masks, mode=mode)
        [of_lines] = sampled.logprobs
        assert of_lines.batch_indices == [0, 1]
        for line, wanted in enumerate(scores.log_softmax(dim=1)):
            _, ids, logprobs = of_lines.logprobs.to_positions()[line]
            assert set(ids[1:]) == set(wanted.topk(3).indices.tolist())
            assert logprobs == pytest.approx(wanted[ids].tolist(), abs=1e-5)
        allowed = [i for i in token_set if i != 40]
        assert sampled.token_ids.tolist() == [max(allowed, key=lambda i: logits[0, i]), 40]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_named_tokens_have_their_logprobs_beside_rows_that_want_the_likeliest_or_none(mode: str) -> None:
    named = [[7, 3, 7], [99]]
    wants = [SamplingParams(logprob_token_ids=ids, temperature=0.5) for ids in named]
    params = [wants[0], SamplingParams(logprobs=1, temperature=0), SamplingParams(), wants[1]]
    logits = randn(4, VOCAB_SIZE)
    sampled = draw(params, logits, mode=mode, first=1)
    scores = logits.double().log_softmax(dim=1) if mode == "raw_logprobs" else logits.double()
    if mode == "processed_logits":
        scores[2:] /= 0.5  # lines 2 and 3 have rows 3 and 0
    found = logprobs_of(sampled)
    assert sorted(found) == [0, 2, 3]
    for line, ids in ((3, named[0]), (2, named[1])):
        drawn = int(sampled.token_ids[line])
        rank, its_ids, its_scores = found[line]
        assert its_ids[: 1 + len(ids)] == [drawn, *ids]
        assert its_scores == pytest.approx(scores[line, its_ids].tolist(), abs=1e-5)
        assert rank == 1 + int((scores[line] > scores[line, drawn]).sum())
    assert found[0].token_ids == [int(logits[0].argmax())] * 2


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 3.0])
def test_processed_logprobs_are_finite_at_any_temperature(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logprobs=1)
    [of_line] = draw([params], 100 * randn(1, VOCAB_SIZE), mode="processed_logprobs").logprobs
    logprob = of_line.logprobs.to_positions()[0].logprobs[0]
    assert -40.0 < logprob <= 0.0


# --- token sets ---


def test_of_a_set_and_a_grammar_both_are_obeyed_in_any_line_of_a_large_step() -> None:
    num_rows = 2 * ROWS_AT_ONCE + 9
    logits = randn(num_rows, VOCAB_SIZE)
    sets = {line: {line % VOCAB_SIZE, (line + 1) % VOCAB_SIZE, 7} for line in range(num_rows) if line % 5}
    grammars = {line: [i for i in range(VOCAB_SIZE) if i != line % VOCAB_SIZE] for line in range(0, num_rows, 3)}
    # The host may name lines in any order.
    masks = TokenMasks(row_masks(grammars), row_masks(dict(sorted(sets.items(), key=lambda item: -item[0] % 17))))
    for first in (0, 50):
        sampled = draw([GREEDY] * num_rows, logits.clone(), masks, first)
        for line, token_id in enumerate(sampled.token_ids.tolist()):
            allowed = set(range(VOCAB_SIZE)) & set(sets.get(line, range(VOCAB_SIZE)))
            allowed &= set(grammars.get(line, range(VOCAB_SIZE)))
            assert token_id == max(allowed, key=lambda i: logits[line, i])


def test_a_row_with_rules_alone_has_none_of_the_penalties_of_the_sequence_before() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 1], logits[:, 50] = 2.0, 1.0  # token 1 is in the prompts
    penalised = SamplingParams(temperature=0, repetition_penalty=10.0)
    sampler = make_sampler(penalised, penalised)
    newcomer = Sequence(9, [1, 2], GREEDY)
    newcomer.row = 0
    admit(sampler, newcomer)
    masks = TokenMasks(token_sets=row_masks({0: range(VOCAB_SIZE)}))
    assert sampler.sample(logits, 0, torch.tensor([0, 1]), [0, 1], masks).token_ids.tolist() == [1, 50]


# --- users' functions ---


def test_functions_see_the_completion_and_logits_after_the_bias_and_before_penalties() -> None:
    seen: list[Any] = []

    def note(output_token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append((output_token_ids, logits))
        return logits

    def prefer_11(output_token_ids: list[int], logits: Tensor) -> Tensor:
        logits[11] = 100.0  # in place, as some do
        output_token_ids.append(5)
        return logits

    params = SamplingParams(temperature=0, logit_bias={1: 3.0}, repetition_penalty=2.0)
    logits, completion = randn(2, VOCAB_SIZE).bfloat16(), [7, 8, 9]
    sampled = draw([params] * 2, logits, TokenMasks(functions={1: ((note, prefer_11, note), completion)}))
    assert sampled.token_ids[1] == 11
    expected = logits[1].float()
    expected[1] += 3.0
    (ids, before), (again, after) = seen
    assert ids == again == completion == [7, 8, 9]
    assert (before.dtype, before.shape) == (torch.float32, (VOCAB_SIZE,))
    assert torch.equal(before, expected)
    assert torch.equal(after, expected.index_fill(0, torch.tensor([11]), 100.0))
    assert sampled.errors == {}


def raises(ids: list[int], logits: Tensor) -> Tensor:
    logits.zero_()
    raise KeyError("no such token")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it cannot say what it is")


def raises_what_cannot_be_printed(ids: list[int], logits: Tensor) -> Tensor:
    raise UnspeakableError


def of_fake_values(ids: list[int], logits: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.zeros(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "logits processor raises failed with KeyError: 'no such token'"),
        (lambda ids, logits: None, "failed with TypeError: it returned a NoneType; return a tensor of shape (100,)"),
        (lambda ids, logits: logits.tolist(), "it returned a list"),
        (
            lambda ids, logits: logits[:50],
            "ValueError: it returned torch.float32 of shape (50,); return float32 of sha",
        ),
        (lambda ids, logits: logits.unsqueeze(0), "of shape (1, 100); return float32 of shape (100,)"),
        (lambda ids, logits: logits > 0, "it returned torch.bool of shape (100,)"),
        (lambda prompt, ids, logits: logits, "failed with TypeError: "),
        (raises_what_cannot_be_printed, "raises_what_cannot_be_printed failed with UnspeakableError"),
        (
            lambda ids, logits: logits.to_sparse(),
            "it returned a tensor that has the layout torch.sparse_coo; return a plain dense one of shape (100,)",
        ),
        (
            lambda ids, logits: logits.to("meta"),
            "it returned a tensor that has no values (it is on the device meta, or not initialized); return",
        ),
        (lambda ids, logits: torch.nested.nested_tensor([logits]), "it returned a tensor that is nested; return"),
        (of_fake_values, "it returned a tensor that is a FakeTensor; return a plain dense one of shape (100,)"),
        (lambda ids, logits: logits.to(torch.complex64), "it returned torch.complex64 of shape (100,)"),
        (
            lambda ids, logits: logits.resize_(0),
            "it returned torch.float32 of shape (0,); return float32 of shape (100,)",
        ),
        (lambda ids, logits: logits.double() * 1e300, None),
        (lambda ids, logits: logits * math.nan, None),
        (lambda ids, logits: logits.fill_(-math.inf), None),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_function_that_fails_ends_its_own_row(function: Callable[..., Any], message: str | None) -> None:
    logits, params = randn(5, VOCAB_SIZE), [SamplingParams()] * 5
    expected = draw(params, logits.clone()).token_ids
    same: tuple[Any, ...] = (lambda ids, logits: logits,)
    sampled = draw(params, logits, TokenMasks(functions={3: ((*same, function), [4]), 1: (same, [])}))
    assert sampled.token_ids.tolist() == [*expected[:3].tolist(), -1, expected[4].item()]
    if message is None:
        assert sampled.errors == {}
    else:
        assert [*sampled.errors] == [3]
        assert message in sampled.errors[3]


def test_a_function_may_return_another_float_type_and_cannot_allow_what_a_grammar_forbids() -> None:
    def allow_all(ids: list[int], logits: Tensor) -> Tensor:
        return torch.full((VOCAB_SIZE,), 5.0, dtype=torch.float64).index_fill(0, FORTY, 6.0)

    masks = TokenMasks(grammars=row_masks({0: {3, 80}}), functions={line: ((allow_all,), []) for line in range(2)})
    assert draw([GREEDY] * 2, randn(2, VOCAB_SIZE), masks).token_ids.tolist() == [3, 40]


@pytest.mark.parametrize(
    "same",
    [
        lambda ids, logits: logits.double(),
        lambda ids, logits: logits.clone().requires_grad_(),
        lambda ids, logits: torch.nn.Parameter(logits.clone()),
        lambda ids, logits: logits.repeat(2, 1).T.contiguous().T[1],  # every second number of its memory
        lambda ids, logits: torch._neg_view(-logits),  # negated when it is read
    ],
)
def test_a_function_may_return_its_logits_in_any_form_that_has_their_values(same: Callable[..., Any]) -> None:
    logits = randn(2, VOCAB_SIZE)
    sampled = draw([SamplingParams()] * 2, logits, TokenMasks(functions={1: ((same,), [])}))
    assert sampled.errors == {}
    assert torch.equal(sampled.token_ids, draw([SamplingParams()] * 2, logits).token_ids)


# --- a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_draws_what_a_cpu_draws_under_rules_of_all_kinds(dtype: torch.dtype) -> None:
    num_rows = ROWS_AT_ONCE + 20
    kinds = [GREEDY, SamplingParams(top_k=20, top_p=0.9), SamplingParams(logit_bias={5: 3.0}, logprobs=2)]
    params = (kinds * num_rows)[:num_rows]
    logits = (3 * randn(num_rows, VOCAB_SIZE)).to(dtype)
    masks = TokenMasks(
        row_masks({line: range(line % 50, 90) for line in range(0, num_rows, 2)}),
        row_masks({line: range(40, 100) for line in range(0, num_rows, 3)}),
        {line: ((lambda ids, scores: scores * 0.5,), []) for line in range(0, num_rows, 5)} | {1: ((raises,), [])},
    )
    expected, on_gpu = draw(params, logits.clone(), masks, first=7), draw(params, logits.cuda(), masks, first=7)
    assert on_gpu.token_ids.cpu()[1] == expected.token_ids[1] == -1
    assert on_gpu.errors == expected.errors
    assert (on_gpu.token_ids.cpu() == expected.token_ids).float().mean() > 0.97  # near ties may flip
    torch.cuda.synchronize()
    for ours, theirs in zip(on_gpu.logprobs, expected.logprobs, strict=True):
        assert ours.batch_indices == theirs.batch_indices
        torch.testing.assert_close(ours.logprobs.logprobs[:, 1:], theirs.logprobs.logprobs[:, 1:], atol=1e-4, rtol=1e-4)


# --- memory ---


def test_scratch_counts_copies_of_logits_and_masks_of_all_rows() -> None:
    sampler = make_sampler(*[GREEDY] * 9)
    assert sampler.scratch_bytes == NUM_COPIES * ROWS_AT_ONCE * VOCAB_SIZE * 4 + NUM_MASKS * 10 * 4 * 4
    several = Sampler(sampler.token_ids, sampler.context_lens, VOCAB_SIZE, TensorParallel(), max_row_tokens=5)
    assert several.scratch_bytes - sampler.scratch_bytes == 4 * NUM_MASKS * 10 * 4 * 4, "each line of a row has its own"
