"""The engine over several GPUs of one host: one GPU's answers, CUDA graphs on and off, and deaths."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, ConfigError, SamplingParams, WorkerError, tiny_model_path
from nanoinfer.device import becomes_idle
from nanoinfer.distributed.tensor_parallel import NCCL_ENVIRONMENT, SLICE_TOKENS
from nanoinfer.layers.linear import PartialSum
from nanoinfer.models.decoder import DecoderMLP
from nanoinfer.ops.all_reduce_norm.spec import all_reduce_add_rms_norm
from nanoinfer.ops.norms.spec import add_rms_norm
from nanoinfer.runner import device_runner
from nanoinfer.runner.cuda_graphs import DecodeGraphs
from tests.gpu import ranks_share_gpus
from tests.gpu.test_engine_gpu import assert_part_at_near_ties, chat_prompts
from tests.models.test_architectures import checkpoint, draw_prompts  # noqa: F401 (a fixture)
from tests.tiny_checkpoint.tasks import TASKS, held_out_examples

pytestmark = pytest.mark.multi_gpu

GREEDY = SamplingParams(temperature=0, max_tokens=128)
LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
EXAMPLES = [example for task in TASKS for example in held_out_examples(task, 20, seed=5)]
Sharing = Callable[[int], dict[str, Any]]


def answers(size: int, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    with LLM(tiny_model_path(), tensor_parallel_size=size, **options) as llm:
        outputs = llm.generate(chat_prompts(llm, [example.question for example in EXAMPLES]), params, use_tqdm=False)
    return [output.token_ids for output in outputs]


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Sharing:
    """`sharing(size)`: the options of an engine whose ranks share GPUs if there are fewer."""
    return lambda size: ranks_share_gpus.let_ranks_share(size, monkeypatch)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_several_gpus_give_the_answers_of_one(sharing: Sharing, size: int, enforce_eager: bool) -> None:
    expected, actual = answers(1), answers(size, enforce_eager=enforce_eager, **sharing(size))
    same = sum(one == several for one, several in zip(expected, actual, strict=True))
    assert same >= 0.97 * len(EXAMPLES), f"{same} of {len(EXAMPLES)} agree; in bf16 a near tie may flip"


@pytest.mark.parametrize(("size", "num_kv_heads"), [(2, 1), (4, 1), (8, 1), (8, 4), (8, 8)])
def test_biases_tied_heads_and_shared_kv_heads_are_those_of_one(
    random_checkpoint: Callable[..., Path],
    sharing: Sharing,
    size: int,
    num_kv_heads: int,
) -> None:
    sizes = {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
    }
    folder, params = random_checkpoint(head_dim=128, **sizes), SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    prompts = [[i, i + 1, i + 2] * (1 + 11 * i) for i in range(24)]
    results = []
    for count in (1, size):
        with LLM(folder, dtype="bfloat16", tensor_parallel_size=count, **sharing(count)) as llm:
            results.append(llm.generate(prompts, params, use_tqdm=False))
    num_equal = sum(assert_part_at_near_ties(one, several) for one, several in zip(*results, strict=True))
    assert num_equal >= 12


@pytest.mark.parametrize(
    ("size", "architecture", "quantization"),
    [
        (2, "Qwen3ForCausalLM", None),
        (2, "Qwen3ForCausalLM", "fp8"),
        (2, "Gemma3ForCausalLM", None),
        (2, "Qwen3MoeForCausalLM", None),
        (8, "Qwen3ForCausalLM", None),
    ],
)
def test_prefill_in_slices_gives_the_log_probabilities_of_one_gpu(
    checkpoint: Callable[..., Path],  # noqa: F811
    sharing: Sharing,
    size: int,
    architecture: str,
    quantization: str | None,
) -> None:
    """A slice that went on before its sums were there would be wrong by several nats a token.

    The largest steps are CUDA graphs, and have six slices. One prompt less is a step that is not.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2 * size, "num_key_value_heads": 2}
    sizes["vocab_size"] = 512
    experts = {"moe_intermediate_size": 128, "num_experts": 8} if "Moe" in architecture else {}
    folder = checkpoint(architecture, 0, head_dim=64, **sizes, **experts)
    prompts = draw_prompts(0, (200,) * 120)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "max_num_batched_tokens": 120 * 200}
    assert 5 * SLICE_TOKENS < 120 * 200

    def logprobs(llm: LLM, count: int = 120) -> torch.Tensor:
        llm.reset_prefix_cache()
        entries = [
            (output.prompt_logprobs or [])[1:] for output in llm.generate(prompts[:count], params, use_tqdm=False)
        ]
        pairs = [zip(*pair, strict=True) for pair in zip(entries, [ids[1:] for ids in prompts[:count]], strict=True)]
        return torch.tensor([[entry[token].logprob for entry, token in pair] for pair in pairs])

    with LLM(folder, quantization=quantization, **options) as llm:
        one = logprobs(llm)
    options |= sharing(size)
    with LLM(folder, quantization=quantization, tensor_parallel_size=size, **options) as llm:
        several, without_graphs, again = logprobs(llm), logprobs(llm, 119), logprobs(llm)
        llm.sleep(level=1)
        llm.wake_up()
        awake = logprobs(llm)
    assert torch.equal(several, again), "equal steps give equal bits"
    assert torch.equal(several, awake)
    for found in (several, without_graphs):
        assert (one[: len(found)] - found).abs().mean(dim=1).max() < 0.25


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_several_gpus_read_a_shared_prefix_once_as_one_does(
    random_checkpoint: Callable[..., Path], enforce_eager: bool
) -> None:
    """All ranks capture the graphs of such steps at the same step, some in the middle of a run."""
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    prefix = torch.randint(0, 512, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [prefix + [i, i + 1] * (1 + i) for i in range(24)]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=8 + i) for i in range(24)]
    results = []
    for count in (1, 2):
        options = {"tensor_parallel_size": count, "enforce_eager": enforce_eager, "kvcache_block_size": 256}
        with LLM(folder, dtype="bfloat16", **options) as llm:
            llm.generate(prefix, SamplingParams(max_tokens=1), use_tqdm=False)
            grouper = llm.engine.scheduler.sharer_finder
            assert grouper.max_prefix_sharers == 16
            grouper.min_saved_tokens = 0
            results.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    same = sum(one == two for one, two in zip(*results, strict=True))
    assert same >= 12, f"{same} of 24 agree; in bf16 a near tie may flip"


def test_several_gpus_draw_the_samples_of_one() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=24)
    expected, actual = answers(1, params), answers(2, params)
    same = sum(one == several for one, several in zip(expected, actual, strict=True))
    assert same >= 0.9 * len(EXAMPLES), f"{same} of {len(EXAMPLES)} agree"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_several_gpus_filter_penalise_and_score_as_one(enforce_eager: bool) -> None:
    kinds = [
        SamplingParams(temperature=0.5, max_tokens=24, top_k=20, top_p=0.95),
        SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.1, min_tokens=5),
        SamplingParams(temperature=0.5, max_tokens=24, logprobs=2, prompt_logprobs=1, min_p=0.05),
    ]
    results = []
    for size in (1, 2):
        with LLM(tiny_model_path(), tensor_parallel_size=size, enforce_eager=enforce_eager) as llm:
            prompts = chat_prompts(llm, [example.question for example in EXAMPLES[:60]])
            results.append(llm.generate(prompts, kinds * 20, use_tqdm=False))
    same = sum(one.token_ids == two.token_ids for one, two in zip(*results, strict=True))
    assert same >= 50, f"{same} of 60 agree"
    for one, two in zip(*(result[2::3] for result in results), strict=True):
        for mine, theirs in zip((one.prompt_logprobs or [])[1:], (two.prompt_logprobs or [])[1:], strict=True):
            (token_id, entry), *_ = (mine or {}).items()
            assert entry.logprob == pytest.approx((theirs or {})[token_id].logprob, abs=0.5)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_chunks_preemption_and_overlap_change_no_answer(backend: str) -> None:
    options = {"max_num_batched_tokens": 300, "num_kvcache_blocks": 12, "max_model_len": 512, "max_num_seqs": 32}
    expected, actual = answers(1), answers(2, attention_backend=backend, **options)
    same = sum(one == several for one, several in zip(expected, actual, strict=True))
    assert same >= 0.97 * len(EXAMPLES), f"{same} of {len(EXAMPLES)} agree"


def test_all_ranks_have_as_many_blocks_and_the_memory_that_was_granted() -> None:
    used = []
    with LLM(tiny_model_path(), tensor_parallel_size=2, gpu_memory_utilization=0.5):
        for index in range(2):
            free, total = torch.cuda.mem_get_info(index)
            used.append((total - free) / total)
    assert all(0.4 < share < 0.55 for share in used), used


def test_more_gpus_than_there_are_is_refused_with_their_number() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"PyTorch sees {count}; cuda:{count - 1} is the first to use; use at most 1"):
        LLM(tiny_model_path(), device=f"cuda:{count - 1}", tensor_parallel_size=2)


def test_a_worker_of_eight_that_is_killed_is_an_error_and_a_new_engine_works(
    random_checkpoint: Callable[..., Path], sharing: Sharing
) -> None:
    options = sharing(8)
    folder = random_checkpoint(head_dim=64, num_attention_heads=8, num_key_value_heads=8)

    def load() -> LLM:
        return LLM(folder, dtype="bfloat16", max_model_len=2048, tensor_parallel_size=8, **options)

    params = replace(LONG, max_tokens=1500 if ranks_share_gpus.have_their_own(8) else 100)  # long after the kill
    with load() as llm:
        expected = llm.generate([[1, 2, 3]] * 64, params, use_tqdm=False)
    llm = load()
    pids = {child.name: child.pid for child in active_children()}
    chunks = llm.stream([[1, 2, 3]] * 64, params)
    for _ in range(640):
        next(chunks)
    os.kill(pids["nanoinfer rank 5"], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 5 of tensor_parallel_size=8 was ended by SIGKILL"):
        list(chunks)
    assert time.monotonic() - started < 20
    llm.close()
    with load() as llm:
        again = llm.generate([[1, 2, 3]] * 64, params, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]


def assert_it_ends_as_rank_1_was_killed(llm: LLM, chunks: Iterator[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of tensor_parallel_size=2 was ended by SIGKILL"):
        list(chunks)
    assert time.monotonic() - started < 11
    llm.close()


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("when", ["idle", "in a step"])
def test_a_worker_that_is_killed_is_an_error_and_a_new_engine_works(when: str, enforce_eager: bool) -> None:
    free_before = torch.cuda.mem_get_info(0)[0]
    expected = answers(2)
    llm = LLM(tiny_model_path(), tensor_parallel_size=2, enforce_eager=enforce_eager)
    [pid] = [child.pid for child in active_children() if child.name == "nanoinfer rank 1"]
    if when == "idle":
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
    chunks = llm.stream([[1, 2, 3]] * 64, LONG)
    if when == "in a step":
        for _ in range(640):  # with the tenth step collected the next one runs
            next(chunks)
        os.kill(pid, signal.SIGKILL)
    assert_it_ends_as_rank_1_was_killed(llm, chunks)
    assert torch.cuda.mem_get_info(0)[0] > free_before - 2**30
    assert answers(2) == expected


def test_a_worker_that_is_killed_in_a_prefill_step_is_an_error_and_a_new_engine_works() -> None:
    expected = answers(2)
    prompts = torch.randint(0, 500, (1500, 300), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM(tiny_model_path(), tensor_parallel_size=2)
    assert llm.engine.config.max_num_batched_tokens > SLICE_TOKENS
    [pid] = [child.pid for child in active_children() if child.name == "nanoinfer rank 1"]
    chunks = llm.stream(prompts, SamplingParams(max_tokens=1))
    for _ in range(200):
        next(chunks)
    os.kill(pid, signal.SIGKILL)
    assert_it_ends_as_rank_1_was_killed(llm, chunks)
    assert answers(2) == expected


def test_a_prefill_step_that_fails_between_its_slices_is_an_error_and_a_new_engine_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank goes on to where it waits for this one."""
    expected = answers(2)
    prompts = torch.randint(0, 500, (64, 200), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM(tiny_model_path(), tensor_parallel_size=2)
    lens: list[int] = []
    mlp = DecoderMLP.forward

    def fail(layer: DecoderMLP, hidden: torch.Tensor, *of_experts: object) -> PartialSum:
        lens.append(len(hidden))
        assert len(lens) == 1, "this slice fails"
        return mlp(layer, hidden)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderMLP, "forward", fail)
        started = time.monotonic()
        with pytest.raises(AssertionError, match="this slice fails"):
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert time.monotonic() - started < 20
    assert lens == [3200, 3200], "slices of 12,800 tokens"
    llm.close()
    assert answers(2) == expected


def test_a_worker_that_hangs_is_an_error_and_a_new_engine_works(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(2)
    llm = LLM(tiny_model_path(), tensor_parallel_size=2)
    [pid] = [child.pid for child in active_children() if child.name == "nanoinfer rank 1"]
    chunks = llm.stream([[1, 2, 3]] * 64, LONG)
    for _ in range(640):
        next(chunks)
    monkeypatch.setattr("nanoinfer.executor.parallel_runner.STEP_SECONDS", 3.0)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="did not end within 3 s: a process hangs, or a GPU does not answer"):
        list(chunks)
    llm.close()
    assert answers(2) == expected


def test_an_interrupted_generate_leaves_a_usable_engine() -> None:
    with LLM(tiny_model_path(), tensor_parallel_size=2) as llm:
        expected = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].token_ids
        for delay in (0.2, 0.5):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2, 3]] * 64, LONG, use_tqdm=False)
            timer.join()
            assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].token_ids == expected


def test_five_engines_one_after_another_give_their_memory_back() -> None:
    free = []
    for _ in range(5):
        with LLM(tiny_model_path(), tensor_parallel_size=2, gpu_memory_utilization=0.3) as llm:
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        free.append([torch.cuda.mem_get_info(index)[0] for index in range(2)])
    assert all(abs(last - first) < 2**29 for first, last in zip(free[1], free[-1], strict=True)), free


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_engine_that_is_forgotten_is_closed(enforce_eager: bool) -> None:
    free_before = torch.cuda.mem_get_info(0)[0]
    expected = answers(2)
    llm = LLM(tiny_model_path(), tensor_parallel_size=2, enforce_eager=enforce_eager)
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    started = time.monotonic()
    del llm
    gc.collect()
    assert time.monotonic() - started < 10
    assert torch.cuda.mem_get_info(0)[0] > free_before - 2**30
    assert answers(2) == expected


def test_a_script_that_does_not_close_its_engine_ends_without_a_word(tmp_path: Path) -> None:
    source = """
    from nanoinfer import LLM, tiny_model_path

    if __name__ == "__main__":
        llm = LLM(tiny_model_path(), tensor_parallel_size=2)
        llm.generate([1, 2, 3], use_tqdm=False)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(source))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    script = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert (script.returncode, script.stderr) == (0, "")


class GraphsThatFail(DecodeGraphs):
    """Captures one graph, and fails in the second."""

    def __init__(self, decode: Callable[..., None], *args: Any) -> None:
        calls = itertools.count()  # two for each graph: one outside it, one inside
        super().__init__(lambda *inputs: decode(*inputs) if next(calls) < 2 else 1 // 0, *args)


def test_a_capture_that_fails_on_one_rank_is_an_error_and_a_new_engine_works(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(2)
    started = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(device_runner, "DecodeGraphs", GraphsThatFail)
        with pytest.raises(ZeroDivisionError):
            LLM(tiny_model_path(), tensor_parallel_size=2)
    assert time.monotonic() - started < 60
    assert answers(2) == expected


def _all_reduce_in_all_ways(rank: int, size: int, folder: str, hidden_size: int, dtype: torch.dtype) -> None:
    """Run by each rank: one-shot and two-shot all-reduces, with some ranks late, against NCCL's."""
    devices = ranks_share_gpus.devices(size)
    torch.cuda.set_device(devices[rank])
    max_tokens = 512
    tp = ranks_share_gpus.connect(rank, size, devices[rank], Path(folder) / "store")
    tp = tp.with_shared_memory(max_tokens, 3 * SLICE_TOKENS, hidden_size, dtype, devices)
    assert tp.symmetric_memory is not None
    assert tp.copy_engines is not None
    first_residual = torch.ones(max_tokens, hidden_size, dtype=dtype, device="cuda")
    weight = torch.linspace(-2, 2, hidden_size, dtype=dtype, device="cuda")
    in_float32 = torch.linspace(1, 2, hidden_size, device="cuda")
    torch.manual_seed(rank)
    for step in range(40):
        num_tokens = (1, 2, 7, 64, tp.symmetric_memory.max_tokens)[step % 5]
        two_shot = step // 5 % 2 == 1
        weights = (weight, 1e-6) if step < 20 else (in_float32, 1e-6, in_float32)  # the latter of the sum by itself
        residual, ours = first_residual[:num_tokens], []
        for index in range(6):  # as in a step, an even number of sums of as many tokens, with nothing else in between
            buffers = replace(tp.symmetric_memory.next_buffers(num_tokens), two_shot=two_shot)
            terms = torch.empty(1 + index % 2, num_tokens, hidden_size, dtype=dtype, device="cuda")
            terms.random_(-8, 9)  # whose sums are exact
            out, residual = all_reduce_add_rms_norm(terms, residual, buffers, *weights)
            if (step + index) % size == rank:
                torch.cuda._sleep(2_000_000)  # a millisecond
            ours.append((terms.sum(0), out, residual))
        expected_residual = first_residual[:num_tokens]
        for part, out, residual in ours:
            total = tp.all_reduce(part.float()).unsqueeze(0)
            expected, expected_residual = add_rms_norm(total, expected_residual, *weights)
            torch.testing.assert_close(out, expected)
            owned = slice(rank, None, size) if two_shot else slice(None)
            tolerance = 0 if step < 20 else 0.02  # sums are exact, and their norms are not
            torch.testing.assert_close(residual[owned], expected_residual[owned], rtol=tolerance, atol=tolerance)
    exchanged, gathered = [], []
    sizes = [SLICE_TOKENS, SLICE_TOKENS - 1, SLICE_TOKENS - 1600]
    for step in range(12):
        for index, num_tokens in enumerate(sizes):
            terms = torch.empty(num_tokens, hidden_size, dtype=dtype, device="cuda").random_(-8, 9)
            exchanged.append(terms)
            if (step + index) % size == rank:
                torch.cuda._sleep(2_000_000)
            tp.copy_engines.start_reduce_scatter(index, terms)
        for index, num_tokens in enumerate(sizes):
            own = exchanged[index - len(sizes)].tensor_split(size)[rank]
            total = own + tp.copy_engines.received(index, len(own)).float().sum(0)
            tp.copy_engines.own_rows(index, num_tokens).copy_(total)
            tp.copy_engines.start_all_gather(index, num_tokens)
            if (step - index) % size == rank:
                torch.cuda._sleep(2_000_000)
        gathered += [tp.copy_engines.gathered(index, num_tokens).clone() for index, num_tokens in enumerate(sizes)]
    for terms, rows in zip(exchanged, gathered, strict=True):
        assert torch.equal(rows.float(), tp.all_reduce(terms.float()))
    if rank == 0:  # nobody comes to this sum, of rows that it owns and others
        buffers = replace(tp.symmetric_memory.next_buffers(4), two_shot=True)
        all_reduce_add_rms_norm(first_residual[None, :4], first_residual[:4], buffers, weight, 1e-6)
        assert not becomes_idle(devices[0], 0.5)
        tp.symmetric_memory.release()
        assert becomes_idle(devices[0], 0.5)
        tp.copy_engines.start_reduce_scatter(0, exchanged[0])
        tp.copy_engines.received(0, 1)
        assert not becomes_idle(devices[0], 0.5)
        tp.copy_engines.release()
        assert becomes_idle(devices[0], 0.5)
    tp.minimum(0, devices[rank])  # all are done with each other's memory
    tp.abort()
    tp.close()


@pytest.mark.parametrize(("hidden_size", "dtype"), [(1024, torch.bfloat16), (999, torch.float16)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_custom_all_reduce_and_the_copy_engines_give_the_sums_of_nccl(
    size: int, hidden_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    os.environ.update(NCCL_ENVIRONMENT)
    torch.multiprocessing.spawn(_all_reduce_in_all_ways, (size, str(tmp_path), hidden_size, dtype), nprocs=size)
