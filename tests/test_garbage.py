"""The garbage collector runs rarely during a call, and as before after it."""

import gc
import threading
from collections.abc import Iterator

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.garbage import RARE, rare_collections

BEFORE = 500, 5, 7


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    found = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    gc.set_threshold(*found)


def test_a_call_raises_the_thresholds_until_its_end() -> None:
    found = []
    with LLM("tiny", device="cpu") as llm:
        params = SamplingParams(max_tokens=2)
        llm.generate([[1, 2]], params, use_tqdm=False, on_finish=lambda _: found.append(gc.get_threshold()))
        assert (found, gc.get_threshold()) == ([RARE], BEFORE)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2]], params, use_tqdm=False, on_finish=lambda _: 1 / 0)
    assert gc.get_threshold() == BEFORE


def test_calls_of_several_threads_end_in_any_order() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with rare_collections():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with rare_collections():
        leave.set()
        thread.join()
        assert gc.get_threshold() == RARE
    assert gc.get_threshold() == BEFORE


@pytest.mark.parametrize("own", [(0, 0, 0), (500_000, 3, 4)])
def test_a_collector_that_is_off_or_rarer_stays_as_it_is(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
