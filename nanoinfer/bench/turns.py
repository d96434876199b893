"""`nanoinfer bench turns`: times engines of several checkouts in turns, one process each, on one machine.

GPUs differ, and so do hours of a day. So the versions to be compared are loaded together and run the same requests one
after the other, in the opposite order for every other seed. `turn_taker.py` is what each process runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from nanoinfer.bench import turn_taker
from nanoinfer.bench.engines import engine_options, own_options
from nanoinfer.bench.throughput import describe_machine, describe_requests
from nanoinfer.bench.workloads import Load, choose_model, draw_workload
from nanoinfer.errors import ConfigError

MEMORY_SHARE = 0.9  # of a GPU, for all engines together


def measure(loads: list[tuple[str, Load]], device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time all loads by this version and by those in `args.folders`; print their figures, and return them."""
    folders = [Path(__file__).parents[2], *args.folders]
    for folder in folders:
        if not (folder / "nanoinfer" / "__init__.py").is_file():
            raise ConfigError(f"{folder} is no checkout of nanoinfer; give the folder that has nanoinfer/ in it")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("the same folder comes twice; give other checkouts than the one that this command is of")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = choose_model(args.model, args.size, device, Path(scratch), args.quantization)
        of_loads = [engine_options(model, load, args) for _, load in loads]
        options = {**model.options, **{name: max(one[name] for one in of_loads) for name in of_loads[0]}}
        options |= own_options(args)
        if device == "cuda":
            options["gpu_memory_utilization"] = MEMORY_SHARE / len(folders)
        takers = [stack.enter_context(TurnTaker(folder)) for folder in folders]
        for taker in takers:  # one after the other: each measures what the others leave
            taker.load(str(Path(model.folder).resolve()), options)
        figures = [
            time_load(takers, name, load, model.config.vocab_size, args, Path(scratch) / "workload.json")
            for name, load in loads
        ]
    num_blocks = {str(taker.folder): taker.num_blocks for taker in takers}
    return {"model": model.name, **describe_machine(device), "num_blocks": num_blocks, "turns": figures}


def time_load(
    takers: list["TurnTaker"], name: str, load: Load, vocab_size: int, args: argparse.Namespace, path: Path
) -> dict[str, Any]:
    """Time the runs of one load, print a line for each version, and return the seconds of each. path: a file to use."""
    seconds: list[list[float]] = [[] for _ in takers]
    for index, seed in enumerate(range(args.seed, args.seed + args.runs)):
        workload = draw_workload(seed, load, vocab_size)
        path.write_text(json.dumps(asdict(workload)))
        turns = [*zip(takers, seconds, strict=True)]
        for taker, its in turns[:: 1 if index % 2 == 0 else -1]:
            its.append(taker.ask(workload=str(path), top_k=args.top_k, top_p=args.top_p)["seconds"])
    print(f"{name}, {describe_requests(load.num_seqs, load.num_samples)}: median seconds, speed, and the runs")
    for taker, its in zip(takers, seconds, strict=True):
        speed, runs = median(seconds[0]) / median(its), " / ".join(f"{one:.3g}" for one in its)
        print(f"    {median(its):8.3g} s  {speed:6.1%}  {taker.folder}: {runs}", flush=True)
    folders = [str(taker.folder) for taker in takers]
    return {"name": name, "load": asdict(load), "seconds": dict(zip(folders, seconds, strict=True))}


class TurnTaker:
    """A process with the engine of a checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_blocks: int | None = None  # of the KV cache; None where its version does not tell
        # Run as a text, it looks for modules in the current folder first, and not in that of the file.
        command = [sys.executable, "-c", Path(turn_taker.__file__).read_text(encoding="utf-8")]
        self._process = subprocess.Popen(command, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def load(self, model: str, options: dict[str, Any]) -> None:
        """Load an engine and print how many blocks its KV cache has: fewer of them make it slower only under load.

        Raises ConfigError where another version than that of the checkout was imported.
        """
        answer = self.ask(model=model, options=options)
        imported = Path(answer["imported"])
        if not imported.is_relative_to(self.folder.resolve()):
            raise ConfigError(f"{imported} is imported in place of that in {self.folder}; unset PYTHONPATH")
        self.num_blocks = answer["num_blocks"]
        print(f"{self.folder}: num_blocks {'unknown' if self.num_blocks is None else self.num_blocks}", flush=True)

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

    def __enter__(self) -> "TurnTaker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input ends it
