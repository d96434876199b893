"""`nanoinfer bench start`: seconds from the start of `python` to the first token, in fresh processes.

The first process finds nothing compiled: its Triton kernels go to an empty folder. The later ones find them there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from nanoinfer.bench.engines import engine_options, own_options
from nanoinfer.bench.throughput import describe_machine
from nanoinfer.bench.workloads import LOADS, choose_model
from nanoinfer.errors import ConfigError


def measure(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time the first start and `args.runs` later ones; print a line for each, and return all figures."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as compiled:
        model = choose_model(args.model, args.size, device, Path(scratch), args.quantization)
        options = engine_options(model, LOADS[device]["default"][0], args)
        options |= {**model.options, **own_options(args)}
        print(f"{model}: seconds from the start of python to the first token")
        starts = []
        for index in range(1 + args.runs):
            starts.append(_start(str(model.folder), options, compiled))
            print(_describe("first" if index == 0 else "later", starts[-1]))
        later = median(start["seconds"] for start in starts[1:])
        print(f"first {starts[0]['seconds']:.1f} s, later {later:.1f} s (median of {args.runs})")
        for name, (count, seconds) in starts[0]["compiled"].items():
            print(f"    compiled at the first start: {name}, {count} in {seconds:.1f} s")
    return {"model": model.name, "starts": starts, "later": later, **describe_machine(device)}


def _start(folder: str, options: dict[str, Any], compiled: str) -> dict[str, Any]:
    """Start an engine in a process of its own and return what `first_token.py` prints, and how long all took."""
    task = json.dumps({"folder": folder, "options": options})
    environment = {**os.environ, "TRITON_CACHE_DIR": compiled}
    started = time.time()  # the child's clock too
    command = [sys.executable, "-m", "nanoinfer.bench.first_token", task]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode != 0:
        raise ConfigError(f"the engine did not start:\n{child.stderr.strip()}")
    report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return {"seconds": report.pop("first_token") - started, **report}


def _describe(which: str, start: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["parts"].items())
    return f"{which:>6} {start['seconds']:6.1f}: {parts}"
