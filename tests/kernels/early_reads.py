"""Tells which arguments of a kernel are used before it waits for the kernel before it, though it is not written so.

Triton 3.6 pipelines loops as if a wait were any other computation: it may fetch what the first turns of a loop need
before a wait in the loop. So the kernel as it is written is compared with the kernel as it is pipelined.
"""

import re
from collections import defaultdict
from typing import Any

WAIT = re.compile(r"griddepcontrol\.wait|tt\.grid_dependency_wait")  # until Triton 3.6, and since
# What reads memory at its first operand, or changes it there.
ACCESS = re.compile(r"\btt\w*\.(?:load|store|descriptor_\w+|async_\w*copy_\w+) (%\w+)")
ARGUMENT = re.compile(r"%(\w+): !tt\.(?:ptr|tensordesc)")
ASSIGNMENT = re.compile(r"(%\w+)(?::\d+)? = (.*)")
CARRIED = re.compile(r"(%\w+) = (%[\w#]+)")  # by a loop, from what it starts with


def accessed_before_wait(text: str) -> set[str]:
    """Return the names of the pointers that a kernel uses before its first wait, as its text in MLIR has it.

    An empty set where it does not wait.
    """
    wait = WAIT.search(text)
    if wait is None:
        return set()
    pointers: dict[str, set[str]] = defaultdict(set)  # by value: the arguments that it may be computed from
    accessed = set[str]()
    for line in text[: wait.start()].splitlines():
        if "tt.func" in line:
            pointers |= {f"%{name}": {name} for name in ARGUMENT.findall(line)}
            continue
        if access := ACCESS.search(line):
            accessed |= pointers[access[1]]
            continue  # what it returns is no pointer
        if assignment := ASSIGNMENT.match(line.strip()):
            result, operation = assignment[1], assignment[2].split(" loc(")[0]
            carried = CARRIED.findall(operation)
            for index, (inside, start) in enumerate(carried):
                pointers[inside] = pointers[f"{result}#{index}"] = pointers[start]
            if not carried:
                pointers[result] = set[str]().union(*(pointers[name] for name in re.findall(r"%[\w#]+", operation)))
    return accessed


def waits_in_a_loop(text: str) -> bool:
    """Return whether a loop has a wait in it, as the kernel's text in MLIR has it."""
    regions: list[str] = []  # what opened each of those that a line lies in
    for line in map(str.strip, text.splitlines()):
        if WAIT.search(line) and any(re.search(r"\bscf\.(for|while)\b", opening) for opening in regions):
            return True
        if line.startswith("}"):
            regions.pop()
        if line.endswith("{"):
            regions.append(line)
    return False


def early_reads(asm: dict[str, Any], num_stages: int) -> list[str]:
    """Return the pointers that only the pipelined kernel uses before its first wait, not the kernel as it is written.

    A loop that waits and has several stages counts as "any": some versions of Triton pipeline it, and others do not.
    """
    if "ttir" not in asm:  # a kernel in Gluon is compiled as it is written
        return []
    any_of_loop = ["any"] if num_stages > 1 and waits_in_a_loop(asm["ttir"]) else []
    return sorted(accessed_before_wait(asm["ttgir"]) - accessed_before_wait(asm["ttir"])) + any_of_loop
