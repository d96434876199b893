"""How replicas end: one of them, the last of them, and all with their LLM or its script. Nothing is left behind."""

import asyncio
import base64
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer import LLM, ConfigError, EngineClosedError, ModelError, SamplingParams, WorkerError
from nanoinfer.executor.processes import Workers
from nanoinfer.replicas import replicated_engine, start_replicas
from tests.executor.test_processes import start_script
from tests.executor.test_tensor_parallel import is_running, private_folder, remains  # noqa: F401 (a fixture)
from tests.pooling.test_decoders import assert_close

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what is left of an engine")

Checkpoint = Callable[..., Path]
PROMPTS = [[1, 2, index] for index in range(8)]
SHORT = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def first_process(quick_workers: None) -> None:
    """The first one starts a helper of multiprocessing's, which stays."""
    Workers(2, print, ()).close()


@pytest.fixture(autouse=True)
def nothing_remains(private_folder: None) -> Iterator[None]:  # noqa: F811
    resource_tracker.ensure_running()
    before = remains()
    yield
    gc.collect()
    assert remains() - before == set()


def start(folder: Path, size: int = 2, **options: Any) -> tuple[LLM, list[int]]:
    """An engine, and the ids of its processes."""
    llm = LLM(folder, device="cpu", data_parallel_size=size, num_kvcache_blocks=32, **options)
    return llm, [replica.workers._processes[0].pid for replica in llm.engine.replicas]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_requests_of_a_replica_that_dies_go_to_the_others(
    random_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, LONG, use_tqdm=False)]
    llm, pids = start(random_checkpoint())
    killed = []

    def kill_one(_: Any) -> None:
        killed.append(kill(pids[1])) if not killed else None

    params = [SHORT, *[LONG] * 7]
    loss = r"replica 1 of data_parallel_size=2 was ended by SIGKILL.*; [1-4] of its requests go to the other one"
    with llm:
        with pytest.warns(RuntimeWarning, match=loss):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, on_finish=kill_one)
        assert [output.token_ids for output in outputs[1:]] == expected[1:]
        assert [output.request_id for output in outputs] == [*range(8)]
        assert "replica 1 of data_parallel_size=2 was ended by SIGKILL" in caplog.text
        assert len(llm.generate(PROMPTS, SHORT, use_tqdm=False)) == 8, "and so do later ones"
        llm.sleep()
        llm.wake_up()
        llm.reset_prefix_cache()
        llm.update_weights({"model.norm.weight": torch.ones(96)})


def test_requests_of_a_replica_that_hangs_go_to_the_others(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_engine, "MAX_STEP_SECONDS", {"cpu": 2.0})
    monkeypatch.setattr(replicated_engine, "CHECK_SECONDS", 0.1)
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, LONG, use_tqdm=False)]
    llm, pids = start(random_checkpoint())
    with llm:
        time.sleep(2.5)  # with nothing to do it may be silent
        assert len(llm.generate(PROMPTS, SHORT, use_tqdm=False)) == 8
        os.kill(pids[1], signal.SIGSTOP)
        loss = "replica 1 of data_parallel_size=2 hangs: it has not ended a step for 2 s, and was killed; 4 of its"
        with pytest.warns(RuntimeWarning, match=loss):
            outputs = llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected


def test_a_replica_that_gets_what_it_cannot_read_says_so(random_checkpoint: Checkpoint) -> None:
    llm, _ = start(random_checkpoint())
    with llm:
        llm.engine.replicas[0].connection.send_bytes(b"no pickle")
        with pytest.warns(RuntimeWarning, match=r"(?s)replica 0 of data_parallel_size=2 failed.*UnpicklingError"):
            assert len(llm.generate(PROMPTS, LONG, use_tqdm=False)) == 8


def test_texts_of_a_replica_that_dies_are_embedded_by_the_others(random_checkpoint: Checkpoint) -> None:
    options: dict[str, Any] = {"hidden_states": [-1], "use_tqdm": False}
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = llm.embed(PROMPTS, **options)
    llm, pids = start(random_checkpoint())
    os.kill(pids[1], signal.SIGSTOP)  # it takes its share, and never answers

    def kill_one(_: Any) -> None:
        end()
        kill(pids[1])

    with llm:
        end = llm.on_step(kill_one)  # after a step of the other one
        loss = r"replica 1 of data_parallel_size=2 was ended by SIGKILL.*; 4 of its requests go to the other one"
        with pytest.warns(RuntimeWarning, match=loss):
            outputs = llm.embed(PROMPTS, **options)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert_close(ours.embedding, theirs.embedding)
        assert ours.hidden_states is not None
        assert theirs.hidden_states is not None
        assert_close(ours.hidden_states[-1], theirs.hidden_states[-1])


def test_a_stream_with_tokens_of_a_replica_that_dies_ends_with_an_error(random_checkpoint: Checkpoint) -> None:
    llm, pids = start(random_checkpoint())
    with llm:
        stream = llm.stream(PROMPTS[:2], LONG)
        first = next(stream)
        kill(pids[llm.engine._requests[first.request_id].replica])
        with pytest.warns(RuntimeWarning, match="and 1 streams end with an error"):
            reasons = {chunk.index: chunk.finish_reason for chunk in stream}
    assert reasons == {first.index: "error", 1 - first.index: "length"}


@pytest.mark.filterwarnings("ignore:replica")
def test_a_sample_whose_last_chunk_came_gets_no_other_one_when_its_replica_dies(random_checkpoint: Checkpoint) -> None:
    llm, pids = start(random_checkpoint())
    with llm:
        params = SamplingParams(n=2, max_tokens=500, ignore_eos=True, seed=0)
        prompts = [PROMPTS[0]]
        [output] = llm.generate(prompts, params, use_tqdm=False)
        first, second = (sample.token_ids for sample in output.outputs)
        stop = next(token for token in first if token not in second)
        chunks = []
        for chunk in llm.stream(prompts, replace(params, stop_token_ids=[stop])):
            chunks.append(chunk)
            if chunk.finish_reason == "stop":
                kill(pids[llm.engine._requests[chunk.request_id].replica])
    ends = [(chunk.sample, chunk.finish_reason) for chunk in chunks if chunk.finish_reason]
    assert ends == [(0, "stop"), (1, "error")]


@pytest.mark.filterwarnings("ignore:replica")  # of the first one that ends
def test_the_end_of_the_last_replica_is_an_error_that_closes_the_engine(random_checkpoint: Checkpoint) -> None:
    llm, pids = start(random_checkpoint())
    for pid in pids:
        kill(pid)
    ended = r"replica [01] of data_parallel_size=2 was ended by SIGKILL.*make a new LLM"
    calls = [
        lambda: llm.generate(PROMPTS, LONG, use_tqdm=False),
        lambda: llm.generate([1], on_error="return"),
        lambda: llm.stream([1]),
        lambda: llm.score([[1]], [[2]]),
        lambda: llm.embed([1]),
        lambda: llm.add_request([1]),
        lambda: llm.update_weights({}),
        llm.step,
        llm.sleep,
        llm.wake_up,
        llm.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(WorkerError, match=ended):
            call()
    llm.close()
    for call in calls:
        with pytest.raises(EngineClosedError, match="this engine was closed; make a new LLM"):
            call()


@pytest.mark.filterwarnings("ignore:replica")
def test_the_end_of_the_last_replica_is_an_error_of_every_call_that_waits(random_checkpoint: Checkpoint) -> None:
    llm, pids = start(random_checkpoint())
    calls = {
        "generate": lambda: llm.generate([1], LONG, use_tqdm=False),
        "on_error": lambda: llm.generate([1], LONG, use_tqdm=False, on_error="return"),
        "stream": lambda: [*llm.stream([1], LONG)],
        "score": lambda: llm.score([[1]], [[2]], use_tqdm=False),
        "embed": lambda: llm.embed([1], use_tqdm=False),
        "agenerate": lambda: asyncio.run(llm.agenerate([1], LONG)),
    }
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(len(calls)) as pool:
        waiting = {name: pool.submit(call) for name, call in calls.items()}
        while len(llm.engine._requests) < len(calls):
            time.sleep(0.01)
        for pid in pids:
            kill(pid)
        errors = {name: one.exception(timeout=60) for name, one in waiting.items()}
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(calls, WorkerError)
    assert len({*map(str, errors.values())}) == 1
    llm.close()


def test_a_replica_that_dies_while_weights_come_closes_the_engine(random_checkpoint: Checkpoint) -> None:
    llm, pids = start(random_checkpoint())

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.ones(96)
        kill(pids[0])
        yield "model.norm.weight", torch.zeros(96)

    for call in (lambda: llm.update_weights(weights()), lambda: llm.generate([1])):
        with pytest.raises(WorkerError, match=r"make a new LLM"):
            call()


def test_an_engine_that_is_forgotten_in_a_call_ends_its_replicas(random_checkpoint: Checkpoint) -> None:
    llm, pids = start(random_checkpoint())
    stream = llm.stream([1], LONG)
    next(stream)
    del llm, stream
    gc.collect()
    assert not any(map(is_running, pids))


def test_a_trace_has_the_steps_of_all_replicas_and_every_request(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    llm, _ = start(random_checkpoint(), trace=tmp_path / "run.html")
    with llm:
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
        llm.add_request([1], LONG)
        llm.step()
    page = (tmp_path / "run.html").read_text()
    [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    trace = json.loads(data)

    def column(described: dict[str, str]) -> Any:
        return np.frombuffer(base64.b64decode(described["base64"]), described["type"].lower())

    assert set(column(trace["steps"]["replica"])) == {0, 1}
    assert {*range(8)} <= {*trace["requests"]["request_id"]}
    kinds = [trace["kinds"][kind] for kind in column(trace["changes"]["kind"])]
    assert kinds.count("finished") == 8


def test_ctrl_c_ends_the_call_and_the_engine_goes_on(random_checkpoint: Checkpoint) -> None:
    llm, _ = start(random_checkpoint())

    def interrupt(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, [SHORT, *[LONG] * 7], use_tqdm=False, on_finish=interrupt)
        assert llm.is_finished()
        assert len(llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].token_ids) == 8


def test_what_is_wrong_with_a_model_is_the_error_of_one_engine(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = random_checkpoint()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        start(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=513 is more than the KV cache holds"):
        LLM(folder, device="cpu", data_parallel_size=2, num_kvcache_blocks=2, max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len=4096 is above the model's own limit of 2048"):
        start(folder, max_model_len=4096)
    assert active_children() == []


def test_replicas_take_as_many_gpus_as_they_have_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("this makes a context on a GPU"))
    config = start_replicas.EngineConfig("tiny", data_parallel_size=2, tensor_parallel_size=2)
    assert start_replicas.choose_devices(config) == ["cuda:0", "cuda:2"]
    config = start_replicas.EngineConfig("tiny", data_parallel_size=3, tensor_parallel_size=2, device="cuda:2")
    assert start_replicas.choose_devices(config) == ["cuda:2", "cuda:4", "cuda:6"]
    config = start_replicas.EngineConfig("tiny", data_parallel_size=4, tensor_parallel_size=2, device="cuda:1")
    with pytest.raises(
        ConfigError, match="needs 8 GPUs, and PyTorch sees 8; cuda:1 is the first to use; use at most 7"
    ):
        start_replicas.choose_devices(config)


@pytest.mark.slow
def test_replicas_of_several_ranks_give_the_tokens_of_one_process(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, SHORT, use_tqdm=False)]
    llm, _ = start(random_checkpoint(), tensor_parallel_size=2)
    with llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, SHORT, use_tqdm=False)] == expected


SCRIPT = """
import os, sys, time
from multiprocessing import active_children
from nanoinfer import LLM, SamplingParams

def main():
    llm = LLM({folder!r}, device='cpu', data_parallel_size=2, num_kvcache_blocks=8)
    print(*[child.pid for child in active_children()], flush=True)
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
    llm.step()
    {rest}

if __name__ == "__main__":
    main()
"""
END = "sys.modules[__name__].kept = llm"
WAIT = "[llm.step() for _ in range(10**9)]"


@pytest.mark.parametrize(
    "how", ["its end", pytest.param("Ctrl-C", marks=pytest.mark.slow), pytest.param("a kill", marks=pytest.mark.slow)]
)
def test_replicas_end_with_their_script(random_checkpoint: Checkpoint, tmp_path: Path, how: str) -> None:
    source = SCRIPT.format(folder=str(random_checkpoint()), rest=END if how == "its end" else WAIT)
    with start_script(tmp_path, source) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        if how == "Ctrl-C":
            os.killpg(script.pid, signal.SIGINT)
        elif how == "a kill":
            script.kill()
        _, err = script.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert list(tmp_path.glob("nanoinfer-*")) == []
    if how == "its end":
        assert (script.returncode, err) == (0, "")
    elif how == "Ctrl-C":
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert err.count("Traceback") == 1


FORMS = """
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams

if __name__ == "__main__":
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    with LLM("tiny", device="cpu", data_parallel_size=2, max_model_len=64) as llm:
        llm.generate(["a", "b"], params, use_tqdm=False)
"""


def test_replicas_that_compiled_grammars_end_without_a_word(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "script.py").write_text(FORMS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), "such as a warning of semaphores that nobody has freed"


def test_a_warning_that_is_an_error_leaves_no_replicas(random_checkpoint: Checkpoint) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="max_model_len is lowered"):
            LLM(random_checkpoint(), device="cpu", data_parallel_size=2, num_kvcache_blocks=1, kvcache_block_size=16)
    assert active_children() == []


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_to_have_one(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = f"from nanoinfer import LLM\nLLM({str(random_checkpoint())!r}, device='cpu', data_parallel_size=2)"
    with start_script(tmp_path, source) as script:
        _, err = script.communicate(timeout=60)
    assert err.count("Traceback") == 1
    assert "WorkerError: data_parallel_size=2 spawns processes that import this script" in err
