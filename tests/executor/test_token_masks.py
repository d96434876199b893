"""Steps with masks on two ranks, on a CPU: the tokens of one rank, and no worker that waits for ever."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from nanoinfer import LLM, EngineClosedError, SamplingParams
from nanoinfer.engine.packet import Header, Packet
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.executor import processes
from nanoinfer.executor.parallel_runner import ParallelRunner
from nanoinfer.executor.worker import pack_masks, read_masks
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.model_runner import LaunchedStep, StepHandle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")

Checkpoint = Callable[..., Path]
MakeMasks = Callable[[list[int]], TokenMasks | None]
VOCAB_SIZE = 512
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = [
    GREEDY,
    replace(GREEDY, temperature=1.0, seed=1),
    replace(GREEDY, temperature=0.8, top_k=20, top_p=0.9, seed=2),
    replace(GREEDY, temperature=2.0, min_p=0.01, seed=3, logprobs=2),
    replace(GREEDY, temperature=0.7, logit_bias={5: 4.0, 400: 3.0}, repetition_penalty=1.3, seed=4),
    replace(GREEDY, temperature=1.0, min_tokens=3, stop_token_ids=[*range(0, 512, 2)], seed=5),
]
PROMPTS = [[row + 1] * (row + 3) for row in range(12)]


def masks_of(lines: list[int], rows: list[int], share: float) -> RowMasks:
    """A mask for each line that depends on its row alone."""
    words = [np.random.default_rng(row).random((VOCAB_SIZE // 32, 32)) < share for row in rows]
    flags = np.array(words).reshape(len(rows), VOCAB_SIZE)
    return RowMasks(lines, np.packbits(flags, axis=1, bitorder="little").view(np.int32))


def divide(ids: list[int], logits: Tensor) -> Tensor:
    return logits / (1 + len(ids))


def fail_on_row_7(ids: list[int], logits: Tensor) -> Tensor:
    raise ValueError("not this one")


def every_kind(host_rows: list[int]) -> TokenMasks:
    """Masks of all kinds, alone and together; rows 0, 1, 2 and 8 have none."""
    grammar, token_set, function = (
        [line for line, row in enumerate(host_rows) if row > 2 and (row & bit or row > 9)] for bit in (1, 2, 4)
    )
    return TokenMasks(
        masks_of(grammar, [host_rows[line] for line in grammar], 0.3) if grammar else None,
        masks_of(token_set, [100 + host_rows[line] for line in token_set], 0.5),
        {line: ((divide, fail_on_row_7) if host_rows[line] == 7 else (divide,), [1] * line) for line in function},
    )


@dataclass
class UnderMasks:
    """Gives each step of a runner masks that depend on its rows."""

    runner: DeviceRunner | ParallelRunner
    make_masks: MakeMasks
    handles: list[StepHandle] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        launch, sample = self.runner.launch, self.runner.sample

        def launch_awaiting(packet: Packet) -> LaunchedStep:
            packet[Header._fields.index("awaits_masks")] = 1
            return launch(packet)

        def sample_under_masks(launched: LaunchedStep, masks: TokenMasks | None = None) -> StepHandle:
            self.handles.append(sample(launched, self.make_masks(launched.host_rows)))
            return self.handles[-1]

        patch.setattr(self.runner, "launch", launch_awaiting)
        patch.setattr(self.runner, "sample", sample_under_masks)


class Said(NamedTuple):
    """What the engine says to 12 prompts of all kinds, in rows 0 to 11."""

    completions: list[tuple[list[int], str | None]]  # token ids and why they end
    logprobs: list[tuple[int, float]]  # of the requests that ask for them: token id and log-probability, one by one
    errors: list[dict[int, str]]  # of each step, by line


def generate(llm: LLM, make_masks: MakeMasks) -> Said:
    assert isinstance(llm.engine.runner, (DeviceRunner, ParallelRunner))
    under_masks = UnderMasks(llm.engine.runner, make_masks)
    llm.reset_prefix_cache()
    with pytest.MonkeyPatch.context() as patch:
        under_masks.install(patch)
        outputs = llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return Said(
        [(completion.token_ids, completion.finish_reason) for completion in completions],
        [
            (token_id, entry.logprob)
            for completion in completions
            for place in completion.logprobs or []
            for token_id, entry in place.items()
        ],
        [handle.errors for handle in under_masks.handles],
    )


@pytest.fixture(scope="module")
def one_rank(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=12) as llm:
        yield llm


@pytest.fixture(scope="module")
def two_ranks(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=12, tensor_parallel_size=2) as llm:
        yield llm


def test_two_ranks_under_rules_of_all_kinds_give_the_tokens_of_one(one_rank: LLM, two_ranks: LLM) -> None:
    one, two = generate(one_rank, every_kind), generate(two_ranks, every_kind)
    assert two.completions == one.completions
    assert [token_id for token_id, _ in two.logprobs] == [token_id for token_id, _ in one.logprobs]
    assert [logprob for _, logprob in two.logprobs] == pytest.approx([logprob for _, logprob in one.logprobs], abs=1e-3)
    assert two.errors == one.errors
    assert one.errors[0] == {7: "logits processor fail_on_row_7 failed with ValueError: not this one"}
    assert one.completions[7] == ([], "error")
    free = generate(one_rank, lambda host_rows: None)
    assert [row for row in range(12) if one.completions[row] == free.completions[row]] == [0, 1, 2, 8]
    [grammar] = masks_of([0], [11], 0.3).bits
    assert all(grammar[token_id // 32] >> (token_id % 32) & 1 for token_id in one.completions[11][0])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_gpus_under_rules_of_all_kinds_do_as_one(random_checkpoint: Checkpoint, enforce_eager: bool) -> None:
    results = []
    for size in (1, 2):
        options: dict[str, Any] = {"tensor_parallel_size": size, "max_num_seqs": 12, "enforce_eager": enforce_eager}
        with LLM(random_checkpoint(), dtype="bfloat16", **options) as llm:
            results.append(generate(llm, every_kind))
    one, two = results
    assert two.errors[0] == one.errors[0]
    assert two.completions[7] == ([], "error")
    same = sum(mine == theirs for mine, theirs in zip(one.completions, two.completions, strict=True))
    assert same >= 7, f"{same} of 12 agree; in bf16 a near tie may flip"
    [grammar] = masks_of([0], [11], 0.3).bits
    assert all(grammar[token_id // 32] >> (token_id % 32) & 1 for token_id in two.completions[11][0])


def test_a_step_that_awaits_masks_and_gets_none_is_a_plain_one(one_rank: LLM, two_ranks: LLM) -> None:
    expected = [output.token_ids for output in one_rank.generate(PROMPTS, KINDS * 2, use_tqdm=False)]
    for masks in (None, TokenMasks(), TokenMasks(RowMasks([], np.zeros((0, 16), np.int32)))):
        for llm in (one_rank, two_ranks):
            said = generate(llm, lambda host_rows, masks=masks: masks)  # type: ignore[misc]
            assert [token_ids for token_ids, _ in said.completions] == expected


def test_masks_larger_than_the_ring_reach_all_ranks(random_checkpoint: Checkpoint) -> None:
    """300 rows of 60,000 tokens are 2.2 MB of bits; the ring holds 2 MB."""
    folder, num_rows, vocab_size = random_checkpoint(vocab_size=60_000, hidden_size=32), 300, 60_000

    def one_token_each(host_rows: list[int]) -> TokenMasks:
        bits = np.zeros((len(host_rows), vocab_size // 32), np.int32)
        bits[range(len(host_rows)), host_rows] = 1  # row i may get token 32 i
        return TokenMasks(RowMasks([*range(len(host_rows))], bits))

    params = SamplingParams(max_tokens=2, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": num_rows, "num_kvcache_blocks": 2 * num_rows, "max_model_len": 16}
    with LLM(folder, device="cpu", tensor_parallel_size=2, kvcache_block_size=16, **options) as llm:
        assert isinstance(llm.engine.runner, ParallelRunner)
        with pytest.MonkeyPatch.context() as patch:
            UnderMasks(llm.engine.runner, one_token_each).install(patch)
            outputs = llm.generate([[row] for row in range(num_rows)], params, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [[32 * row] * 2 for row in range(num_rows)]


def test_the_message_of_rules_says_which_lines_have_any() -> None:
    masks = every_kind([3, 5, 9, 2, 4, 6, 11, 1])
    read = read_masks(pack_masks(masks))
    assert masks.grammars is not None
    assert masks.token_sets is not None
    assert read.grammars is not None
    assert read.token_sets is not None
    assert read.grammars.batch_indices == masks.grammars.batch_indices == [0, 1, 2, 6]
    assert read.token_sets.batch_indices == masks.token_sets.batch_indices == [0, 5, 6]
    assert read.functions == {1: ((), []), 4: ((), []), 5: ((), []), 6: ((), [])}
    assert pack_masks(TokenMasks()).tolist() == [0, 0, 0]


# --- errors ---


def fails(*_: Any) -> TokenMasks:
    raise ZeroDivisionError("between launch and sample")


def too_narrow(host_rows: list[int]) -> TokenMasks:
    return TokenMasks(RowMasks([0], np.zeros((1, 3), np.int32)))


@pytest.mark.parametrize(
    ("make_masks", "error"),
    [(fails, ZeroDivisionError), (too_narrow, AssertionError)],
    ids=["before the workers get masks", "when they have them"],
)
def test_an_error_while_the_workers_wait_for_rules_or_masks_closes_the_engine(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, make_masks: MakeMasks, error: type[Exception]
) -> None:
    monkeypatch.setattr(processes, "EXPLANATION_SECONDS", 0.1)
    others = active_children()
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2) as llm:
        started = time.monotonic()
        with pytest.raises(error):
            generate(llm, make_masks)
        with pytest.raises((RuntimeError, EngineClosedError)):
            llm.generate([[1]], GREEDY, use_tqdm=False)
        with pytest.raises(EngineClosedError):
            llm.generate([[1]], GREEDY, use_tqdm=False)
    assert time.monotonic() - started < 10
    assert active_children() == others


def test_rules_for_a_step_that_the_workers_have_sampled_are_refused(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2) as llm:
        assert isinstance(llm.engine.runner, ParallelRunner)
        sample = llm.engine.runner.sample
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine.runner, "sample", lambda launched, _: sample(launched, TokenMasks()))
            with pytest.raises(RuntimeError, match="was not launched to await them"):
                llm.generate([[1]], GREEDY, use_tqdm=False)
