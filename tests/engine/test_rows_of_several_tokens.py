"""Engines whose decode rows have several tokens answer as those of single tokens do, whatever is proposed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.proposer import drawn_in_turns
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.stopping import Stopping
from nanoinfer.layers.attention.metadata import DecodeBatch, PackedLines
from nanoinfer.metrics import EngineMetrics
from nanoinfer.sampling.proposals import Proposals
from nanoinfer.token_ids import NO_TOKEN, NOT_COUNTED
from tests.models.test_architectures import VOCAB_SIZE, draw_options, save_random_model
from tests.proposers import KnownTexts, assert_same_answers, engine_of, proposing_llm

BLOCK_SIZE = 16
SIZES = {"kvcache_block_size": BLOCK_SIZE, "max_model_len": 112, "num_kvcache_blocks": 200}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 9},
    "GptOssForCausalLM": {"sliding_window": 20},
    "Qwen3_5ForCausalLM": {},
    "Qwen3NextForCausalLM": {},
}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=1.0, max_tokens=41),
    replace(GREEDY, temperature=0.8, n=3, seed=5, logprobs=None),
    replace(GREEDY, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
    replace(GREEDY, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    replace(GREEDY, temperature=1.0, logit_bias={3: 4.0, 9: -100.0}, allowed_token_ids=[3, 5, 8, 9, 13]),
    replace(GREEDY, temperature=1.5, stop_token_ids=[*range(0, VOCAB_SIZE, 7)], min_tokens=6),
    replace(GREEDY, temperature=1.5, stop_token_ids=[*range(0, VOCAB_SIZE, 9)], logprobs=None),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=2, temperature=1.0),
    replace(GREEDY, max_tokens=None, temperature=1.0),  # ends at max_model_len
]


def draw_prompts() -> list[list[int]]:
    lengths = range(5, 5 + 8 * len(PARAMS), 8)
    return [[(7 * index + 3 * i * i) % VOCAB_SIZE for i in range(length)] for index, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            options = draw_options(architecture, 1) | {"num_attention_heads": 4, "num_key_value_heads": 2}
            options |= {"hidden_size": 64, "intermediate_size": 48, **MODELS[architecture]}
            save_random_model(made[architecture], architecture, options, seed=1)
        return made[architecture]

    return folder


def compare(
    folder: Path | str,
    prompts: list[Any],
    params: list[SamplingParams],
    tolerance: float = 1e-5,
    prepare: Callable[[LLM], object] = lambda llm: None,
    num_turns: int = 1,
    **options: Any,
) -> tuple[Any, Any]:
    """Answer prompts without and with proposals, and hold one against the other; return the metrics of both.

    num_turns: how often; the engine with a proposer sleeps between two of them.
    """
    options = {"device": "cpu", "dtype": "float32", **SIZES, **options}
    with LLM(folder, **options) as llm:
        prepare(llm)
        turns = [llm.generate(prompts, params, use_tqdm=False) for _ in range(num_turns)]
        plain = llm.get_metrics()
    with proposing_llm(folder, **options) as llm:
        prepare(llm)
        engine_of(llm).proposer = proposer = KnownTexts([output for turn in turns for output in turn], VOCAB_SIZE)
        for turn, expected in enumerate(turns):
            if turn > 0:
                llm.sleep()
                llm.wake_up()
            assert_same_answers(llm.generate(prompts, params, use_tqdm=False), expected, tolerance)
        metrics = llm.get_metrics()
    assert proposer.num_proposed > 0
    assert metrics.num_generated_tokens == plain.num_generated_tokens
    assert metrics.num_used_blocks == 0
    return plain, metrics


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_and_log_probabilities_are_those_of_single_steps(
    architecture: str, folders: Callable[[str], Path]
) -> None:
    """Over block borders and windows, with options of all kinds."""
    # States are sums over all tokens, which single steps add in another order.
    tolerance = 2e-5 if architecture.startswith(("Qwen3_5", "Qwen3Next")) else 1e-5
    plain, metrics = compare(folders(architecture), draw_prompts(), PARAMS, tolerance)
    assert metrics.decode_tokens == plain.decode_tokens
    assert metrics.num_decode_steps < plain.num_decode_steps


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_stay_the_same_where_blocks_and_rows_are_short(
    architecture: str, folders: Callable[[str], Path]
) -> None:
    """Sequences are preempted, wait for rows, and are computed in chunks."""
    options = {"num_kvcache_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24}

    def prepare(llm: LLM) -> None:
        engine_of(llm).scheduler.reserved_tokens = 0

    # What is computed again in other chunks is rounded otherwise.
    _, metrics = compare(folders(architecture), draw_prompts(), PARAMS, 5e-5, prepare=prepare, **options)
    assert metrics.num_preemptions or "Gemma" in architecture or "Gpt" in architecture


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_an_8_bit_cache_answers_alike(architecture: str, kv_cache_dtype: str, folders: Callable[[str], Path]) -> None:
    compare(folders(architecture), draw_prompts(), PARAMS, tolerance=5e-3, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("architecture", MODELS)
def test_what_steps_of_several_tokens_computed_is_found_by_later_prompts(
    architecture: str, folders: Callable[[str], Path]
) -> None:
    """Conversations go on: the second turn finds the first one's answer, and is answered as without a cache."""
    options = {"device": "cpu", "dtype": "float32", **SIZES}
    prompts, params = draw_prompts()[:5], replace(GREEDY, max_tokens=37)
    with LLM(folders(architecture), enable_prefix_caching=False, **options) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        turns = [prompt + output.token_ids + [1, 2, 3] for prompt, output in zip(prompts, first, strict=True)]
        second = llm.generate(turns, replace(params, max_tokens=9), use_tqdm=False)
    with proposing_llm(folders(architecture), **options) as llm:
        engine = engine_of(llm)
        if engine.block_manager.state_group is not None:
            engine.block_manager.state_group.min_kept_tokens = 1
        engine.proposer = KnownTexts([*first, *second], VOCAB_SIZE)
        assert_same_answers(llm.generate(prompts, params, use_tqdm=False), first)
        before = llm.get_metrics().cached_tokens
        assert_same_answers(llm.generate(turns, replace(params, max_tokens=9), use_tqdm=False), second)
        found = llm.get_metrics().cached_tokens - before
    assert found >= sum(len(turn) - 3 - 1 - BLOCK_SIZE for turn in turns)


@pytest.fixture
def two(folders: Callable[[str], Path]) -> Iterator[tuple[LLM, LLM]]:
    """An engine without proposals, and one with room for them."""
    folder, options = folders("Qwen3_5ForCausalLM"), {"device": "cpu", "dtype": "float32", **SIZES}
    with LLM(folder, **options) as plain, proposing_llm(folder, **options) as llm:
        yield plain, llm


def run_to_the_end(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    return sorted(outputs, key=lambda output: output.request_id)


def test_a_proposer_comes_and_goes_while_its_steps_are_in_flight(two: tuple[LLM, LLM]) -> None:
    plain, llm = two
    prompts = draw_prompts()
    expected = plain.generate(prompts, PARAMS, use_tqdm=False)
    engine, proposer = engine_of(llm), KnownTexts(expected, VOCAB_SIZE)
    for request in zip(prompts, PARAMS, strict=True):
        llm.add_request(*request)
    outputs, num_left = [], 0  # steps that are in flight when their proposer goes
    for step in count():
        if llm.is_finished():
            break
        num_left += step % 4 == 0 and any(one.batch.num_tokens > 1 for one in engine._in_flight)
        engine.proposer = proposer if step % 4 > 1 else None
        outputs += llm.step()
    assert num_left > 0
    assert_same_answers(sorted(outputs, key=lambda output: output.request_id), expected, 5e-5)


def test_paused_requests_go_on_where_they_were(two: tuple[LLM, LLM]) -> None:
    """Some keep their rows, with tokens that their states do not have yet, and some lose them."""
    plain, llm = two
    prompts = draw_prompts()
    expected = plain.generate(prompts, PARAMS, use_tqdm=False)
    engine = engine_of(llm)
    engine.proposer = KnownTexts(expected, VOCAB_SIZE)
    request_ids = [llm.add_request(*request) for request in zip(prompts, PARAMS, strict=True)]
    outputs, paused = [], request_ids[::2]
    for _ in range(6):
        outputs += llm.step()
    llm.pause(paused)
    for _ in range(3):
        outputs += llm.step()
    assert engine.scheduler.paused
    assert engine.scheduler.reclaim(), "the last of them loses its blocks"
    llm.resume(paused)
    outputs += run_to_the_end(llm)
    assert_same_answers(sorted(outputs, key=lambda output: output.request_id), expected, 5e-5)


@pytest.mark.parametrize("place", ["launch", "sample", "wait", "propose"])
def test_steps_that_fail_leave_nothing_behind(
    two: tuple[LLM, LLM], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, llm = two
    prompts = draw_prompts()
    expected = plain.generate(prompts, PARAMS, use_tqdm=False)
    engine = engine_of(llm)
    engine.proposer = proposer = KnownTexts(expected, VOCAB_SIZE)
    for request in zip(prompts, PARAMS, strict=True):
        llm.add_request(*request)
    outputs = []
    for _ in range(4):
        for _ in range(3):
            outputs += llm.step()
        monkeypatch.setattr(proposer if place == "propose" else engine.runner, place, lambda *_: 1 / 0)
        outputs += llm.step() if place != "wait" and engine._in_flight else []  # it is collected first
        with pytest.raises(ZeroDivisionError):
            llm.step()
        monkeypatch.undo()
    outputs += run_to_the_end(llm)
    assert_same_answers(sorted(outputs, key=lambda output: output.request_id), expected, 5e-5)
    assert llm.get_metrics().num_used_blocks == 0


def test_nan_after_some_right_proposals_ends_a_request_there(two: tuple[LLM, LLM]) -> None:
    """The fourth token of the second request is NaN: with proposals it comes within a step."""
    plain, llm = two
    prompts, params = draw_prompts()[:3], replace(GREEDY, max_tokens=12)
    expected = plain.generate(prompts, params, use_tqdm=False)
    engine = engine_of(llm)
    engine.proposer = KnownTexts(expected, VOCAB_SIZE, share_right=1.0)
    wait = engine.runner.wait  # type: ignore[union-attr]

    def nan_at_the_fourth(handle: Any) -> list[int]:
        token_ids = wait(handle)
        batch = engine._in_flight[0].batch
        for row, seq in enumerate(batch.sampled):
            place = 3 - len(seq.completion_token_ids)
            index = row * batch.num_tokens + place
            if seq.request_id == 1 and 0 <= place < batch.num_tokens and token_ids[index] >= 0:
                rest = range(index + 1, (row + 1) * batch.num_tokens)
                token_ids[index : rest.stop] = [NO_TOKEN] + [NOT_COUNTED] * len(rest)
        return token_ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "wait", nan_at_the_fourth)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_same_answers(outputs[::2], expected[::2])
    [failed] = outputs[1].outputs
    assert (failed.finish_reason, failed.error_kind) == ("error", "nan_logits")
    assert failed.token_ids == expected[1].outputs[0].token_ids[:3]
    assert failed.logprobs is not None
    assert len(failed.logprobs) == 3


TEXTS = ["What is 312 + 48?", "Sort 3, 1, 2", "Spell eagle", "2, 4, 6,", "Count to ten"]
OF_TEXTS = [
    replace(GREEDY, max_tokens=40, stop=["7", "e"]),
    replace(GREEDY, max_tokens=40, stop=["1"], include_stop_str_in_output=True, min_tokens=4, temperature=1.0),
    replace(GREEDY, max_tokens=25, stop=["zz"], flat_logprobs=True),
    SamplingParams(temperature=1.2, max_tokens=20, n=2, seed=4, stop=[" "], logprobs=0),
    SamplingParams(temperature=0.5, max_tokens=20),
]


def test_stop_strings_and_streams_see_one_token_after_the_other() -> None:
    options = {"device": "cpu", "dtype": "float32", **SIZES}
    with LLM("tiny", **options) as plain, proposing_llm("tiny", **options) as llm:
        expected = plain.generate(TEXTS, OF_TEXTS, use_tqdm=False)
        engine = engine_of(llm)
        engine.proposer = proposer = KnownTexts(expected, VOCAB_SIZE, share_right=0.8)
        assert_same_answers(llm.generate(TEXTS, OF_TEXTS, use_tqdm=False), expected, 1e-4)  # its weights are larger
        for request_id, request in enumerate(zip(TEXTS, OF_TEXTS, strict=True), start=len(TEXTS)):
            chunks = [*plain.stream(*request)]
            for sample in range(request[1].n):
                ids = [token_id for chunk in chunks if chunk.sample == sample for token_id in chunk.token_ids]
                proposer.texts[request_id, sample] = ids
            streamed = [*llm.stream(*request)]
            for sample in range(request[1].n):
                its, others = ([chunk for chunk in each if chunk.sample == sample] for each in (streamed, chunks))
                assert [(chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in its] == [
                    (chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in others
                ]


def last_twice(token_ids: list[int], logits: Tensor) -> Tensor:
    """A user's function whose result depends on all tokens before."""
    logits[sum(token_ids) % len(logits)] += 20
    return logits


@pytest.fixture
def paddings_left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lines of padding each step with proposals has left out, once steps have run."""
    packed, numbers = Proposals.packed, list[int]()

    def noted(proposals: Proposals) -> Proposals:
        result = packed(proposals)
        numbers.append(len(proposals.host_counts) * proposals.num_tokens - result.num_lines)
        return result

    monkeypatch.setattr(Proposals, "packed", noted)
    return numbers


@pytest.mark.parametrize(("tensor_parallel_size", "packs_lines"), [(1, False), (2, False), (1, True)])
def test_what_constrains_tokens_follows_proposals(
    tensor_parallel_size: int, packs_lines: bool, paddings_left_out: list[int]
) -> None:
    """Grammars, also with proposals that they forbid and with their ends; bad words; users' functions."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["b"]}
    free = replace(GREEDY, max_tokens=30, ignore_eos=False)
    params = [
        replace(free, structured_outputs=StructuredOutputsParams(json=schema)),
        replace(free, temperature=1.0, structured_outputs=StructuredOutputsParams(regex="[0-9]{3,9}(, [a-z]+)*")),
        replace(free, temperature=1.0, structured_outputs=StructuredOutputsParams(choice=["one", "two hundred"]), n=2),
        replace(free, temperature=1.0, bad_words=["1", "2 3"], min_tokens=5),
        replace(free, logits_processors=[last_twice]),
        replace(free, temperature=1.5, structured_outputs=StructuredOutputsParams(regex="a*b"), min_tokens=6),
        replace(
            free, temperature=1.5, structured_outputs=StructuredOutputsParams(regex="[a-z ]*"), repetition_penalty=1.2
        ),
        free,
    ]
    if packs_lines:  # with any of these options, every row is padded to as many lines
        params = [replace(one, logprobs=None, min_tokens=0, repetition_penalty=1.0) for one in params]
    prompts = (TEXTS * 2)[: len(params)]
    plain, metrics = compare("tiny", prompts, params, 1e-4, tensor_parallel_size=tensor_parallel_size)
    assert metrics.num_decode_steps < plain.num_decode_steps
    assert packs_lines == (max(paddings_left_out, default=0) > 10)


def test_a_users_function_that_fails_ends_its_request_at_the_same_token() -> None:
    def fails_at_five(token_ids: list[int], logits: Tensor) -> Tensor:
        assert len(token_ids) < 5
        return logits

    failing = replace(GREEDY, logits_processors=[fails_at_five])
    compare("tiny", TEXTS, [failing, GREEDY, replace(failing, temperature=1.0), failing, GREEDY], 1e-4)


def test_routed_experts_are_those_of_the_tokens_that_count(folders: Callable[[str], Path]) -> None:
    options = {"device": "cpu", "dtype": "float32", "enable_return_routed_experts": True, **SIZES}
    with LLM(folders("GptOssForCausalLM"), **options) as llm:
        expected = llm.generate(draw_prompts(), PARAMS, use_tqdm=False)
    with proposing_llm(folders("GptOssForCausalLM"), **options) as llm:
        engine_of(llm).proposer = KnownTexts(expected, VOCAB_SIZE)
        outputs = llm.generate(draw_prompts(), PARAMS, use_tqdm=False)
    assert_same_answers(outputs, expected)
    for output, other in zip(outputs, expected, strict=True):
        for one, its in zip(output.outputs, other.outputs, strict=True):
            assert one.routed_experts is not None
            assert its.routed_experts is not None
            assert (one.routed_experts == its.routed_experts).all()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_two_ranks_draw_the_same_before_sleep_and_after_it(architecture: str, folders: Callable[[str], Path]) -> None:
    compare(folders(architecture), draw_prompts(), PARAMS, 2e-5, num_turns=2, tensor_parallel_size=2)


def test_states_go_on_in_steps_without_proposals_and_begin_anew_after_sleep(two: tuple[LLM, LLM]) -> None:
    """Steps of one token a row are by other kernels, which know of nothing pending."""
    plain, llm = two
    for first_id in (0, len(PARAMS)):
        expected = plain.generate(draw_prompts(), PARAMS, use_tqdm=False)
        proposer = KnownTexts(expected, VOCAB_SIZE, first_id=first_id)
        engine_of(llm).proposer, propose, steps = proposer, proposer.propose, count()

        def sometimes(seqs: list[Sequence], propose: Any = propose, steps: Any = steps) -> list[list[int]]:
            return propose(seqs) if next(steps) % 3 else [[]] * len(seqs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proposer, "propose", sometimes)
            assert_same_answers(llm.generate(draw_prompts(), PARAMS, use_tqdm=False), expected, 2e-5)
        for one in two:
            one.sleep()
            one.wake_up()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_so_they_do_without_padding_between_rows(
    architecture: str,
    folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    paddings_left_out: list[int],
) -> None:
    """Where no option counts on equally many lines of each row. As in CUDA graphs, attention has the most padding."""
    added_to = Proposals.added_to
    monkeypatch.setattr(Proposals, "added_to", lambda its, batch, _, most: added_to(its, batch, True, most))
    plain = replace(GREEDY, logprobs=None)
    params = [plain, replace(plain, temperature=1.0), replace(plain, temperature=0.9, top_k=20, top_p=0.9, n=3)] * 3
    compare(folders(architecture), draw_prompts()[:9], params)
    assert max(paddings_left_out) > 10


def test_tokens_that_end_nothing_and_that_nobody_watches_come_in_one_turn() -> None:
    manager, stats = BlockManager(num_blocks=9, block_size=8), EngineMetrics()
    names = ["alone", "stops", "is watched", "fills a block", "has a wrong proposal"]
    params, seqs = SamplingParams(max_tokens=9), list[Sequence]()
    for index, name in enumerate(names):
        seqs.append(seq := Sequence(index, [1] * (7 if name == "fills a block" else 3), params))
        stop_ids = frozenset({6 if name == "stops" else 0})
        seq.stopping, seq.status = Stopping.of(params, seq.num_prompt_tokens, stop_ids, 99), SequenceStatus.RUNNING
    batch = ScheduledBatch(decode=seqs, sampled=seqs, num_tokens=3, proposals=[[5, 6]] * 5)
    token_ids = [5, 6, 7] * 4 + [4, NOT_COUNTED, NOT_COUNTED]
    turns = []
    for turn, ids, wanted in drawn_in_turns(batch, token_ids, stats, manager, watched={2}):
        turns.append([(names[seq.seq_id], token_id) for seq, token_id in zip(turn.sampled, ids, strict=True)])
        assert sum(wanted) == len(ids) + 2 * (len(turns) == 1), "the first of them has two more tokens of one row"
        for seq, token_id in zip(turn.sampled, ids, strict=True):
            seq.token_ids.append(token_id)
    assert turns[0] == [("alone", 7), *[(name, 5) for name in names[1:4]], (names[4], 4)]
    assert turns[1:] == [[(name, 6) for name in names[1:4]], [(name, 7) for name in names[1:4]]]
    assert [seq.completion_token_ids for seq in seqs] == [[5, 6, 7]] * 4 + [[4]]
    assert stats.num_accepted_tokens_per_pos == (4, 4)


def test_packed_lines_are_those_of_rows_one_after_the_other() -> None:
    counts = torch.tensor([2, 1, 3], dtype=torch.int32)
    lines = PackedLines.of(DecodeBatch(counts, None, num_tokens=3, num_row_tokens=counts, num_packed=8))
    assert lines is not None
    assert lines.unpacked[:6].tolist() == [0, 1, 3, 6, 7, 8]
    assert lines.packed.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    assert lines.are_own.tolist() == [True] * 6 + [False] * 2
    assert lines.unpacked.max() < 9
    inputs = lines.take(*torch.arange(9).expand(3, 9))
    assert inputs[0][:6].tolist() == inputs[2][:6].tolist() == [0, 1, 3, 6, 7, 8]
    assert inputs[2][6:].tolist() == [-1, -1]


def test_rows_of_padding_have_no_packed_lines() -> None:
    counts = torch.tensor([2, 1, 0, 0], dtype=torch.int32)
    lines = PackedLines.of(DecodeBatch(counts, None, num_tokens=2, num_row_tokens=counts, num_packed=3))
    assert lines is not None
    assert lines.unpacked.tolist() == [0, 1, 2]
    assert lines.are_own.all()
    assert lines.packed[:4].tolist() == [0, 1, 2, 2]
    assert set(lines.packed[4:].tolist()) <= {0, 1, 2}, "attention reads any of them"
    nothing = PackedLines.of(DecodeBatch(counts, None, 2, torch.zeros_like(counts), num_packed=3))
    assert nothing is not None
    assert not nothing.are_own.any()
    assert nothing.packed.min() >= 0, "a graph is captured with padding alone"
