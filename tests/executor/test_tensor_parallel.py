"""The engine over several processes, on a CPU with gloo: the answers of one process, and an end without remains."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, ConfigError, EngineClosedError, SamplingParams, WorkerError, tiny_model_path
from nanoinfer.device import select_devices
from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel, connect
from nanoinfer.executor import parallel_runner, workers
from nanoinfer.executor.interrupts import postponed_interrupt
from nanoinfer.executor.parallel_runner import run_worker
from nanoinfer.executor.shm_ring import SLOT_SIZE
from nanoinfer.executor.workers import PASSED
from nanoinfer.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what is left of an engine")

Checkpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 63, 65, 130)


def random_prompts(lengths: tuple[int, ...], vocab_size: int = 500, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def remains() -> set[str]:
    """Names of what an engine could leave behind: segments, folders, open files, processes, threads."""
    segments = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
    folders = {str(path) for path in Path(os.environ["TMPDIR"]).glob("nanoinfer-*")}
    descriptors = {f"descriptor {count}" for count in range(len(os.listdir("/proc/self/fd")))}
    processes = {str(process) for process in active_children()}
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("nanoinfer")}
    return segments | folders | descriptors | processes | threads


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


def worker_pids(llm: LLM) -> list[int]:
    return llm.engine.runner.worker_pids


# --- the same answers ---


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ({"tie_word_embeddings": True}, 2),
        ({"num_key_value_heads": 1, "attention_bias": True}, 2),
        ({"vocab_size": 500, "num_attention_heads": 6, "num_key_value_heads": 6}, 3),
        ({"vocab_size": 500, "tie_word_embeddings": True, "attention_bias": True}, 4),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nothing_remains")
def test_several_ranks_give_the_tokens_of_one(random_checkpoint: Checkpoint, overrides: dict, size: int) -> None:
    if size == 3:
        overrides = {**overrides, "intermediate_size": 159}
    folder, prompts = random_checkpoint(**overrides), random_prompts(LENGTHS)
    with LLM(folder, device="cpu") as llm:
        expected = [generate(llm, prompts, params) for params in (GREEDY, SAMPLED)]
    with LLM(folder, device="cpu", tensor_parallel_size=size) as llm:
        actual = [generate(llm, prompts, params) for params in (GREEDY, SAMPLED)]
    assert actual == expected


@pytest.mark.usefixtures("nothing_remains")
def test_sums_exchanged_in_slices_change_nothing(random_checkpoint: Checkpoint) -> None:
    folder, prompts = random_checkpoint(attention_bias=True), random_prompts((1500,) * 6)
    options = {"device": "cpu", "max_num_batched_tokens": 2 * SLICE_TOKENS + 500, "max_model_len": 1600}
    with LLM(folder, **options) as llm:
        expected = generate(llm, prompts, GREEDY)
    with LLM(folder, tensor_parallel_size=2, **options) as llm:
        assert generate(llm, prompts, GREEDY) == expected


@pytest.mark.usefixtures("nothing_remains")
def test_chunks_preemption_cached_prefixes_and_other_block_sizes_change_nothing(random_checkpoint: Checkpoint) -> None:
    prompts = random_prompts((30,) * 6) + random_prompts((100, 47))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    options: dict[str, Any] = {
        "kvcache_block_size": 48,
        "num_kvcache_blocks": 9,
        "max_model_len": 400,
        "max_num_batched_tokens": 50,
        "max_num_seqs": 6,
    }
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = generate(llm, prompts, params)
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, **options) as llm:
        llm.engine.scheduler.reserved_tokens = 0
        assert generate(llm, prompts, params) == expected
        assert llm.engine.scheduler.num_preemptions > 0
        outputs = llm.generate(prompts[-2:], GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [96, 0]
        assert [output.token_ids for output in outputs] == [tokens[:16] for tokens in expected[-2:]]


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_packet_larger_than_a_slot_arrives(random_checkpoint: Checkpoint, overlap: bool) -> None:
    [prefix] = random_prompts((1500,))
    prompts = [[*prefix, index] for index in range(16)]  # whose keys and values are shared, but not their ids
    assert sum(map(len, prompts)) > SLOT_SIZE
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = generate(llm, prompts, params)
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, overlap=overlap) as llm:
        assert generate(llm, prompts, params) == expected


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
def test_two_engines_of_two_ranks_each_live_side_by_side(random_checkpoint: Checkpoint) -> None:
    prompts = random_prompts(LENGTHS)
    options: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2}
    with LLM(random_checkpoint(), **options) as first, LLM(tiny_model_path(), **options) as second:
        before = generate(first, prompts), generate(second, prompts)
        results = {}

        def run(llm: LLM) -> None:
            results[llm] = generate(llm, prompts)

        threads = [threading.Thread(target=run, args=(llm,)) for llm in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert (results[first], results[second]) == before


def test_one_rank_needs_no_process_no_thread_and_no_process_group(random_checkpoint: Checkpoint) -> None:
    threads = threading.active_count()
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=1) as llm:
        generate(llm, [[1, 2, 3]])
        assert isinstance(llm.engine.runner, ModelRunner)
        assert active_children() == []
        assert threading.active_count() == threads
        assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_dummy_weights_differ_between_ranks(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, load_format="dummy") as llm:
        tokens = generate(llm, [[1, 2, 3]] * 8, SamplingParams(temperature=5.0, max_tokens=20, ignore_eos=True))
    ids = [token_id for row in tokens for token_id in row]
    assert min(ids) < 256 <= max(ids)


def exchange(rank: int, link: Any, folder: Path) -> None:
    tp = connect(rank, 3, torch.device("cpu"), folder / "store")
    answer_exchange(tp)
    link.sendall(PASSED)
    link.recv(1)


def answer_exchange(tp: TensorParallel) -> None:
    assert tp.all_reduce(torch.tensor([1.0, tp.rank])).tolist() == [3.0, 3.0]
    assert tp.all_gather(torch.tensor([[tp.rank], [10]])).tolist() == [[[rank], [10]] for rank in range(3)]
    assert tp.minimum(7 - tp.rank, torch.device("cpu")) == 5
    x = torch.arange(2 * SLICE_TOKENS + 1, dtype=torch.float32).unsqueeze(1).expand(-1, 2)
    weight, bias = torch.full((1, 2), tp.rank + 1.0), torch.ones(1)
    expected = 2 * (1 + 2 + 3) * x[:, :1] + 3
    few = tp.sum_of_products(x[: SLICE_TOKENS - 1], weight, bias)
    assert isinstance(few, torch.Tensor)
    assert torch.equal(few, expected[: SLICE_TOKENS - 1])
    many = tp.sum_of_products(x, weight, bias)
    assert [len(part.value) for part in many] == [SLICE_TOKENS + 1, SLICE_TOKENS]
    assert torch.equal(torch.cat([part.wait() for part in many]), expected)


@pytest.mark.usefixtures("nothing_remains")
def test_ranks_exchange_sums_parts_and_the_smallest_number_and_no_global_group_is_made() -> None:
    ranks = workers.Workers(3, exchange, ())
    answer_exchange(connect(0, 3, torch.device("cpu"), ranks.folder / "store"))
    ranks.wait_for_stage(1)
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
        ConfigError, match="tensor_parallel_size=3 needs as many GPUs, and PyTorch sees 4, of which cuda:2"
    ):
        select_devices("cuda:2", 3)


@pytest.mark.usefixtures("nothing_remains")
def test_an_error_of_all_ranks_is_that_of_one(random_checkpoint: Checkpoint) -> None:
    options: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 4, "max_model_len": 65}
    with pytest.raises(ConfigError, match="max_model_len=65 is more than the KV cache holds"):
        LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, **options)


# --- workers that end ---


def fails_at_start(rank: int, *args: Any) -> None:
    raise OSError("no GPU for you")


def is_killed_at_start(rank: int, *args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_while_loading(rank: int, *args: Any) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("the weights are too large")

    ModelRunner._load_model = fail  # type: ignore[assignment]
    run_worker(rank, *args)


def is_killed_while_loading(rank: int, *args: Any) -> None:
    ModelRunner._load_model = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    run_worker(rank, *args)


def exits_while_loading(rank: int, *args: Any) -> None:
    ModelRunner._load_model = lambda *_: os._exit(5)  # type: ignore[assignment]
    run_worker(rank, *args)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (fails_at_start, "rank 1 .* Its traceback:\n.*in fails_at_start\n.*OSError: no GPU for you"),
        (is_killed_at_start, "rank 1 of tensor_parallel_size=2 was ended by SIGKILL"),
        (fails_while_loading, "rank 1 .* Its traceback:\n.*MemoryError: the weights are too large"),
        (is_killed_while_loading, "rank 1 of tensor_parallel_size=2 was ended by SIGKILL"),
        pytest.param(
            exits_while_loading, "rank 1 of tensor_parallel_size=2 ended with exit code 5", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.usefixtures("nothing_remains")
def test_a_worker_that_ends_while_it_starts_is_an_error_of_llm_that_says_why(
    monkeypatch: pytest.MonkeyPatch, work: Callable[..., None], message: str
) -> None:
    monkeypatch.setattr(parallel_runner, "run_worker", work)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"(?s){message}"):
        LLM(tiny_model_path(), device="cpu", tensor_parallel_size=2)
    assert time.monotonic() - started < 10


def fails_in_the_fifth_step(rank: int, *args: Any) -> None:
    launch, count = ModelRunner._launch, 0

    def fail(self: ModelRunner, packet: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5 and rank == 1:
            raise ArithmeticError("one too many")
        return launch(self, packet)

    ModelRunner._launch = fail  # type: ignore[method-assign]
    run_worker(rank, *args)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.usefixtures("nothing_remains")
def test_a_worker_that_fails_in_a_step_is_an_error_of_generate_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """That of rank 1, and not those of the ranks that failed because it did."""
    with monkeypatch.context() as patch:
        patch.setattr(parallel_runner, "run_worker", fails_in_the_fifth_step)
        llm = LLM(tiny_model_path(), device="cpu", tensor_parallel_size=size)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 .* Its traceback:\n.*in fail\n.*ArithmeticError: one too many"):
        generate(llm, [[1, 2, 3]])
    assert time.monotonic() - started < 10
    assert llm.engine.scheduler.is_finished()
    for call in (lambda: llm.generate([1]), lambda: llm.add_request([1])):
        with pytest.raises(EngineClosedError, match="make a new LLM"):
            call()
    llm.close()
    with LLM(tiny_model_path(), device="cpu", tensor_parallel_size=2) as llm:
        generate(llm, [[1, 2, 3]])


@pytest.mark.parametrize("when", ["idle", "in a step"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("nothing_remains")
def test_a_worker_that_is_killed_is_an_error_of_generate(when: str, sent: signal.Signals) -> None:
    llm = LLM(tiny_model_path(), device="cpu", tensor_parallel_size=2)
    generate(llm, [[1, 2, 3]])
    killer = threading.Timer(0 if when == "idle" else 0.3, os.kill, (worker_pids(llm)[0], sent))
    killer.start()
    if when == "idle":
        time.sleep(0.2)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank 1 of tensor_parallel_size=2 was ended by {sent.name}"):
        generate(llm, [[1, 2, 3]] * 4, LONG)
    assert time.monotonic() - started < 10
    killer.join()
    llm.close()


@pytest.mark.usefixtures("nothing_remains")
def test_an_error_of_rank_0_in_the_middle_of_a_step_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model_path(), device="cpu", tensor_parallel_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_prefill", lambda *_: 1 / 0)
        patch.setattr(workers, "EXPLANATION_SECONDS", 0.1)
        with pytest.raises(ZeroDivisionError):
            generate(llm, [[1, 2, 3]])
    with pytest.raises(EngineClosedError, match="make a new LLM"):
        generate(llm, [[1, 2, 3]])


def test_an_exit_signal_without_a_name_is_told_by_its_number() -> None:
    llm = LLM(tiny_model_path(), device="cpu", tensor_parallel_size=2)
    os.kill(worker_pids(llm)[0], signal.SIGRTMIN + 6)
    with pytest.raises(WorkerError, match=f"rank 1 .* was ended by signal {signal.SIGRTMIN + 6};"):
        generate(llm, [[1, 2, 3]])
    llm.close()


# --- Ctrl-C ---


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_second_ctrl_c_does_not_wait_for_the_end_of_a_step(depth: int) -> None:
    num_sent = 0

    def send(depth: int) -> None:
        nonlocal num_sent
        with postponed_interrupt():
            if depth > 1:
                send(depth - 1)
            while depth == 1 and num_sent < 5:
                num_sent += 1
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        send(depth)
    assert num_sent == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("nothing_remains")
def test_an_interrupted_generate_leaves_a_usable_engine() -> None:
    """Ctrl-C goes to every process of the terminal's group."""
    with LLM(tiny_model_path(), device="cpu", tensor_parallel_size=2) as llm:
        expected = generate(llm, [[1, 2, 3], [4, 5]])
        for delay in (0.05, 0.15, 0.3):
            pids = [*worker_pids(llm), os.getpid()]
            timer = threading.Timer(delay, lambda pids=pids: [os.kill(pid, signal.SIGINT) for pid in pids])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                generate(llm, [[1, 2, 3]] * 4, LONG)
            timer.join()
            assert llm.is_finished()
            assert llm.engine.block_manager.num_used_blocks == 0
            assert generate(llm, [[1, 2, 3], [4, 5]]) == expected


# --- ends of the engine ---


@pytest.mark.usefixtures("nothing_remains")
def test_closing_twice_forgetting_and_leaving_in_the_middle_of_a_request_all_clean_up(
    random_checkpoint: Checkpoint,
) -> None:
    options: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2}
    llm = LLM(random_checkpoint(), **options)
    llm.close()
    llm.close()
    llm = LLM(random_checkpoint(), **options)
    pids = worker_pids(llm)
    del llm
    gc.collect()
    assert not any(is_running(pid) for pid in pids)
    with LLM(random_checkpoint(), **options) as llm:
        llm.add_request([1, 2, 3], LONG)
        llm.step()  # and another is in flight


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_engines_opened_and_closed_leave_nothing_behind(random_checkpoint: Checkpoint, count: int) -> None:
    def cycle() -> None:
        with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2, num_kvcache_blocks=8) as llm:
            generate(llm, [[1, 2, 3]])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # max_model_len is lowered
        cycle()
        before, resident = remains(), resident_bytes()
        for _ in range(count):
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


# --- scripts ---

MAKE = "llm = LLM(tiny_model_path(), device='cpu', tensor_parallel_size=2, max_num_seqs=8)"
SCRIPT = """
import os, sys, time
from nanoinfer import LLM, SamplingParams, tiny_model_path

def main():
    {make}
    print(*llm.engine.runner.worker_pids, flush=True)
    {rest}

if __name__ == "__main__":
    main()
"""


def start_script(folder: Path, source: str) -> subprocess.Popen:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path)], env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param("llm.generate([1, 2, 3], use_tqdm=False)", marks=pytest.mark.slow),
        "sys.modules[__name__].kept = llm; llm.add_request([1, 2, 3]); llm.step()",
        pytest.param("sys.modules[__name__].kept = llm; llm.close(); llm.close()", marks=pytest.mark.slow),
    ],
    ids=["forgotten", "kept", "closed"],
)
def test_a_script_ends_without_a_word_however_its_engine_does(tmp_path: Path, rest: str) -> None:
    with start_script(tmp_path, SCRIPT.format(make=MAKE, rest=rest)) as script:
        out, err = script.communicate(timeout=60)
    assert (script.returncode, err) == (0, "")
    assert not any(is_running(int(pid)) for pid in out.split())
    assert list(tmp_path.glob("nanoinfer-*")) == []


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param("time.sleep(60)", marks=pytest.mark.slow),
        "llm.generate([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True))",
    ],
    ids=["idle", "in a step"],
)
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, rest: str) -> None:
    with start_script(tmp_path, SCRIPT.format(make=MAKE, rest=rest)) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 1
        time.sleep(0.5)
        script.kill()
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
    assert list(tmp_path.glob("nanoinfer-*")) == []


def test_a_script_without_a_main_guard_is_told_to_have_one(tmp_path: Path) -> None:
    with start_script(tmp_path, f"from nanoinfer import LLM, tiny_model_path\n{MAKE}") as script:
        _, err = script.communicate(timeout=60)
    assert script.returncode == 1
    assert err.count("Traceback") == 1, "the worker's own would only confuse"
    assert "WorkerError: tensor_parallel_size=2 spawns processes that import this script" in err
    assert 'put the code that it runs under `if __name__ == "__main__":`' in err
    assert list(tmp_path.glob("nanoinfer-*")) == []


def test_a_script_from_stdin_is_told_to_be_a_file() -> None:
    script = f"from nanoinfer import LLM, tiny_model_path\n{MAKE}"
    ended = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert ended.stderr.count("Traceback") == 1
    assert "import this script, which was read from stdin; run it from a file" in ended.stderr


@pytest.mark.slow
def test_ctrl_c_in_a_script_ends_it_as_in_any_other(tmp_path: Path) -> None:
    rest = "llm.generate([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)"
    with start_script(tmp_path, SCRIPT.format(make=MAKE, rest=rest)) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        time.sleep(0.5)
        os.killpg(script.pid, signal.SIGINT)
        _, err = script.communicate(timeout=30)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert not any(is_running(pid) for pid in pids)
    assert list(tmp_path.glob("nanoinfer-*")) == []
