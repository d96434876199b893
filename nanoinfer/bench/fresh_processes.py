"""`nanoinfer bench start` and `turns`: engines in fresh processes, each of which runs `engine_process.py`.

`start` times from the start of `python` to the first token. The first process finds nothing compiled: its Triton
kernels go to an empty folder, where the later ones find them.

`turns` compares versions. GPUs differ, and so do hours of a day. So the versions are loaded together on one machine and
run the same requests one after the other, in the opposite order for every other seed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from nanoinfer.bench import engine_process
from nanoinfer.bench.engines import engine_options
from nanoinfer.bench.report import describe_machine, describe_requests, find_device
from nanoinfer.bench.workloads import LOADS, Load, draw_workload, loads_of, model_of
from nanoinfer.errors import ConfigError

MEMORY_SHARE = 0.9  # of a GPU, for all engines together
CHECKOUT = Path(__file__).parents[2]  # of this version


class EngineProcess:
    """Runs the engine of a checkout in a process. environment: variables that it has beside those of this process."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        # Run as a text, it looks for modules in the current folder first, and not in that of the file.
        command = [sys.executable, "-c", Path(engine_process.__file__).read_text(encoding="utf-8")]
        pipes: dict[str, Any] = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, **pipes)

    def load(self, folder: Path, options: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Load an engine of the model in a folder, and return what `engine_process.load` tells.

        Raises ConfigError where another version than that of the checkout was imported.
        """
        answer = self.ask(model=str(folder.resolve()), options=options, max_tokens=max_tokens)
        imported = answer.pop("imported")
        if not Path(imported).is_relative_to(self.folder.resolve()):
            raise ConfigError(f"{imported} is imported in place of that in {self.folder}; unset PYTHONPATH")
        return answer

    def ask(self, **task: Any) -> dict[str, Any]:
        """Have it do something, and return its answer. Raises ConfigError where it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"the engine of {self.folder} has ended; its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input ends it


def run_start(args: argparse.Namespace) -> dict[str, Any]:
    """Time the first start and `args.runs` later ones; print a line for each, and return all figures."""
    device, starts = find_device(), list[dict[str, Any]]()
    with model_of(args, device) as model, TemporaryDirectory() as compiled:
        options = engine_options(model, LOADS[device]["default"][0], args) | model.options
        print(f"{model}: seconds from the start of python to the first token")
        for index in range(1 + args.runs):
            started = time.time()  # the clock of other processes too
            with EngineProcess(CHECKOUT, TRITON_CACHE_DIR=compiled) as process:
                told = process.load(model.folder, options, max_tokens=1)
            starts.append({"seconds": told.pop("first_token") - started, **told})
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in told["parts"].items())
            print(f"{'later' if index else 'first':>6} {starts[-1]['seconds']:6.1f}: {parts}")
    later = median(start["seconds"] for start in starts[1:])
    print(f"first {starts[0]['seconds']:.1f} s, later {later:.1f} s (median of {args.runs})")
    for name, (count, seconds) in starts[0]["compiled"].items():
        print(f"    compiled at the first start: {name}, {count} in {seconds:.1f} s")
    return {"model": model.name, "starts": starts, "later": later, **describe_machine(device)}


def run_turns(args: argparse.Namespace) -> dict[str, Any]:
    """Time all loads by this version and by those in `args.folders`; print their figures, and return them."""
    device, folders = find_device(), [CHECKOUT, *args.folders]
    loads = loads_of(args, device)
    for folder in folders:
        if not (folder / "nanoinfer" / "__init__.py").is_file():
            raise ConfigError(f"{folder} is no checkout of nanoinfer; give the folder that has nanoinfer/ in it")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("the same folder comes twice; give other checkouts than the one that this command is of")
    with model_of(args, device) as model, TemporaryDirectory() as scratch, ExitStack() as stack:
        of_loads = [engine_options(model, load, args) for _, load in loads]
        options = {**model.options, **{name: max(one[name] for one in of_loads) for name in of_loads[0]}}
        if device == "cuda":
            options["gpu_memory_utilization"] = MEMORY_SHARE / len(folders)
        processes = [stack.enter_context(EngineProcess(folder)) for folder in folders]
        num_blocks = {}
        for process in processes:  # one after the other: each measures what the others leave
            # Versions with fewer blocks are slower only under load.
            its = num_blocks[str(process.folder)] = process.load(model.folder, options, max_tokens=16)["num_blocks"]
            print(f"{process.folder}: num_blocks {'unknown' if its is None else its}", flush=True)
        file = Path(scratch) / "workload.json"
        figures = [time_turns(processes, name, load, model.config.vocab_size, args, file) for name, load in loads]
    return {"model": model.name, **describe_machine(device), "num_blocks": num_blocks, "turns": figures}


def time_turns(
    processes: list[EngineProcess], name: str, load: Load, vocab_size: int, args: argparse.Namespace, file: Path
) -> dict[str, Any]:
    """Time the runs of one load, print a line for each version, and return the seconds of each. file: one to use."""
    seconds: dict[str, list[float]] = {str(process.folder): [] for process in processes}
    for index, seed in enumerate(range(args.seed, args.seed + args.runs)):
        file.write_text(json.dumps(asdict(draw_workload(seed, load, vocab_size))))
        for process in processes[:: 1 if index % 2 == 0 else -1]:
            answer = process.ask(workload=str(file), top_k=args.top_k, top_p=args.top_p)
            seconds[str(process.folder)].append(answer["seconds"])
    print(f"{name}, {describe_requests(load.num_seqs, load.num_samples)}: median seconds, speed, and the runs")
    ours = median(seconds[str(CHECKOUT)])
    for folder, its in seconds.items():
        runs = " / ".join(f"{one:.3g}" for one in its)
        print(f"    {median(its):8.3g} s  {ours / median(its):6.1%}  {folder}: {runs}", flush=True)
    return {"name": name, "load": asdict(load), "seconds": seconds}
