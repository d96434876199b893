"""Engines choose the kernels that they chose before, with the same constants and launch options.

No GPU is needed, and nothing is compiled: see `chosen_kernels.py`, which also says how to write the list anew.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

LIST = Path(__file__).with_name("chosen_kernels.txt")
HOW_TO = "if that is intended, run `python -m tests.kernels.chosen_kernels` and commit the list"


def test_every_engine_launches_the_kernels_of_the_list(tmp_path: Path) -> None:
    found = tmp_path / LIST.name
    command = [sys.executable, "-m", "tests.kernels.chosen_kernels", str(found)]
    compiles = {**os.environ, "TRITON_INTERPRET": "0"}  # read as Triton is imported
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=compiles, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    before, now = (from_text(path.read_text(encoding="utf-8")) for path in (LIST, found))
    assert list(before) == list(now), f"other cases; {HOW_TO}"
    lines = []
    for case in now:
        gone, new = set(before[case]) - set(now[case]), set(now[case]) - set(before[case])
        lines += [f"{case}: no longer {launch}" for launch in sorted(gone)]
        lines += [f"{case}: now {launch}" for launch in sorted(new)]
    assert not lines, "\n".join(["engines launch other kernels, or in another way; " + HOW_TO, *lines])
    assert found.read_text() == LIST.read_text(), f"the list is not as the command writes it; {HOW_TO}"


def from_text(text: str) -> dict[str, list[str]]:
    """Return the launches of each case, as `to_text` of `chosen_kernels.py` took them."""
    cases, *kernels = (paragraph.splitlines() for paragraph in text.split("\n\n"))
    names = dict(line.split(" ", 1) for line in cases)
    of_cases: dict[str, list[str]] = {name: [] for name in names.values()}
    for first, *launches in kernels:
        kernel, *shared = first.split(" ")
        for launch in launches:
            own, numbers = launch.split("|")
            for number in numbers.split():
                of_cases[names[number]].append(" ".join([kernel, *sorted([*shared, *own.split()])]))
    return {name: sorted(launches) for name, launches in of_cases.items()}
