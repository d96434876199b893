"""`nanoinfer bench report`: prints one Markdown table from the files that other commands write with `--json`.

Below the table it says what the figures belong to: date, commit, versions, hardware and the command.
"""

import json
import shlex
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from nanoinfer.bench.throughput import describe_requests
from nanoinfer.errors import ConfigError

# Options that change what is measured, with the value that is not worth a word.
OPTIONS = {
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "top_k": 0,
    "top_p": 1.0,
    "enforce_eager": False,
    "model_impl": "auto",
    "compile": False,
}


class Row(NamedTuple):
    """Holds one line of the table. `measured` names the unit of `runs`; `shares` are of the floor, if it is known."""

    measured: str
    model: str
    runs: list[float]
    shares: list[float]


def print_report(paths: list[Path]) -> None:
    """Print the table of all files, then their sources. Raises ConfigError for a file that has no figures for it."""
    lines, sources = [], []
    for path in paths:
        for engine, figures in _read(path):
            if (source := describe_source(figures)) not in sources:
                sources.append(source)
            for row in _rows(engine, figures, path):
                shares = " / ".join(f"{share:.0%}" for share in row.shares)
                median = _join([statistics.median(row.runs)])
                lines.append((row.measured, row.model, median, _join(row.runs), shares, sources.index(source) + 1))
    print_row("measured", "model", "median", "runs", "share of the floor", "source")
    print_row(*["---"] * 6)
    for line in lines:
        print_row(*line)
    print()
    for number, source in enumerate(sources, start=1):
        print(f"{number}. {source}")


def print_row(*cells: object) -> None:
    """Print a line of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def describe_source(figures: dict[str, Any]) -> str:
    """Return in one line what figures belong to. It takes what `describe_machine` returns, or a file of `--json`."""
    hardware, versions = figures["hardware"], figures["versions"]
    machine = f"{hardware['cpu']}, {hardware['cpu_cores']} CPU cores"
    if "gpu" in hardware:
        gpu = f"{hardware['gpu_gib']} GiB, {hardware['gpus_seen']} seen, CUDA {hardware['cuda']}"
        machine = f"{hardware['gpu']} ({gpu})"
    commit = figures.get("commit") or "unknown"
    parts = [figures.get("date", "date unknown"), f"commit {commit}", machine]
    parts += [f"{package} {version}" for package, version in versions.items()]
    if "command" in figures:
        parts.append(f"`nanoinfer {shlex.join(figures['command'][1:])}`")
    return ", ".join(parts)


def _read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the figures of a file by engine: those of `--against` come after the first."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file that a command wrote with --json") from error
    if not isinstance(figures, dict) or not {"command", "options", "hardware", "versions"} <= figures.keys():
        raise ConfigError(f"{path} was not written by nanoinfer bench; give a file that a command wrote with --json")
    common = {name: figures[name] for name in ("command", "options")}
    others = [(name, other | common) for name, other in figures.get("against", {}).items()]
    return [(figures["options"].get("engine", "nanoinfer"), figures), *others]


def _rows(engine: str, figures: dict[str, Any], path: Path) -> list[Row]:
    """Return the lines of what one engine did. Raises ConfigError where the command measured nothing for a table."""
    model, rows = _describe_model(engine, figures), []
    for load in figures.get("loads", ()):
        measured = f"{load['name']}, {_describe_load(load['load'])}, output tokens/s"
        speeds = [run["output_tokens_per_second"] for run in load["runs"]]
        rows.append(Row(measured, model, speeds, [run["share_of_floor"] for run in load["runs"]]))
    for job in figures.get("jobs", ()):
        measured = f"{job['num_prompts']:,} prompts, {job['max_tokens']} tokens out, {job['name']}, output tokens/s"
        rows.append(Row(measured, model, job["runs"], []))
    if "starts" in figures:
        first, *later = figures["starts"]
        rows.append(Row("first start, s", model, [first["seconds"]], []))
        rows.append(Row("later starts, s", model, [start["seconds"] for start in later], []))
        for part in later[0]["parts"]:
            rows.append(Row(f"of these: {part}, s", model, [start["parts"].get(part, 0.0) for start in later], []))
    for case in figures.get("host", ()):
        measured = f"decode step on the host, {case['num_running']:,} running, {case['num_waiting']:,} waiting, us"
        rows.append(Row(measured, model, [case["median"]["total"]], []))
    for name, call in figures.get("calls", {}).items():
        rows.append(Row(f"call of the load {name}: seconds until its first step", model, [call["first_step"]], []))
        rows.append(Row(f"call of the load {name}: seconds of the host's CPU", model, [call["all"]], []))
    for one in figures.get("turns", ()):
        measured = f"{one['name']}, {_describe_load(one['load'])}, seconds"
        rows += [Row(measured, f"{model}, {folder}", seconds, []) for folder, seconds in one["seconds"].items()]
    if not rows:
        raise ConfigError(
            f"{path} has no figures for a table; give a file of throughput, loads, text, start, host or turns"
        )
    return rows


def _describe_model(engine: str, figures: dict[str, Any]) -> str:
    """Return the model, the engine if it is another one, and the options that change what is measured."""
    chosen = {name: figures["options"].get(name, usual) for name, usual in OPTIONS.items()}
    chosen = {name: value for name, value in chosen.items() if value != OPTIONS[name]}
    options = [f"`--{name.replace('_', '-')} {value}`" for name, value in chosen.items()]
    options = [option.replace(" True`", "`") for option in options]
    return ", ".join([figures.get("model", "no model"), *([engine] if engine != "nanoinfer" else []), *options])


def _describe_load(load: dict[str, Any]) -> str:
    lengths = [" to ".join(f"{length:,}" for length in sorted({*load[part]})) for part in ("input_len", "output_len")]
    shared = f"{load['shared_prefix']:,} shared and " if load["shared_prefix"] else ""
    requests = describe_requests(load["num_seqs"], load["num_samples"])
    return f"{requests}, {shared}{lengths[0]} tokens in, {lengths[1]} out"


def _join(values: list[float]) -> str:
    return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
