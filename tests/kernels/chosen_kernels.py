"""Lists which kernels the engines of `compile_cases.py` choose and how they launch them, without compiling.

    python -m tests.kernels.chosen_kernels     # after an intended change: writes chosen_kernels.txt anew

An engine runs as in `compile_engine.py`. Each launch becomes `argument=constant`, `argument:type` and `option=value`. A
type is what Triton specialises on: a D after it says that the integer or the address is divisible by 16. A kernel goes
by the name of its function alone, so it may move to another module. Grids are left out.

The file starts with the numbers of the cases. Then come the kernels: a line with the arguments that all launches of the
kernel share, and for each different launch a line with the other arguments and the cases that have it.
"""

import ctypes
import gc
import multiprocessing
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.kernels.compile_cases import CASES, MODELS
from tests.kernels.compile_engine import AbsentGpu, pretend, replace_launches, run_engine

LIST = Path(__file__).with_suffix(".txt")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
GPU = AbsentGpu(90)  # that all code here believes in; each case sets its capability


def launches_of_all_cases() -> dict[str, list[str]]:
    """Return the different launches of each case, sorted. Each is a kernel's name and its arguments, with spaces."""
    # Keep the memory that tensors gave back: fetching it anew from the system is half of the time.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    pretend(GPU)
    # What each case needs is imported once, and is no garbage that it looks through.
    import nanoinfer.llm  # noqa: F401
    from nanoinfer import ops

    for path in sorted(Path(ops.__path__[0]).glob("*/*.py")):
        if path.stem.startswith(("triton", "hopper")):
            import_module(f"{ops.__name__}.{path.parent.name}.{path.stem}")
    gc.freeze()

    # A fork for each case, since kernels and what they ask of a device are cached in a process.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        launches = pool.starmap(launches_of, CASES.values(), 1)
    gc.unfreeze()  # or Triton reports at exit what was not freed
    return dict(zip(CASES, launches, strict=True))


def launches_of(capability: int, model: str, options: dict[str, Any]) -> list[str]:
    """Return the launches of one case. It needs a process of its own."""
    launches = set[str]()
    replace_launches(lambda kernel, *args, **kwargs: launches.add(describe(kernel, *args, **kwargs)))
    GPU.capability = capability
    run_engine(MODELS[model], options)
    return sorted(launches)


def describe(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> str:
    """Return a kernel's name and the sorted arguments of a launch, of which only pointers and sizes have no value."""
    *_, bind = kernel.device_caches[0]
    values, types, options = bind(*args, **kwargs)
    parts = [f"{name}={value}" for name, value in options.items()]
    for (name, value), (kind, specialization) in zip(values.items(), types, strict=True):
        parts.append(f"{name}={value}" if kind == "constexpr" else f"{name}:{kind}{specialization or ''}")
    return " ".join([kernel.fn.__name__, *sorted(part.replace(" ", "") for part in parts)])


def to_text(of_cases: dict[str, list[str]]) -> str:
    """Return the text of the file for the launches of each case."""
    cases_of = defaultdict[str, list[str]](list)  # by launch: the cases' numbers
    for number, launches in enumerate(of_cases.values(), 1):
        for launch in launches:
            cases_of[launch].append(str(number))
    kernels = defaultdict[str, list[list[str]]](list)  # by name: the arguments of each launch
    for launch in sorted(cases_of):
        name, *args = launch.split(" ")
        kernels[name].append(args)
    lines = [f"{number} {case}" for number, case in enumerate(of_cases, 1)]
    for name, of_launches in kernels.items():
        shared = set.intersection(*map(set, of_launches))
        lines += ["", " ".join([name, *sorted(shared)])]
        for args in of_launches:
            own = [arg for arg in args if arg not in shared]
            lines.append("    " + " ".join([*own, "|", *cases_of[" ".join([name, *args])]]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else LIST
    path.write_text(to_text(launches_of_all_cases()), encoding="utf-8")
