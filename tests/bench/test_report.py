"""The files of --json become one table, with what the figures belong to."""

import json
import re
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.__main__ import main
from nanoinfer.bench.report import describe_machine, find_commit, find_driver

LOAD = {"num_seqs": 4, "input_len": [8, 16], "output_len": [5, 5], "shared_prefix": 0, "num_samples": 1}
H200 = {"cpu": "x86_64", "cpu_cores": 16, "gpu": "NVIDIA H200", "gpu_gib": 139.8, "cuda": "13.0", "gpus_seen": 1}


def loads(*speeds: float) -> dict[str, Any]:
    runs = [{"output_tokens_per_second": speed, "share_of_floor": speed / 40_000} for speed in speeds]
    return {"model": "Qwen3-0.6B", "loads": [{"name": "small", "load": LOAD, "runs": runs}]}


def write(path: Path, figures: dict[str, Any], day: str = "2026-11-23", **options: Any) -> Path:
    machine = {"date": day, "commit": "abc1234", "hardware": H200, "versions": {"python": "3.12.3", "torch": "2.11.0"}}
    command = ["/bin/nanoinfer", "bench", "loads", "small", "--runs", "3"]
    path.write_text(json.dumps({"command": command, "options": options, **machine, **figures}))
    return path


def report(*paths: Path) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "report", *map(str, paths)])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def test_the_table_has_the_median_and_all_runs_of_each_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(write(tmp_path / "one.json", loads(20_000, 30_000, 28_000))) == 0
    assert capsys.readouterr().out == (
        "| measured | model | median | runs | share of the floor | source |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| small, 4 requests, 8 to 16 tokens in, 5 out, output tokens/s | Qwen3-0.6B | 28,000 "
        "| 20,000 / 30,000 / 28,000 | 50% / 75% / 70% | 1 |\n"
        "\n"
        "1. 2026-11-23, commit abc1234, NVIDIA H200 (139.8 GiB, 1 seen, CUDA 13.0), python 3.12.3, torch 2.11.0, "
        "`nanoinfer bench loads small --runs 3`\n"
    )


def test_a_gpu_is_named_with_its_memory_and_its_driver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho 580.95.05\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_driver() == "580.95.05"
    with monkeypatch.context() as patch:
        patch.setitem(H200, "driver", "580.95.05")
        assert report(write(tmp_path / "one.json", loads(20_000))) == 0
    assert "NVIDIA H200 (139.8 GiB, 1 seen, CUDA 13.0, driver 580.95.05), " in capsys.readouterr().out
    nvidia_smi.unlink()
    assert find_driver() is None


def test_several_files_make_one_table_and_each_line_names_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write(tmp_path / "one.json", loads(100)),
        write(tmp_path / "same.json", loads(200), quantization="fp8", enforce_eager=True, top_k=0),
        write(tmp_path / "older.json", loads(300), day="2026-11-01"),
    ]
    assert report(*paths) == 0
    table, sources = capsys.readouterr().out.split("\n\n")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [(model, median, source) for _, model, median, _, _, source in lines] == [
        ("Qwen3-0.6B", "100", "1"),
        ("Qwen3-0.6B, `--quantization fp8`, `--enforce-eager`", "200", "1"),
        ("Qwen3-0.6B", "300", "2"),
    ]
    assert [line[:13] for line in sources.splitlines()] == ["1. 2026-11-23", "2. 2026-11-01"]


def test_other_engines_of_a_file_have_lines_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vllm = {**loads(50), "hardware": H200, "versions": {"python": "3.12.3", "vllm": "0.26.0"}}
    assert report(write(tmp_path / "two.json", loads(100) | {"against": {"vllm": vllm}}, engine="nanoinfer")) == 0
    printed = capsys.readouterr().out
    assert "| Qwen3-0.6B | 100 |" in printed
    assert "| Qwen3-0.6B, vllm | 50 | 50 | 0% | 2 |" in printed
    assert "2. date unknown, commit unknown, NVIDIA H200" in printed


def test_jobs_of_text_starts_and_the_host_have_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [{"name": "plain", "num_prompts": 1024, "max_tokens": 256, "runs": [47_544.2, 47_973.4]}]
    starts = [{"seconds": seconds, "parts": {"imports": seconds / 4}} for seconds in (12.2, 6.0, 6.4, 8.0)]
    case = {"num_running": 256, "num_waiting": 0, "median": {"schedule": 31.0, "total": 153.21}}
    paths = [
        write(tmp_path / "text.json", {"model": "tiny", "jobs": jobs}),
        write(tmp_path / "start.json", {"model": "tiny", "starts": starts, "later": 6.4}),
        write(tmp_path / "host.json", {"host": [case], "calls": {"short": {"first_step": 0.012, "all": 0.301}}}),
    ]
    assert report(*paths) == 0
    assert capsys.readouterr().out.splitlines()[2:-2] == [
        "| 1,024 prompts, 256 tokens out, plain, output tokens/s | tiny | 47,759 | 47,544 / 47,973 |  | 1 |",
        "| first start, s | tiny | 12.2 | 12.2 |  | 1 |",
        "| later starts, s | tiny | 6.4 | 6 / 6.4 / 8 |  | 1 |",
        "| of these: imports, s | tiny | 1.6 | 1.5 / 1.6 / 2 |  | 1 |",
        "| decode step on the host, 256 running, 0 waiting, us | no model | 153 | 153 |  | 1 |",
        "| call of the load short: seconds until its first step | no model | 0.012 | 0.012 |  | 1 |",
        "| call of the load short: seconds of the host's CPU | no model | 0.301 | 0.301 |  | 1 |",
    ]


def test_what_a_command_writes_can_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("nanoinfer.bench.floor.GIB", 2**24)
    path = tmp_path / "figures.json"
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "throughput", "--num-seqs", "2", "--output-len", "3", "--runs", "2", "--json", str(path)])
    capsys.readouterr()
    assert report(path) == 0
    printed = capsys.readouterr().out
    assert "| default, 2 requests, 64 tokens in, 3 out, output tokens/s | tiny-qwen3 | " in printed
    assert f"\n1. {date.today().isoformat()}, commit " in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read ("),
        ("not JSON", "cannot be read ("),
        ('{"loads": []}', "was not written by nanoinfer bench; give a file that a command wrote with --json"),
        ('{"command": [], "options": {}, "hardware": {"cpu": "x", "cpu_cores": 1}, "versions": {}}', "has no figures"),
    ],
)
def test_a_file_without_figures_is_refused_by_name(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    if text is not None:
        path.write_text(text)
    assert report(path) == 2
    error = capsys.readouterr().err
    assert f"{path} " in error
    assert message in error


def test_figures_have_their_date_and_the_commit_of_the_clone(tmp_path: Path) -> None:
    machine = describe_machine("cpu")
    assert machine["date"] == date.today().isoformat()
    for arguments in (
        ["init"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    commit = find_commit(tmp_path)
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    installed = tmp_path / "site-packages"
    installed.mkdir()
    assert find_commit(installed) is None, "a repository around an installed package is another one"
