"""What steps cost the host does not grow unnoticed: calls of Python functions, and operations on tensors.

Counts, unlike times, are the same on every machine. Each bound is a few percent above what was counted with Python 3.11
when it was set. Lower it when less is needed.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import nanoinfer
from nanoinfer import LLM, SamplingParams
from nanoinfer.runner.device_state import DeviceState

NUM_ROWS = 256
BLOCK_SIZE = 16
# Functions of our files, and those that dataclasses make. Comprehensions are functions before Python 3.12.
OURS = (str(Path(nanoinfer.__file__).parent), "<string>")
PLAIN = {"temperature": 0.6, "max_tokens": 2 * BLOCK_SIZE + 8, "ignore_eos": True}
WITH_OPTIONS = {
    **PLAIN,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "seed": 1,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0},
    "stop_token_ids": [5],
}


@pytest.fixture(scope="module")
def llm(random_checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    sizes = {"max_model_len": 128, "max_num_seqs": NUM_ROWS, "num_kvcache_blocks": 8 * NUM_ROWS}
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=BLOCK_SIZE, **sizes) as llm:
        yield llm


class Operations(TorchDispatchMode):
    """Counts operations on tensors by name. Views are among them, since they take the host as long."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of our functions in this thread by name, resumed generators included."""
    calls = Counter[str]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            calls[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def add_requests(llm: LLM, num_requests: int, options: dict[str, Any]) -> None:
    for index in range(num_requests):
        llm.add_request([index, 1, 2, 3], SamplingParams(**options))


def run_to_the_end(llm: LLM) -> None:
    while not llm.is_finished():
        llm.step()


@pytest.mark.parametrize(
    ("options", "most", "most_with_blocks"),
    [(PLAIN, 150, 3850), (WITH_OPTIONS, 315, 4000)],
    ids=["plain", "with options"],
)
def test_a_decode_step_of_256_rows_calls_no_more_functions(
    llm: LLM, options: dict[str, Any], most: int, most_with_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the schedule to the sampler and the outputs. The model is left out, since a GPU replays its CUDA graph.

    most_with_blocks: of a step in which every row takes another block.
    """
    monkeypatch.setattr(llm.engine.runner.model_runner, "decode", lambda batch: None)
    add_requests(llm, NUM_ROWS, options)
    for _ in range(4):  # the prompts', and the first decode steps
        llm.step()
    steps = []
    for _ in range(BLOCK_SIZE):
        with counted_calls() as calls:
            llm.step()
        steps.append(calls)
    assert len(llm.engine.scheduler.running) == NUM_ROWS
    run_to_the_end(llm)
    usual, highest = int(median(calls.total() for calls in steps)), max(steps, key=Counter.total)
    assert usual <= most, steps[0].most_common(40)
    assert highest.total() <= most_with_blocks, highest.most_common(40)


@pytest.mark.parametrize(
    ("options", "num_requests", "most"),
    [(PLAIN, 1, 37), (PLAIN, 8, 33), (WITH_OPTIONS, 1, 57), (WITH_OPTIONS, 8, 53)],
    ids=["plain", "8 plain", "with options", "8 with options"],
)
def test_an_admission_takes_no_more_operations_on_tensors(
    llm: LLM, options: dict[str, Any], num_requests: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device's tables and the sampler do with the packet of a step that requests begin with."""
    add_requests(llm, num_requests, PLAIN)  # the rows that they leave ask for nothing
    run_to_the_end(llm)
    enter, operations = DeviceState.enter, Operations()

    def counted(*args: Any) -> None:
        with operations:
            enter(*args)

    monkeypatch.setattr(DeviceState, "enter", counted)
    add_requests(llm, num_requests, options)
    llm.step()
    monkeypatch.undo()
    run_to_the_end(llm)
    counts = operations.counts
    assert 0 < counts.total() <= most, counts.most_common(40)
