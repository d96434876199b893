"""`nanoinfer bench host`: what decode steps, and the few-shot load, cost the host. The GPU must take longer for them.

It schedules, packs and updates steps with made-up token ids in place of a model, and imports no PyTorch.
"""

import random
import statistics
from time import perf_counter
from typing import Any

from nanoinfer import SamplingParams
from nanoinfer.bench.workloads import Load, draw_workload
from nanoinfer.engine.batch import ScheduledBatch, pack
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence

CASES = ((256, 0), (1024, 0), (256, 100_000))  # sequences running, requests waiting
NUM_STEPS = 512  # two blocks of tokens for each sequence
BLOCK_SIZE = 256
INPUT_LEN = (100, 1024)  # sequences need blocks in different steps
PARTS = ("schedule", "pack", "update", "total")


def measure(cases: tuple[tuple[int, int], ...] = CASES, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """Time every case and print a line for each; return all figures.

    The requests that wait behind the running sequences find no free row, so they stay there.
    """
    print(f"The host's microseconds of a decode step: median and 90th percentile of {num_steps} steps")
    print(" " * 32 + "".join(f"{part:>16}" for part in PARTS))
    figures = []
    for num_running, num_waiting in cases:
        scheduler = fill_scheduler(num_running, num_waiting, num_steps)
        times = dict(zip(PARTS, zip(*time_steps(scheduler, num_steps), strict=True), strict=True))
        assert len(scheduler.running) == num_running, f"{num_running} were to run, and {len(scheduler.running)} do"
        assert scheduler.num_waiting == num_waiting, f"{num_waiting} were to wait, and {scheduler.num_waiting} do"
        median = {part: statistics.median(times[part]) for part in PARTS}
        high = {part: statistics.quantiles(times[part], n=10)[-1] for part in PARTS}
        line = "".join(f"{median[part]:8.0f}{high[part]:8.0f}" for part in PARTS)
        print(f"{f'{num_running:,} running, {num_waiting:,} waiting':>32}{line}")
        case = {"num_running": num_running, "num_waiting": num_waiting, "num_steps": num_steps}
        figures.append(case | {"median": median, "percentile_90": high})
    return figures


def measure_job(load: Load) -> dict[str, float]:
    """Run a whole load through the scheduler, print what its parts take together, and return these seconds."""
    workload = draw_workload(0, load, vocab_size=150_000)
    longest, num_rows = load.longest, load.max_num_seqs
    scheduler = Scheduler(
        BlockManager((num_rows + 8) * -(-longest // BLOCK_SIZE), BLOCK_SIZE),
        max_num_seqs=num_rows,
        max_num_batched_tokens=16_384,
        max_model_len=longest,
    )
    started = perf_counter()
    for seq_id, (prompt, max_tokens) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
        scheduler.add(Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    seconds = {"queue": perf_counter() - started, "schedule": 0.0, "pack": 0.0, "update": 0.0}
    in_flight, token_ids = ScheduledBatch(), list[int]()
    num_computed = 0
    while in_flight or not scheduler.is_finished():
        marks = [perf_counter()]
        batch = scheduler.schedule(in_flight=bool(in_flight))
        marks.append(perf_counter())
        pack(batch)
        marks.append(perf_counter())
        scheduler.update(in_flight, token_ids)
        marks.append(perf_counter())
        for part, begin, end in zip(("schedule", "pack", "update"), marks, marks[1:], strict=False):
            seconds[part] += end - begin
        num_computed += batch.num_prefill_tokens
        in_flight, token_ids = batch, [0] * len(batch.sampled)
    parts = ", ".join(f"{part} {its:.3f}" for part, its in seconds.items())
    print(
        f"{load.num_seqs:,} requests of {workload.num_input_tokens:,} tokens, {num_computed:,} of them computed: "
        f"{sum(seconds.values()):.3f} s of the host ({parts})"
    )
    return seconds


def fill_scheduler(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """Make a scheduler with rows and blocks for `num_running` sequences, to the end of the steps to be timed."""
    max_tokens = num_steps + 8  # nothing may finish meanwhile: some steps come before the first that is timed
    max_model_len = INPUT_LEN[1] + max_tokens
    scheduler = Scheduler(
        BlockManager(num_running * -(-max_model_len // BLOCK_SIZE), BLOCK_SIZE),
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * INPUT_LEN[1],  # all prompts in one step
        max_model_len=max_model_len,
    )
    rng, params = random.Random(0), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [rng.choices(range(10_000), k=rng.randint(*INPUT_LEN)) for _ in range(num_running)]
    for seq_id, prompt in enumerate(prompts + [[1, 2, 3]] * num_waiting):
        scheduler.add(Sequence(seq_id, prompt, params))
    return scheduler


def time_steps(scheduler: Scheduler, num_steps: int) -> list[tuple[float, ...]]:
    """Return microseconds of each of PARTS for so many decode steps.

    They come in the engine's order: a step is scheduled and packed before the last one is updated.
    """
    in_flight = ScheduledBatch()
    token_ids: list[int] = []  # those of the step in flight
    times: list[tuple[float, ...]] = []
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
            times.append(tuple(1e6 * seconds for seconds in spans))
        in_flight, token_ids = batch, [0] * len(batch.sampled)
    return times
