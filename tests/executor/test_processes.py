"""Worker processes: how they end with their parent, and scripts that start them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoinfer.engine.interrupts import postponed_interrupt
from tests.executor.test_tensor_parallel import is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see which processes run")

ENGINE = "llm = LLM(tiny_model_path(), device='cpu', tensor_parallel_size=2, max_num_seqs=8)"
LONG_STEP = "llm.generate([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)"
SCRIPT = """
import os, sys, time
from multiprocessing import active_children
from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.executor.processes import Workers

def sleep(rank, link, folder):
    link.sendall(b"+")
    time.sleep(60)

def main():
    {make}
    print(*[child.pid for child in active_children()], flush=True)
    {rest}

if __name__ == "__main__":
    main()
"""


def start_script(folder: Path, source: str) -> subprocess.Popen:
    path = folder / "script.py"
    path.write_text(source)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path)], env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


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
    with start_script(tmp_path, SCRIPT.format(make=ENGINE, rest=rest)) as script:
        out, err = script.communicate(timeout=60)
    assert (script.returncode, err) == (0, "")
    assert not any(is_running(int(pid)) for pid in out.split())
    assert list(tmp_path.glob("nanoinfer-*")) == []


@pytest.mark.parametrize(
    ("make", "rest"),
    [
        ("workers = Workers(2, sleep, ()); workers.wait_for_stage(1)", "time.sleep(60)"),
        pytest.param(ENGINE, "time.sleep(60)", marks=pytest.mark.slow),
        pytest.param(ENGINE, LONG_STEP, marks=pytest.mark.slow),
    ],
    ids=["workers alone", "an idle engine", "an engine in a step"],
)
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, make: str, rest: str) -> None:
    with start_script(tmp_path, SCRIPT.format(make=make, rest=rest)) as script:
        assert script.stdout is not None
        [pid] = [int(pid) for pid in script.stdout.readline().split()]
        time.sleep(0.5)
        assert is_running(pid)
        script.kill()
        deadline = time.monotonic() + 10
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not is_running(pid)
    assert list(tmp_path.glob("nanoinfer-*")) == []


WORKERS_ALONE = """
from contextlib import closing
from nanoinfer.executor.processes import Workers
with closing(Workers(2, print, ())) as workers:
    workers.wait_for_stage(1)
"""


@pytest.mark.parametrize(
    "source",
    [WORKERS_ALONE, pytest.param(f"from nanoinfer import LLM, tiny_model_path\n{ENGINE}", marks=pytest.mark.slow)],
    ids=["workers alone", "an engine"],
)
def test_a_script_without_a_main_guard_is_told_to_have_one(tmp_path: Path, source: str) -> None:
    with start_script(tmp_path, source) as script:
        _, err = script.communicate(timeout=60)
    assert script.returncode == 1
    assert err.count("Traceback") == 1, "the worker's own would only confuse"
    assert "WorkerError: tensor_parallel_size=2 spawns processes that import this script" in err
    assert 'put the code that it runs under `if __name__ == "__main__":`' in err
    assert list(tmp_path.glob("nanoinfer-*")) == []


@pytest.mark.slow
def test_a_script_from_stdin_is_told_to_be_a_file() -> None:
    ended = subprocess.run([sys.executable, "-"], input=WORKERS_ALONE, capture_output=True, text=True, timeout=60)
    assert ended.stderr.count("Traceback") == 1
    assert "import this script, which was read from stdin; run it from a file" in ended.stderr


@pytest.mark.slow
def test_ctrl_c_in_a_script_ends_it_as_in_any_other(tmp_path: Path) -> None:
    with start_script(tmp_path, SCRIPT.format(make=ENGINE, rest=LONG_STEP)) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        time.sleep(0.5)
        os.killpg(script.pid, signal.SIGINT)
        _, err = script.communicate(timeout=30)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert not any(is_running(pid) for pid in pids)
    assert list(tmp_path.glob("nanoinfer-*")) == []
