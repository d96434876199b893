"""What a decode step costs the host: schedule, pack and update, with made-up token ids in place of a model."""

import random
import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from nanoinfer.engine.batch import ScheduledBatch, pack
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.sampling_params import SamplingParams

BLOCK_SIZE = 256
MAX_INPUT_LEN = 1024  # prompts of 100 tokens to this many, so that sequences need blocks in different steps
NUM_STEPS = 512  # two blocks of tokens for each sequence
CASES = ((256, 0), (1024, 0), (256, 100_000))  # sequences running, requests waiting


class StepTime(NamedTuple):
    """The host's microseconds of a decode step."""

    schedule: float
    pack: float
    update: float
    total: float


@dataclass(frozen=True, slots=True)
class HostTime:
    """Decode steps of `num_running` sequences with `num_waiting` requests behind them."""

    num_running: int
    num_waiting: int
    num_steps: int
    median: dict[str, float]  # StepTime, by name
    percentile_90: dict[str, float]


def fill_scheduler(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler whose rows and blocks suffice for `num_running` sequences, to the end of the steps to be timed."""
    max_tokens = num_steps + 8  # nothing may finish meanwhile: some steps come before the first that is timed
    max_model_len = MAX_INPUT_LEN + max_tokens
    scheduler = Scheduler(
        BlockManager(num_running * -(-max_model_len // BLOCK_SIZE), BLOCK_SIZE),
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * MAX_INPUT_LEN,  # all prompts in one step
        max_model_len=max_model_len,
    )
    rng, params = random.Random(0), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for seq_id in range(num_running):
        prompt = rng.choices(range(10_000), k=rng.randint(100, MAX_INPUT_LEN))
        scheduler.add(Sequence(seq_id, prompt, params))
    short_prompt = [1, 2, 3]
    for seq_id in range(num_running, num_running + num_waiting):
        scheduler.add(Sequence(seq_id, short_prompt, params))
    return scheduler


def time_decode_steps(scheduler: Scheduler, num_steps: int) -> list[StepTime]:
    """Time so many decode steps in the engine's order: a step is scheduled and packed before the last is updated."""
    in_flight = ScheduledBatch()
    token_ids: list[int] = []  # of the step in flight
    times: list[StepTime] = []
    while len(times) < num_steps:
        started = perf_counter()
        batch = scheduler.schedule(in_flight=bool(in_flight))
        scheduled = perf_counter()
        pack(batch)
        packed = perf_counter()
        scheduler.update(in_flight, token_ids)
        updated = perf_counter()
        if in_flight.decode:  # a prompt's first step is none of these
            spans = (scheduled - started, packed - scheduled, updated - packed, updated - started)
            times.append(StepTime(*(1e6 * seconds for seconds in spans)))
        in_flight, token_ids = batch, [0] * len(batch.sampled)
    return times


def measure_case(num_running: int, num_waiting: int, num_steps: int = NUM_STEPS) -> HostTime:
    """Time decode steps of `num_running` sequences; the requests behind them find no free row, so they stay there."""
    scheduler = fill_scheduler(num_running, num_waiting, num_steps)
    times = time_decode_steps(scheduler, num_steps)
    assert len(scheduler.running) == num_running, f"{num_running} were to run, and {len(scheduler.running)} do"
    assert scheduler.num_waiting == num_waiting, f"{num_waiting} were to wait, and {scheduler.num_waiting} do"

    parts = [list(part) for part in zip(*times, strict=True)]
    median = StepTime(*map(statistics.median, parts))
    percentile_90 = StepTime(*(statistics.quantiles(part, n=10)[-1] for part in parts))
    return HostTime(num_running, num_waiting, num_steps, median._asdict(), percentile_90._asdict())


def measure_host() -> list[HostTime]:
    """Time every case and print a line for each."""
    print(f"The host's microseconds of a decode step: median and 90th percentile of {NUM_STEPS} steps")
    print(" " * 32 + "".join(f"{name:>16}" for name in StepTime._fields))
    results = []
    for num_running, num_waiting in CASES:
        result = measure_case(num_running, num_waiting)
        case = f"{num_running:,} running, {num_waiting:,} waiting"
        pairs = zip(result.median.values(), result.percentile_90.values(), strict=True)
        print(f"{case:>32}" + "".join(f"{median:8.0f}{high:8.0f}" for median, high in pairs))
        results.append(result)
    return results
