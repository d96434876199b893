"""run-batch, killed at random moments: every line has its answer once, and the one of a job that was left alone."""

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from nanoinfer import LLM, tiny_model_path
from nanoinfer.batch.batch_job import run_batch


def write_input(path: Path, num_lines: int, random: Random) -> None:
    with path.open("w") as file:
        for index in range(num_lines):
            body = {"max_tokens": random.randint(1, 8), "temperature": 0}
            question = f"What is {random.randint(0, 999)} + {random.randint(0, 999)}?"
            if index % 2:
                body |= {"messages": [{"role": "user", "content": question}]}
            else:
                body |= {"prompt": question * random.randint(1, 3)}
            file.write(json.dumps({"custom_id": f"request {index}", **body}) + "\n")


def answers(path: Path) -> dict[str, list]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
    assert len(by_id) == len(lines), "an answer was written twice"
    return by_id


def whole_lines(path: Path) -> bytes:
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def kill_at_a_random_moment(process: subprocess.Popen, output: Path, random: Random) -> None:
    """While it starts, or after a few more answers; what is torn off its last line is lost as in a power failure."""
    if random.random() < 0.2:
        time.sleep(random.uniform(0, 2))
    else:
        wanted = len(whole_lines(output).splitlines()) + random.randint(1, 8)
        while process.poll() is None and len(whole_lines(output).splitlines()) < wanted:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.03))
    assert process.poll() is None, process.communicate()[1]
    process.kill()
    process.communicate()
    if random.random() < 0.3 and (lines := whole_lines(output).splitlines(keepends=True)):
        with output.open("ab") as file:
            file.truncate(output.stat().st_size - random.randint(1, len(lines[-1]) - 1))


@pytest.mark.parametrize(
    ("num_lines", "num_kills"),
    [
        pytest.param(60, 1, id="once"),
        pytest.param(60, 2, id="twice", marks=pytest.mark.slow),
        pytest.param(2000, 100, id="100 times", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_killed_again_and_again_loses_nothing_and_repeats_nothing(
    tmp_path: Path, num_lines: int, num_kills: int
) -> None:
    random = Random(num_kills)
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(path, num_lines, random)
    options = ["--model", str(tiny_model_path()), "--device", "cpu", "--max-num-seqs", "8", "--max-tokens", "none"]
    command = [sys.executable, "-m", "nanoinfer", "run-batch", "-i", str(path), "-o", str(output), *options]
    root = Path(__file__).parents[2]
    for _ in range(num_kills):
        before = whole_lines(output)
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        kill_at_a_random_moment(process, output, random)
        kept = before.splitlines(keepends=True)
        assert whole_lines(output).startswith(b"".join(kept[:-1])), "what was written has changed"
    assert 0 < len(whole_lines(output).splitlines()) < num_lines, "the last kill came before the end"

    last = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert last.returncode == 0, last.stderr
    assert "Qwen3ForCausalLM with attention by torch" in last.stderr, "what was loaded is shown"
    assert f"{num_lines} of {num_lines} lines are done" in last.stderr
    run_batch(lambda: LLM(tiny_model_path(), device="cpu"), path, tmp_path / "alone", use_tqdm=False)
    assert len(answers(output)) == num_lines
    assert answers(output) == answers(tmp_path / "alone")
