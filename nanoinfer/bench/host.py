"""`nanoinfer bench host`: what steps, requests, whole calls and replicas cost the host. The GPU must take longer.

Token ids are made up in place of a model, and stubs stand for replicas. All but replicas are timed before PyTorch is
imported.
"""

import argparse
import multiprocessing
import pickle
import statistics
import threading
from collections.abc import Sequence as SequenceOf
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from nanoinfer import SamplingParams
from nanoinfer.bench.report import describe_machine
from nanoinfer.bench.workloads import LOADS, Load, draw_workload
from nanoinfer.config import EngineConfig
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.specs import FullAttentionSpec
from nanoinfer.engine.engine import Recipient
from nanoinfer.engine.interfaces import RunnerLimits
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.packet import Packet, pack, read_header
from nanoinfer.engine.preparer import Preparer
from nanoinfer.engine.request_queue import Inbox, RequestQueue
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.executor.shm_ring import Ring
from nanoinfer.integers import ceil_div
from nanoinfer.metrics import EngineMetrics
from nanoinfer.text.prompts import PreparedRequest, PromptProcessor, pack_ids

CASES = ((256, 0), (1024, 0), (256, 100_000))  # sequences running, requests waiting
NUM_STEPS = 512  # two blocks of tokens for each sequence
BLOCK_SIZE = 256
INPUT_LEN = (100, 1024)  # sequences need blocks in different steps
VOCAB_SIZE = 150_000
# What requests are like, of 8 tokens each, and the size of blocks.
ADMISSIONS = (
    (Load(2000, (20, 60), (8, 8)), BLOCK_SIZE),
    (Load(2000, INPUT_LEN, (8, 8)), BLOCK_SIZE),
    (Load(2000, (50, 150), (8, 8), shared_prefix=2000), BLOCK_SIZE),
    (Load(2000, INPUT_LEN, (8, 8)), 16),
)
PARTS = ("schedule", "pack", "update", "total")
TEXT = "word "  # of a token of a stub


def run(_args: argparse.Namespace) -> dict[str, Any]:
    """Time decode steps, calls and replicas, and return all figures."""
    loads = LOADS["cuda"]
    figures: dict[str, Any] = {"host": measure_steps(), "requests": measure_requests()}
    figures["calls"] = {name: measure_call(loads[name][0]) for name in ("fewshot", "short")}
    figures["replicas"] = {name: measure_replicas(loads[name][0]) for name in ("steady", "fewshot", "short")}
    return {**figures, **describe_machine("cpu")}


def measure_steps(cases: tuple[tuple[int, int], ...] = CASES, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
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


def measure_requests(cases: tuple[tuple[Load, int], ...] = ADMISSIONS, num_runs: int = 3) -> list[float]:
    """Return the microseconds of CPU time that a request of each case takes, from the queue to its last token."""
    print("The host's microseconds of a request, in scheduler and packets: the fastest of", num_runs, "runs")
    figures = []
    for load, block_size in cases:
        prompts, longest = draw_workload(0, load, VOCAB_SIZE).prompts, load.longest + 1
        seconds = min(time_requests(prompts, load.output_len[1], longest, block_size) for _ in range(num_runs))
        figures.append(1e6 * seconds / load.num_seqs)
        shared = f"{load.shared_prefix:,} shared tokens and " if load.shared_prefix else ""
        what = f"{shared}{load.input_len[0]} to {load.input_len[1]:,} tokens, blocks of {block_size}"
        print(f"{what:>60}{figures[-1]:8.1f}")
    return figures


def time_requests(prompts: list[list[int]], max_tokens: int, longest: int, block_size: int) -> float:
    """Return the CPU seconds that all requests take, each step collected before the next one."""
    manager = BlockManager(300 * ceil_div(longest, block_size), block_size)
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=longest)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    seqs = [Sequence(seq_id, prompt, params) for seq_id, prompt in enumerate(prompts)]
    started = process_time()
    for seq in seqs:
        scheduler.add(seq)
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        pack(batch)
        scheduler.update(batch, [0] * len(batch.sampled))
    return process_time() - started


class NoDevice:
    """Stands in for a DeviceRunner: a step takes no time, and every token is 0."""

    closed, failure, sleeping_tags, unready_reason = False, None, frozenset[str](), None

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits
        self.first_step: float | None = None  # when it was launched (perf_counter)

    def launch(self, packet: Packet) -> int:
        self.first_step = self.first_step or perf_counter()
        header = read_header(packet)
        return header.num_prefill_samples + header.counts["decode_rows"]

    def sample(self, launched: int, masks: object = None) -> SimpleNamespace:
        return SimpleNamespace(num_tokens=launched, errors={}, side_outputs=())

    def wait(self, handle: SimpleNamespace) -> list[int]:
        return [0] * handle.num_tokens


def measure_call(load: Load) -> dict[str, float]:
    """Run all requests of a load as one call, print what it takes, and return these figures.

    first_step: seconds from the call to its first launch. all: CPU seconds to its end.
    """
    workload, longest = draw_workload(0, load, VOCAB_SIZE), load.longest + 1
    config = EngineConfig("none", max_model_len=longest, max_num_seqs=load.max_num_seqs)
    runner = NoDevice(
        RunnerLimits(
            max_model_len=longest,
            num_blocks=(load.max_num_seqs + 8) * ceil_div(longest, config.kvcache_block_size),
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            cache_specs=(FullAttentionSpec(),),
            max_prefix_sharers=0,
            whole_prompts=False,
            computes_beside_host=True,
        )
    )
    engine = LLMEngine(config, cast("Any", runner), None, frozenset())
    constraints = Constraints(None, VOCAB_SIZE, frozenset())
    preparer = Preparer(engine, PromptProcessor(None, "none", VOCAB_SIZE, longest), constraints)
    queue = RequestQueue(engine)
    params = [SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False) for count in workload.max_tokens]
    started, cpu_started = perf_counter(), process_time()
    queue.complete(preparer.prepare_portions(workload.prompts, params), show=lambda num_finished: None)
    seconds = {"all": process_time() - cpu_started, "first_step": (runner.first_step or started) - started}
    print(
        f"a call of {load.num_seqs:,} prompts of {workload.num_input_tokens:,} tokens, {engine.stats.prefill_tokens:,} "
        f"of them computed: {seconds['first_step']:.3f} s until its first step, {seconds['all']:.3f} s of the host"
    )
    return seconds


def fill_scheduler(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """Make a scheduler with rows and blocks for `num_running` sequences, to the end of the steps to be timed."""
    max_tokens = num_steps + 8  # nothing may finish meanwhile: some steps come before the first that is timed
    max_model_len = INPUT_LEN[1] + max_tokens
    scheduler = Scheduler(
        BlockManager(num_running * ceil_div(max_model_len, BLOCK_SIZE), BLOCK_SIZE),
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * INPUT_LEN[1],  # all prompts in one step
        max_model_len=max_model_len,
    )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = draw_workload(0, Load(num_running, INPUT_LEN, (1, 1)), VOCAB_SIZE).prompts
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


class NoWorkers:
    """Stands in for the processes of a replica."""

    are_ours, failure = True, None

    def hang_up(self) -> None: ...

    def close(self, patience: float = 0.0) -> None: ...


def measure_replicas(load: Load, num_replicas: int = 8) -> dict[str, float]:
    """Run a load, print what it took of the parent's CPU time, and return the figures."""
    from nanoinfer.replicas.handles import ReplicaHandle
    from nanoinfer.replicas.replicated_engine import ReplicatedEngine  # PyTorch is imported with it

    workload = draw_workload(0, load, VOCAB_SIZE)
    requests = [
        PreparedRequest(
            prompt=None,
            token_ids=prompt,
            packed_ids=pack_ids(prompt),
            sampling_params=SamplingParams(max_tokens=count, ignore_eos=True),
        )
        for prompt, count in zip(workload.prompts, workload.max_tokens, strict=True)
    ]
    pipes = [multiprocessing.Pipe() for _ in range(num_replicas)]
    theirs = [pipe[1] for pipe in pipes]
    stubs = multiprocessing.get_context("spawn").Process(target=answer_all, args=(theirs,), daemon=True)
    stubs.start()
    replicas = [ReplicaHandle(index, NoWorkers(), ours) for index, (ours, _) in enumerate(pipes)]  # type: ignore[arg-type]
    config = EngineConfig("stub", data_parallel_size=num_replicas, max_num_seqs=load.max_num_seqs)
    engine = ReplicatedEngine(config, replicas, Ring(num_replicas, 1, 1), load.longest)
    for connection, _ in pipes:
        connection.recv()  # the stubs are ready
    inbox, before = Inbox(), process_time()
    recipient = Recipient(inbox.outputs)
    for request_id, request in zip(engine.reserved_ids.reserve(len(requests)), requests, strict=True):
        engine.add_request(request_id, request, recipient)
        inbox.request_ids.add(request_id)
    queued = process_time()
    while not inbox.is_complete:
        engine.step()
    seconds, queue_seconds = process_time() - before, queued - before
    engine.close()
    stubs.join()
    num_tokens = sum(len(output.token_ids) for output in inbox.outputs)
    assert num_tokens == workload.num_output_tokens, f"{num_tokens} tokens came out"
    rate = num_tokens / seconds
    print(
        f"{num_replicas} replicas, {load.num_seqs:,} requests of {workload.num_input_tokens:,} tokens, {num_tokens:,} "
        f"out: {seconds:.3f} s of the parent ({queue_seconds:.3f} s to queue them), {rate:,.0f} tokens out and "
        f"{load.num_seqs / seconds:,.0f} requests a second"
    )
    return {"seconds": seconds, "tokens_per_second": rate, "requests_per_second": load.num_seqs / seconds}


def answer_all(connections: SequenceOf[Connection]) -> None:
    """Answer the requests of all replicas at once, until the pipes are closed. As in a replica, a thread reads."""
    from nanoinfer.replicas.replica_messages import Requests  # PyTorch is imported with it

    received: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=read_all, args=(connections, received), daemon=True).start()
    for connection in connections:
        connection.send(None)
    while (item := received.get()) is not None:
        connection, message = item
        if isinstance(message, Requests):
            connection.send(EngineMetrics())
            connection.send(stub_outputs(message))


def read_all(connections: SequenceOf[Connection], received: "SimpleQueue[Any]") -> None:
    left: list[Any] = [*connections]
    while left:
        for connection in wait(left):
            assert isinstance(connection, Connection)
            try:
                received.put((connection, connection.recv()))
            except (EOFError, OSError):
                left.remove(connection)
    received.put(None)


def stub_outputs(message: Any) -> Any:
    """Return the Outputs of a message of Requests, with as many tokens as each request may have."""
    from nanoinfer.replicas.replica_messages import Outputs, Samples

    params = [pickle.loads(pickled) for pickled in message.params]
    counts = [params[index].max_tokens or 0 for index in message.which_params.tolist()]
    ids = message.columns[:, 0]
    return Outputs(
        np.stack([ids, np.zeros_like(ids), np.ones_like(ids)], axis=1),
        np.full((len(ids), 3), 0.5),
        Samples(
            np.array([(count, 1) for count in counts], np.int32),
            np.ones(sum(counts), np.int32),
            [TEXT * count for count in counts],
            {},
        ),
        {},
        {},
        {},
    )
