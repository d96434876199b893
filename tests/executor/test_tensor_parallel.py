"""The engine over several processes, on a CPU with gloo: the answers of one process, and an end without remains."""

import asyncio
import gc
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, ConfigError, EngineClosedError, SamplingParams, WorkerError, tiny_model_path
from nanoinfer.device import select_devices
from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel, connect
from nanoinfer.executor import parallel_runner, processes
from nanoinfer.executor.processes import PASSED, Workers
from nanoinfer.executor.shm_ring import SLOT_SIZE
from nanoinfer.layers.linear import PartialSum
from nanoinfer.models import execution
from nanoinfer.runner import setup
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.model_runner import StepHandle
from tests.conftest import forked_workers
from tests.models.test_architectures import checkpoint  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what is left of an engine")

Checkpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 63, 65, 130)
FOR_THREE_RANKS = {
    "vocab_size": 500,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "intermediate_size": 159,
    "attention_bias": True,
}


def random_prompts(lengths: tuple[int, ...], vocab_size: int = 500, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def remains() -> set[str]:
    """Names of what an engine could leave behind: segments, folders, open files, processes, threads."""
    segments = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
    segments = {name for name in segments if "/sem.mp-" not in name}  # tqdm has these, in processes of other tests, too
    folders = {str(path) for path in Path(os.environ["TMPDIR"]).glob("nanoinfer-*")}
    descriptors = {f"descriptor {count}" for count in range(len(os.listdir("/proc/self/fd")))}
    processes = {str(process) for process in active_children()}
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("nanoinfer")}
    return segments | folders | descriptors | processes | threads


@pytest.fixture(scope="module", autouse=True)
def quick_workers() -> None:
    """Takes the place of the fixture that all other tests have: here workers start as those of users do."""


@pytest.fixture
def quick_start() -> Iterator[None]:
    """Workers start as those of all other tests, where the start is not what is tested."""
    with forked_workers():
        forkserver.ensure_running()  # a helper of multiprocessing's, which stays
        yield


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders of these tests' engines lie where nobody else makes any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def nothing_remains(private_folder: None) -> Iterator[None]:
    resource_tracker.ensure_running()  # a helper of multiprocessing's, which stays
    before = remains()
    yield
    if remains() - before:
        gc.collect()  # of an error's traceback, say
    assert remains() - before == set()


@pytest.fixture(scope="module")
def one_rank(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(random_checkpoint(tie_word_embeddings=True), device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def two_ranks(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(random_checkpoint(tie_word_embeddings=True), device="cpu", tensor_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def two_short_ranks(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    """Two ranks that are short of blocks, rows and tokens of a step."""
    options: dict[str, Any] = {
        "kvcache_block_size": 48,
        "num_kvcache_blocks": 9,
        "max_model_len": 400,
        "max_num_batched_tokens": 50,
        "max_num_seqs": 6,
    }
    with LLM(random_checkpoint(tie_word_embeddings=True), device="cpu", tensor_parallel_size=2, **options) as llm:
        llm.engine.scheduler.reserved_tokens = 0
        yield llm


def start(model: Path | None = None, size: int = 2) -> tuple[LLM, list[int]]:
    """An engine, and the ids of its workers' processes."""
    others = active_children()
    llm = LLM(model or tiny_model_path(), device="cpu", tensor_parallel_size=size)
    return llm, [child.pid for child in active_children() if child not in others and child.pid]


# --- the same answers ---


@pytest.mark.usefixtures("nothing_remains")
def test_ranks_on_a_cpu_have_equally_many_threads(random_checkpoint: Checkpoint) -> None:
    """Rank 0 would have three by itself. The other rank has one, because its model is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "num_step_threads", lambda *_: 3)
        with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2) as llm:
            runner: Any = llm.engine.runner  # type: ignore[union-attr]
            assert runner._runner._num_threads == 1


def test_two_ranks_give_the_tokens_of_one(one_rank: LLM, two_ranks: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    for params in (GREEDY, SAMPLED):
        assert generate(two_ranks, prompts, params) == generate(one_rank, prompts, params)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [(FOR_THREE_RANKS, 3), pytest.param({"vocab_size": 500, "tie_word_embeddings": True}, 4, marks=pytest.mark.slow)],
    ids=["3 ranks", "4 ranks"],
)
@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_several_ranks_give_the_tokens_of_one(random_checkpoint: Checkpoint, overrides: dict, size: int) -> None:
    folder, prompts = random_checkpoint(**overrides), random_prompts(LENGTHS)
    with LLM(folder, device="cpu") as llm:
        expected = [generate(llm, prompts, params) for params in (GREEDY, SAMPLED)]
    with LLM(folder, device="cpu", tensor_parallel_size=size) as llm:
        actual = [generate(llm, prompts, params) for params in (GREEDY, SAMPLED)]
    assert actual == expected


def test_a_packet_larger_than_a_slot_and_a_step_of_many_tokens_change_nothing(one_rank: LLM, two_ranks: LLM) -> None:
    [prefix] = random_prompts((700,), seed=1)
    prompts = random_prompts((700,) * 12) + [[*prefix, index] for index in range(13)]  # the last share a prefix
    assert sum(map(len, prompts)) > SLOT_SIZE
    assert SLICE_TOKENS < 13 * 700
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert generate(two_ranks, prompts, params) == generate(one_rank, prompts, params)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_a_step_of_many_tokens_in_slices_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Checkpoint,  # noqa: F811
    architecture: str,
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    folder, prompts = checkpoint(architecture, 0, **sizes), random_prompts((100,) * 90, vocab_size=256)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 112, "max_num_seqs": 90, "max_num_batched_tokens": 90 * 100}
    lens: list[int] = []
    sliced = execution.sliced_prefill
    monkeypatch.setattr(
        execution, "sliced_prefill", lambda model, step: lens.append(len(step.token_ids)) or sliced(model, step)
    )
    tokens = []
    for size in (1, 2):
        with LLM(folder, device="cpu", tensor_parallel_size=size, **options) as llm:
            tokens.append(generate(llm, prompts, params))
    assert tokens[0] == tokens[1]
    assert lens == [90 * 100], "rank 0, which is this process, had one step in slices"


@pytest.mark.usefixtures("nothing_remains")
def test_chunks_preemption_cached_prefixes_and_other_block_sizes_change_nothing(
    one_rank: LLM, two_short_ranks: LLM
) -> None:
    prompts = random_prompts((30,) * 6) + random_prompts((100, 47))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = generate(one_rank, prompts, params)
    assert generate(two_short_ranks, prompts, params) == expected
    assert two_short_ranks.get_metrics().num_preemptions > 0
    outputs = two_short_ranks.generate(prompts[-2:], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [96, 46]
    assert [output.token_ids for output in outputs] == [tokens[:16] for tokens in expected[-2:]]


@pytest.mark.slow  # one rank is tested in test_llm.py
def test_logits_of_nan_end_their_request_alone(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Tokens 7 and 300 are those of rank 0 and of rank 1."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(random_checkpoint(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][[7, 300]] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    good, bad = [[11] * 20, [12] * 40], [[7] * 20, [12] * 35 + [300]]
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = generate(llm, good)
    with LLM(folder, device="cpu", tensor_parallel_size=2) as llm:
        outputs = llm.generate([bad[0], *good, bad[1]], GREEDY, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["error", "length", "length", "error"]
    assert [output.token_ids for output in outputs] == [[], *expected, []]


@pytest.mark.usefixtures("nothing_remains")
def test_two_engines_of_two_ranks_each_live_side_by_side(two_ranks: LLM, two_short_ranks: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    expected = generate(two_ranks, prompts)
    results = {}

    def run(llm: LLM) -> None:
        results[llm] = generate(llm, prompts)

    threads = [threading.Thread(target=run, args=(llm,)) for llm in (two_ranks, two_short_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results[two_ranks] == results[two_short_ranks] == expected


def test_one_rank_needs_no_process_no_thread_and_no_process_group(random_checkpoint: Checkpoint) -> None:
    before = active_children(), threading.active_count()
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=1) as llm:
        generate(llm, [[1, 2, 3]])
        assert isinstance(llm.engine.runner, DeviceRunner)
        assert (active_children(), threading.active_count()) == before
        assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_dummy_weights_differ_between_ranks(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, load_format="dummy") as llm:
        tokens = generate(llm, [[1, 2, 3]] * 8, SamplingParams(temperature=5.0, max_tokens=20, ignore_eos=True))
    ids = [token_id for row in tokens for token_id in row]
    assert min(ids) < 256 <= max(ids)


def exchange(rank: int, link: Any, folder: Path) -> None:
    link.sendall(PASSED)
    tp = connect(rank, 3, torch.device("cpu"), folder / "store")
    answer_exchange(tp)
    link.sendall(PASSED)
    link.recv(1)


def answer_exchange(tp: TensorParallel) -> None:
    assert tp.all_reduce(torch.tensor([1.0, tp.rank])).tolist() == [3.0, 3.0]
    assert tp.all_gather(torch.tensor([[tp.rank], [10]])).tolist() == [[[rank], [10]] for rank in range(3)]
    assert tp.broadcast(torch.tensor([[tp.rank + 3], [tp.rank]])).tolist() == [[3], [0]]
    assert tp.minimum(7 - tp.rank, torch.device("cpu")) == 5
    expected = torch.arange(7.0).view(1, 7, 1) * 3 + 3
    assert torch.equal(PartialSum(expected / 3 - 1 + tp.rank, tp=tp).all_reduced(), expected)


@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_ranks_reduce_gather_broadcast_and_find_the_smallest_number_without_a_global_group() -> None:
    ranks = Workers(3, exchange, ())
    ranks.wait_for_stage(1)  # rank 0 comes when all have started
    answer_exchange(connect(0, 3, torch.device("cpu"), ranks.folder / "store"))
    ranks.wait_for_stage(2)
    assert not torch.distributed.is_initialized()
    ranks.close()


# --- what cannot be ---


@pytest.mark.usefixtures("nothing_remains")
def test_a_size_that_does_not_split_the_model_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 cannot split .* use one of 1, 2, 4"):
        LLM(tiny_model_path(), device="cpu", tensor_parallel_size=3)


def test_ranks_take_one_gpu_each_from_the_chosen_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [str(device) for device in select_devices("auto", 2)] == ["cuda:0", "cuda:1"]
    assert [str(device) for device in select_devices("cuda:1", 3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert [str(device) for device in select_devices("cpu", 2)] == ["cpu", "cpu"]
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=3 needs 3 GPUs, and PyTorch sees 4; cuda:2 is the first to use"
    ):
        select_devices("cuda:2", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_remains")
def test_an_error_of_all_ranks_is_that_of_one(random_checkpoint: Checkpoint) -> None:
    options: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 4, "max_model_len": 65}
    with pytest.raises(ConfigError, match="max_model_len=65 is more than the KV cache holds"):
        LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, **options)


def test_a_length_above_the_models_own_is_refused_before_there_are_processes(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_runner, "Workers", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(ConfigError, match="max_model_len=4096 is above the model's own limit of 2048"):
        LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, max_model_len=4096)


# --- workers that end ---


def sabotage(monkeypatch: pytest.MonkeyPatch, act: Callable[..., None]) -> None:
    """Let the workers run `act(rank, link, folder, work, *args)`, where `work` is what they are there for."""
    monkeypatch.setattr(parallel_runner, "Workers", lambda size, work, args: Workers(size, act, (work, *args)))


def is_killed_at_start(rank: int, *args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_while_loading(rank: int, link: Any, folder: Path, work: Callable[..., None], *args: Any) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("the weights are too large")

    setup.load = fail
    work(rank, link, folder, *args)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(
            is_killed_at_start,
            "rank 1 of tensor_parallel_size=2 was ended by SIGKILL",
            marks=pytest.mark.slow,
        ),
        (fails_while_loading, "rank 1 .* Its traceback:\n.*in fail\n.*MemoryError: the weights are too large"),
    ],
)
@pytest.mark.usefixtures("nothing_remains")
def test_a_worker_that_ends_while_it_starts_is_an_error_of_llm_that_says_why(
    monkeypatch: pytest.MonkeyPatch, act: Callable[..., None], message: str
) -> None:
    sabotage(monkeypatch, act)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"(?s){message}"):
        start()
    assert time.monotonic() - started < 60, "it is not waited for until a time-out; most of it is the machine's"


def fails_in_the_fifth_step(rank: int, link: Any, folder: Path, work: Callable[..., None], *args: Any) -> None:
    launch, count = DeviceRunner.launch, 0

    def fail(self: DeviceRunner, packet: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5 and rank == 1:
            raise ArithmeticError("one too many")
        return launch(self, packet)

    DeviceRunner.launch = fail  # type: ignore[method-assign]
    work(rank, link, folder, *args)


@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_a_worker_that_fails_in_a_step_is_an_error_of_generate_with_its_traceback(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is that of rank 1, not that of rank 2, which fails because rank 1 did."""
    sabotage(monkeypatch, fails_in_the_fifth_step)
    llm, _ = start(random_checkpoint(**FOR_THREE_RANKS), size=3)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 .* Its traceback:\n.*in fail\n.*ArithmeticError: one too many"):
        generate(llm, [[1, 2, 3]])
    assert time.monotonic() - started < 10
    assert llm.engine.scheduler.is_finished()
    for call in (lambda: llm.generate([1]), lambda: llm.add_request([1]), llm.reset_prefix_cache):
        with pytest.raises(WorkerError, match=r"(?s)rank 1 .* make a new LLM.*ArithmeticError: one too many"):
            call()
    llm.close()
    with pytest.raises(EngineClosedError, match="this engine was closed; make a new LLM"):
        llm.generate([1])


@pytest.mark.parametrize(
    ("seconds", "sent", "name"),
    [
        pytest.param(0, signal.SIGRTMIN + 6, f"signal {signal.SIGRTMIN + 6};", id="idle", marks=pytest.mark.slow),
        pytest.param(0.3, signal.SIGKILL, "SIGKILL", id="in a step"),
    ],
)
@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_a_worker_that_is_killed_is_an_error_of_generate(seconds: float, sent: int, name: str) -> None:
    llm, [pid] = start()
    generate(llm, [[1, 2, 3]])
    killer = threading.Timer(seconds, os.kill, (pid, sent))
    killer.start()
    if seconds == 0:
        time.sleep(0.2)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank 1 of tensor_parallel_size=2 was ended by {name}"):
        generate(llm, [[1, 2, 3]] * 4, LONG)
    assert time.monotonic() - started < 10
    killer.join()
    llm.close()


@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_a_worker_that_is_killed_is_an_error_of_every_call_that_waits() -> None:
    llm, [pid] = start()
    calls = {
        "generate": lambda: llm.generate([1, 2, 3], LONG, use_tqdm=False),
        "stream": lambda: [*llm.stream([1, 2, 3], LONG)],
        "agenerate": lambda: asyncio.run(llm.agenerate([1, 2, 3], LONG)),
    }
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(len(calls)) as pool:
        waiting = {name: pool.submit(call) for name, call in calls.items()}
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        errors = {name: one.exception(timeout=60) for name, one in waiting.items()}
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(calls, WorkerError)
    assert all("rank 1 of tensor_parallel_size=2 was ended by SIGKILL" in str(error) for error in errors.values())
    llm.close()


@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_a_step_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that hangs stops the GPUs of all ranks; on a CPU the step of this rank would not even be launched."""
    llm, _ = start()
    generate(llm, [[1, 2, 3]])
    with monkeypatch.context() as patch:
        patch.setattr(parallel_runner, "STEP_SECONDS", 0.2)
        patch.setattr(StepHandle, "is_done", lambda handle: False)
        with pytest.raises(WorkerError, match=r"did not end within 0\.2 s: a process hangs, or a GPU does not answer"):
            generate(llm, [[1, 2, 3]])
    with pytest.raises(WorkerError, match=r"did not end within 0\.2 s"):
        generate(llm, [[1, 2, 3]])
    llm.close()


@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_an_error_between_launch_and_sample_is_an_error_of_the_next_step_and_no_endless_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _ = start()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(llm, [[1, 2, 3]])
    with pytest.raises(RuntimeError, match="was launched and not sampled"):
        generate(llm, [[1, 2, 3]])
    with pytest.raises(EngineClosedError):
        generate(llm, [[1, 2, 3]])
    llm.close()


@pytest.mark.usefixtures("quick_start", "nothing_remains")
def test_an_error_of_rank_0_in_the_middle_of_a_step_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = start()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRunner, "launch", lambda *_: 1 / 0)
        patch.setattr(processes, "EXPLANATION_SECONDS", 0.1)
        with pytest.raises(ZeroDivisionError):
            generate(llm, [[1, 2, 3]])
    named = r"this engine was closed by ZeroDivisionError\('division by zero'\); make a new LLM"
    with pytest.raises(EngineClosedError, match=named):
        generate(llm, [[1, 2, 3]])


@pytest.mark.usefixtures("nothing_remains")
def test_an_interrupted_generate_leaves_a_usable_engine(two_ranks: LLM) -> None:
    """Ctrl-C goes to every process of the terminal's group."""
    expected = generate(two_ranks, [[1, 2, 3], [4, 5]])
    pids = [child.pid for child in active_children()] + [os.getpid()]
    for delay in (0.05, 0.2):
        timer = threading.Timer(delay, lambda: [os.kill(pid, signal.SIGINT) for pid in pids if pid])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            generate(two_ranks, [[1, 2, 3]] * 4, LONG)
        timer.join()
        assert two_ranks.is_finished()
        assert two_ranks.engine.block_manager.num_used_blocks == 0
        assert generate(two_ranks, [[1, 2, 3], [4, 5]]) == expected


# --- ends of the engine ---


@pytest.mark.usefixtures("nothing_remains")
def test_closing_twice_forgetting_and_leaving_in_the_middle_of_a_request_all_clean_up() -> None:
    llm, pids = start()
    del llm
    gc.collect()
    assert not any(is_running(pid) for pid in pids)
    with start()[0] as llm:
        llm.add_request([1, 2, 3], LONG)
        llm.step()  # and another is in flight
    llm.close()


@pytest.mark.slow
def test_two_hundred_engines_opened_and_closed_leave_nothing_behind(random_checkpoint: Checkpoint) -> None:
    def cycle() -> None:
        with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, num_kvcache_blocks=8) as llm:
            generate(llm, [[1, 2, 3]])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # max_model_len is lowered
        cycle()
        before, resident = remains(), resident_bytes()
        for _ in range(200):
            cycle()
    assert remains() - before == set()
    assert resident_bytes() - resident < 64 * 2**20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
