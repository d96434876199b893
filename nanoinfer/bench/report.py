"""Shows figures with their source, in a table, which `nanoinfer bench report` prints, and in a picture.

They belong to a date, a commit, versions, hardware and a command, which the table names in the lines below it.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from nanoinfer import __version__ as nanoinfer_version
from nanoinfer.bench.engines import OPTIONS
from nanoinfer.cli import option_string
from nanoinfer.errors import ConfigError

COLORS = ("#1f5a99", "#b3470e", "#7a7a7a", "#2f7d32")  # of engines in a picture, in their order


class Row(NamedTuple):
    """Holds one line of the table. `measured` names the unit of `runs`; `shares` are of the floor, if it is known."""

    measured: str
    model: str
    runs: list[float]
    shares: list[float]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of all files, then their sources. Raises ConfigError for a file that has no figures for it."""
    lines, sources = [], []
    for path in args.files:
        for engine, figures in _read(path):
            if (source := describe_source(figures)) not in sources:
                sources.append(source)
            for row in _rows(engine, figures, path):
                shares = " / ".join(f"{share:.0%}" for share in row.shares)
                median = _join([statistics.median(row.runs)])
                lines.append((row.measured, row.model, median, _join(row.runs), shares, sources.index(source) + 1))
    print_title("measured", "model", "median", "runs", "share of the floor", "source")
    for line in lines:
        print_row(*line)
    print()
    for number, source in enumerate(sources, start=1):
        print(f"{number}. {source}")
    return {}


def print_title(*columns: str) -> None:
    """Print the first two lines of a Markdown table."""
    print_row(*columns)
    print_row(*["---"] * len(columns))


def print_row(*cells: object) -> None:
    """Print a line of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def describe_source(figures: dict[str, Any]) -> str:
    """Return in one line what figures belong to. It takes what `describe_machine` returns, or a file of `--json`."""
    hardware, versions = figures["hardware"], figures["versions"]
    machine = f"{hardware['cpu']}, {hardware['cpu_cores']} CPU cores"
    if "gpu" in hardware:
        driver = f", driver {hardware['driver']}" if hardware.get("driver") else ""  # older files have none
        gpu = f"{hardware['gpu_gib']} GiB, {hardware['gpus_seen']} seen, CUDA {hardware['cuda']}{driver}"
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
    given = {name: figures["options"].get(name, usual) for name, usual in OPTIONS.items()}
    changed = {option_string(name): value for name, value in given.items() if value != OPTIONS[name]}
    options = [f"`{option}`" if value is True else f"`{option} {value}`" for option, value in changed.items()]
    return ", ".join([figures.get("model", "no model"), *([engine] if engine != "nanoinfer" else []), *options])


def _describe_load(load: dict[str, Any]) -> str:
    lengths = [" to ".join(f"{length:,}" for length in sorted({*load[part]})) for part in ("input_len", "output_len")]
    shared = f"{load['shared_prefix']:,} shared and " if load["shared_prefix"] else ""
    requests = describe_requests(load["num_seqs"], load["num_samples"])
    return f"{requests}, {shared}{lengths[0]} tokens in, {lengths[1]} out"


def _join(values: list[float]) -> str:
    return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def find_device() -> str:
    """Return where commands run: "cuda" if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def describe_requests(num_requests: int, num_samples: int) -> str:
    return f"{num_requests} requests" + (f" of {num_samples} samples" if num_samples > 1 else "")


def describe_machine(device: str) -> dict[str, Any]:
    """Return the date, commit, hardware and versions of a figure. The hardware: the host, and on "cuda" its GPUs."""
    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cpu_cores": os.cpu_count()}
    if device == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": gpu.name, "gpu_gib": round(gpu.total_memory / 2**30, 1), "cuda": torch.version.cuda}
        hardware |= {"gpus_seen": torch.cuda.device_count(), "driver": find_driver()}
    versions = {"python": platform.python_version(), "nanoinfer": nanoinfer_version}
    for package in ("torch", "triton", "transformers", "flash-attn", "nano-vllm", "vllm", "sentence-transformers"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"date": date.today().isoformat(), "commit": find_commit(), "hardware": hardware, "versions": versions}


def find_driver() -> str | None:
    """Return the version of NVIDIA's driver; None where it cannot be asked for."""
    return _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def find_commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the clone that the package runs from ("-dirty" if files differ), or None outside a clone."""
    if not (root / ".git").exists():  # or git would name a repository around the installed package
        return None
    return _output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")


def _output_of(*command: str) -> str | None:
    """Return what a program prints, or None where there is none or it fails."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def draw_loads(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the figures of `benchmark`, by engine; the suffix of the path says in which format.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    first = next(iter(figures.values()))
    num_loads, height = len(first["loads"]), 0.8 / len(figures)
    figure = Figure(figsize=(9, 1.2 + num_loads * (0.2 + 0.25 * len(figures))), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for rank, (engine, measured) in enumerate(figures.items()):
        for line, load in enumerate(measured["loads"]):
            speed = load["median_output_tokens_per_second"]
            share = 100 * statistics.median(run["share_of_floor"] for run in load["runs"])
            place, label = line + (rank - (len(figures) - 1) / 2) * height, engine if line == 0 else None
            axes.barh(place, share, 0.9 * height, color=COLORS[rank % len(COLORS)], label=label)
            axes.text(share + 1, place, f"{speed:,.0f}", va="center", fontsize=8)
    axes.axvline(100, color="black", linewidth=1)
    names = [f"{load['name']}, {load['load']['num_seqs']:,}" for load in first["loads"]]
    axes.set_yticks(range(num_loads), names)
    axes.set_ylabel("load, number of requests")
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("% of the floor, the least time that the hardware allows; beside the bars output tokens a second")
    axes.set_title(f"{first['model']} on {first['hardware'].get('gpu', 'a CPU')}")
    axes.legend(loc="lower right", bbox_to_anchor=(0.89, 0.0), frameon=False)
    figure.savefig(path)
