"""The commands run on the tiny checkpoint, report what they did, and refuse what contradicts itself."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
import nanoinfer
from nanoinfer.__main__ import main
from nanoinfer.bench import host
from nanoinfer.bench.commands import WHICH_LOADS
from nanoinfer.bench.workloads import LOADS, TEXT_JOBS, Load

SMALL = ["--num-seqs", "3", "--input-len", "8", "--output-len", "5"]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("nanoinfer.bench.floor.GIB", 2**24)  # rates in milliseconds


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *map(str, arguments)])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def run_json(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    assert run(*arguments, "--json", tmp_path / "figures.json") == 0
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    return figures


def test_a_cache_in_8_bits_is_named_and_lowers_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_bytes = {}
    for name in ("auto", "int8"):
        figures = run_json(tmp_path, "throughput", *SMALL, "--kv-cache-dtype", name)
        floor = figures["loads"][0]["runs"][0]["floor"]
        num_bytes[name] = floor["decode_kv_seconds"] * figures["rates"]["bandwidth"]
    assert "tiny-qwen3 (its own weights), KV cache in int8, nanoinfer on" in capsys.readouterr().out
    assert num_bytes["auto"] == pytest.approx(4 * num_bytes["int8"]), "float32 on a CPU"


def test_a_run_reports_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run_json(tmp_path, "throughput", *SMALL, "--runs", 2, "--shared-prefix", 256, "--max-num-seqs", 2)
    printed = capsys.readouterr().out
    assert "loaded in" in printed
    assert "default, seed 0: 3 requests, 792 tokens in, 15 out" in printed
    assert "seed 1" in printed
    assert "prefix cache: 512 of 792 prompt tokens found (64.6%), 280 computed" in printed
    assert re.search(r"^20\d\d-.* CPU cores, python .*, torch .*, `nanoinfer .*`$", printed, re.M)
    assert figures["options"]["num_seqs"] == 3
    assert figures["hardware"]["cpu_cores"] >= 1
    assert {"python", "torch"} <= figures["versions"].keys()
    [load] = figures["loads"]
    assert load["load_seconds"] > 0
    assert [run["seed"] for run in load["runs"]] == [0, 1]
    for run in load["runs"]:
        metrics = run["metrics"]
        assert (run["output_tokens"], metrics["cached_tokens"], metrics["prefill_tokens"]) == (15, 512, 280)
        assert metrics["decode_tokens"] == 15 - 3  # a request's first token comes out of its prefill
        assert metrics["num_decode_steps"] == run["floor"]["num_decode_steps"] == 2 * 4  # 2 of 3 requests at once
        assert run["output_tokens_per_second"] == pytest.approx(15 / run["seconds"])
        assert run["share_of_floor"] == pytest.approx(run["floor_seconds"] / run["seconds"])


def test_replicas_are_timed_together_and_the_floor_is_that_of_their_shares(tmp_path: Path) -> None:
    figures = [run_json(tmp_path, "throughput", *SMALL, "--data-parallel-size", size) for size in (1, 2)]
    one, two = (figure["loads"][0]["runs"][0] for figure in figures)
    assert one["output_tokens"] == two["output_tokens"] == two["metrics"]["num_generated_tokens"] == 15
    assert two["floor"]["decode_kv_seconds"] < one["floor"]["decode_kv_seconds"]


def test_samples_of_a_prompt_are_counted_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-seqs", 2, "--input-len", 260, "--output-len", 5, "--max-num-seqs", 4]
    figures = run_json(tmp_path, "throughput", "--load", "samples", "--n", 3, *options, "--runs", 2)
    printed = capsys.readouterr().out
    assert "samples, seed 0: 2 requests of 3 samples, 520 tokens in, 30 out" in printed
    assert "samples, 2 requests of 3 samples, median of 2 runs" in printed
    # The first sample of a prompt computes its 260 tokens, and each of the others finds a block of 256.
    assert "prefix cache: 1,024 of 1,560 prompt tokens found (65.6%), 536 computed" in printed
    for run in figures["loads"][0]["runs"]:
        metrics = run["metrics"]
        assert (run["input_tokens"], run["output_tokens"], metrics["decode_tokens"]) == (520, 2 * 3 * 5, 2 * 3 * 4)
        assert metrics["num_decode_steps"] == run["floor"]["num_decode_steps"] == 2 * 4  # 4 of 6 samples at once


def test_all_loads_run_in_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LOADS["cpu"].keys() == LOADS["cuda"].keys()
    tiny = {name: [Load(2, (2, 6), (2, 3), max_num_seqs=len(name))] for name in LOADS["cuda"]}
    tiny["score"] = [Load(2, (2, 6), (2, 3), max_num_seqs=5, num_answers=2)]
    monkeypatch.setitem(LOADS, "cpu", tiny)
    figures = run_json(tmp_path, "loads")
    names = [load["name"] for load in figures["loads"]]
    assert names[:6] == ["default", "small", "steady", "shared", "samples", "long"]
    assert capsys.readouterr().out.count("loaded in") == 11  # neighbours that need the same options share an engine


def test_loads_are_timed_against_another_engine_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(LOADS, "cpu", {name: [Load(2, (2, 6), (2, 3))] for name in LOADS["cuda"]})
    monkeypatch.setitem(sys.modules, "nanovllm", None)
    picture = tmp_path / "loads.svg"
    options = ["--against", "transformers", "--against", "nanovllm", "--picture", picture]
    figures = run_json(tmp_path, "loads", "default", "small", *options)
    assert [load["name"] for load in figures["against"]["transformers"]["loads"]] == ["default", "small"]
    assert "nanovllm is left out: --engine nanovllm cannot be imported here" in capsys.readouterr().out
    assert picture.read_text().count("<path") > 4


def test_trace_writes_a_trace_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    figures = run_json(tmp_path, "trace", tmp_path / "new" / "folder", *SMALL)
    printed = capsys.readouterr().out
    assert "no GPU was at work, so only the host's part is shown" in printed
    assert "matplotlib is not installed" in printed
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"run.html", "trace.json"}
    assert figures["trace"]["gpu"] is None


def test_text_sets_constrained_jobs_against_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    plain = Load(2, (10, 40), (5, 5), is_text=True)
    digits = replace(plain, constraint={"regex": "[0-9]*"}, num_constrained=1)
    monkeypatch.setitem(TEXT_JOBS, "cpu", [{"plain": plain, "one in digits": digits}])
    figures = run_json(tmp_path, "text", "--runs", 2)
    assert [(job["name"], len(job["runs"])) for job in figures["jobs"]] == [("plain", 2), ("one in digits", 2)]
    printed = capsys.readouterr().out
    assert "2 prompts, 5 tokens out, plain: " in printed
    assert "2 prompts, 5 tokens out, one in digits: " in printed


def test_host_times_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [small, queued] = host.measure_steps(cases=((2, 0), (2, 1000)), num_steps=4)
    assert (queued["num_running"], queued["num_waiting"], queued["num_steps"]) == (2, 1000, 4)
    assert all(0 < small["median"][part] <= small["median"]["total"] for part in ("schedule", "pack", "update"))
    assert "2 running, 1,000 waiting" in capsys.readouterr().out


def test_the_host_times_requests_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    plain, shared = Load(20, (2, 6), (3, 3)), Load(20, (2, 6), (3, 3), shared_prefix=40)
    figures = host.measure_requests(cases=((plain, 16), (shared, 16)), num_runs=1)
    assert len(figures) == 2
    assert min(figures) > 0
    assert "40 shared tokens and 2 to 6 tokens, blocks of 16" in capsys.readouterr().out


def test_the_host_times_a_call_from_its_prompts_to_its_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = host.measure_call(Load(40, (5, 15), (4, 4), shared_prefix=300))
    assert min(seconds["all"], seconds["first_step"]) > 0, "no comparison: one is CPU time, and others use the CPU too"
    computed = int(re.findall(r"([\d,]+) of them computed", capsys.readouterr().out)[0].replace(",", ""))
    assert 300 + 40 * 5 <= computed <= 300 + 40 * 15, "the prefix is computed once"


def test_the_host_is_timed_without_pytorch() -> None:
    source = (
        "import sys; from nanoinfer.bench import host; "
        "host.measure_steps(((2, 0),), 4); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["throughput", "--engine", "nanovllm", "--top-k", 20], "--engine nanovllm has no --top-k; leave it out"),
        (
            ["throughput", "--engine", "nanovllm", "--kv-cache-dtype", "fp8"],
            "nanovllm has no --kv-cache-dtype; leave it",
        ),
        (["throughput", "--engine", "vllm", "--attention-backend", "torch"], "vllm has no --attention-backend; leave"),
        (["loads", "--engine", "transformers", "--compile"], "transformers has no --compile; leave it out"),
        (["loads", "--engine", "transformers", "--tensor-parallel-size", 2], "has no --tensor-parallel-size; leave it"),
        (
            ["throughput", "--engine", "vllm", "--data-parallel-size", 2],
            "--engine vllm has no --data-parallel-size; leave it out",
        ),
        (["trace", "folder", "--data-parallel-size", 2], "a trace shows the GPU of one engine"),
        (["throughput", "--input-len", 4000, "--output-len", 97], "add up to 4097, and tiny-qwen3 takes 4096"),
        (["loads", "tiny"], "'tiny' is no load; choose from default, small, steady, shared, samples, long"),
        (["throughput", "--runs", 0], "0 is less than 1"),
        (["throughput", "--engine", "nanovllm", "--n", 2], "draws one sample of a prompt, and the load default has 2"),
        (["loads", "--engine", "transformers"], "and the load samples has 4; choose other loads, and leave --n out"),
        (["text", "--size", "0.6B"], "has no tokenizer; name a folder with one by --tokenizer, or a --model"),
        (["kernels", "--gpus", 99], "--gpus 99: PyTorch sees"),
        (["kernels", "--quantization", "int4"], "kernels are timed on a GPU, and PyTorch sees no CUDA GPU here"),
        (["kernels", "--quantization", "fp8"], "kernels are timed on a GPU, and PyTorch sees no CUDA GPU here"),
        (["kernels"], "kernels are timed on a GPU, and PyTorch sees no CUDA GPU here; run this where there is one"),
        (["throughput", "--engine", "nanovllm"], "--engine nanovllm cannot be imported here"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: list[object], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nanovllm", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run(*options) == 2
    assert message in capsys.readouterr().err


def test_the_included_model_is_called_tiny(tmp_path: Path) -> None:
    figures = run_json(tmp_path, "throughput", *SMALL, "--model", "tiny")
    assert figures["loads"][0]["runs"][0]["output_tokens"] == 15


@pytest.mark.parametrize("script", ["example.py", "bench.py"])
def test_a_script_says_in_one_line_what_is_wrong_with_its_model(script: str, tmp_path: Path) -> None:
    path = Path(bench.__file__).parent / script
    environment = {**os.environ, "PYTHONPATH": str(path.parent)}
    command = [sys.executable, path, "--model", "nope"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"{script}: model='nope': there is no such folder; give one, or a hub id")
    assert shown.stderr.count("\n") == 1


def test_bench_py_prints_tokens_a_second_the_floor_and_the_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LOADS["cpu"], "default", [Load(3, (8, 8), (5, 5))])
    bench.main(["--runs", "2", "--quantization", "int4"])
    printed = capsys.readouterr().out
    assert "tiny-qwen3 (its own weights, int4), seed 0: 3 requests, 24 tokens in, 15 out" in printed
    assert "seed 1" in printed
    assert "tokens/s; floor" in printed
    assert "reached" in printed
    assert len(Path(bench.__file__).read_text(encoding="utf-8").splitlines()) <= 80


def test_other_checkouts_are_timed_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy of the package stands for an older version. It says that it is imported, and counts no blocks."""
    package, other = Path(nanoinfer.__file__).parent, tmp_path / "other"
    shutil.copytree(package, other / "nanoinfer", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "nanoinfer" / "__init__.py").open("a") as file:
        file.write("print('another version')\n")
    with (other / "nanoinfer" / "llm.py").open("a") as file:
        file.write(
            "from dataclasses import asdict\n"
            "from types import SimpleNamespace\n"
            "get_metrics = LLM.get_metrics\n"
            "def older(llm):\n"
            "    metrics = asdict(get_metrics(llm))\n"
            "    del metrics['num_blocks']\n"
            "    return SimpleNamespace(**metrics)\n"
            "LLM.get_metrics = older\n"
        )
    options = ["--loads", "short", "score", "--runs", "2", "--json", tmp_path / "turns.json"]
    assert run("turns", other, *options) == 0
    captured = capfd.readouterr()
    assert captured.err.count("another version") == 1
    figures = json.loads((tmp_path / "turns.json").read_text())
    num_blocks = figures["num_blocks"].pop(str(package.parent))
    assert num_blocks > 0
    assert figures["num_blocks"] == {str(other): None}
    *lines, source = (line for line in captured.out.splitlines() if not line.startswith(" "))
    assert source.startswith(f"{figures['date']}, commit ")
    assert lines == [
        f"{package.parent}: num_blocks {num_blocks}",
        f"{other}: num_blocks unknown",
        "short, 64 requests: median seconds, speed, and the runs",
        "score, 16 requests: median seconds, speed, and the runs",
    ]
    assert sum("100.0%" in line and f"{package.parent}: " in line for line in captured.out.splitlines()) == 2
    lens = [{folder: len(runs) for folder, runs in one["seconds"].items()} for one in figures["turns"]]
    assert lens == [{str(package.parent): 2, str(other): 2}] * 2
    assert run("report", tmp_path / "turns.json") == 0
    printed = capfd.readouterr().out
    assert re.search(
        rf"\| score, 16 requests, 50 tokens in, 10 out, seconds \| .*, {re.escape(str(other))} \|", printed
    )


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "nowhere is no checkout of nanoinfer"), (Path(nanoinfer.__file__).parents[1], "comes twice")],
)
def test_what_is_no_other_checkout_is_refused(capsys: pytest.CaptureFixture[str], folder: object, message: str) -> None:
    assert run("turns", folder) == 2
    assert message in capsys.readouterr().err


def test_starts_are_timed_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run_json(tmp_path, "start", "--runs", 1)
    printed = capsys.readouterr().out
    first, later = figures["starts"]
    assert f"first {first['seconds']:.1f} s, later {later['seconds']:.1f} s (median of 1)" in printed
    for start in (first, later):
        assert {"imports", "weights", "warm-up", "tokenizer"} <= start["parts"].keys()
        assert sum(start["parts"].values()) < start["seconds"] + 0.3
        assert start["parts"]["imports"] > 0.1, "a fresh process imports PyTorch"
        assert start["compiled"] == {}


def test_a_start_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("start", "--attention-backend", "flash_attn") == 2
    assert "has ended; its error stands above" in capsys.readouterr().err


@pytest.mark.parametrize("name", LOADS["cuda"])
def test_the_list_of_loads_has_the_numbers_of_each(name: str) -> None:
    [line] = re.findall(rf"^  {name} +(.*)$", WHICH_LOADS, re.MULTILINE)
    listed = {int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)}
    numbers: set[int] = set()
    for load in LOADS["cuda"][name]:
        extra = {load.shared_prefix, load.num_answers, load.num_samples} - {0, 1}
        numbers |= {load.num_seqs, *load.input_len, *load.output_len, *extra}
    assert numbers - listed <= ({256, 100, 1024} if name == "shared" else set()), "shared is said by way of default"
