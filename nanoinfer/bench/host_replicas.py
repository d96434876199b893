"""What replicas cost the parent: `nanoinfer bench host` runs a load with stubs in their place, which take no time."""

import multiprocessing
import pickle
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from time import process_time
from typing import Any

import numpy as np

from nanoinfer import SamplingParams
from nanoinfer.bench.workloads import Load, draw_workload
from nanoinfer.config import EngineConfig
from nanoinfer.engine.interfaces import Recipient
from nanoinfer.engine.request_queue import Inbox
from nanoinfer.executor.shm_ring import Ring
from nanoinfer.metrics import EngineMetrics
from nanoinfer.replicas.handles import ReplicaHandle
from nanoinfer.replicas.replica_messages import Metrics, Outputs, Requests
from nanoinfer.replicas.replicated_engine import ReplicatedEngine
from nanoinfer.text.prompts import PreparedRequest, pack_ids

VOCAB_SIZE = 150_000
TEXT = "word "  # of a token


class NoWorkers:
    """Stands in for the processes of a replica."""

    are_ours, failure = True, None

    def hang_up(self) -> None: ...

    def close(self, patience: float = 0.0) -> None: ...


def measure(load: Load, num_replicas: int = 8) -> dict[str, float]:
    """Run a load, print what it took of the parent's CPU time, and return the figures."""
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
    for request_id, request in zip(engine.reserved_ids.reserve(len(requests)), requests, strict=True):
        engine.add_request(request_id, request, Recipient(inbox.outputs))
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


def answer_all(connections: Sequence[Connection]) -> None:
    """Answer the requests of all replicas at once, until the pipes are closed. As in a replica, a thread reads."""
    received: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=read_all, args=(connections, received), daemon=True).start()
    for connection in connections:
        connection.send(None)
    while (found := received.get()) is not None:
        connection, message = found
        if isinstance(message, Requests):
            connection.send(Metrics(EngineMetrics()))
            connection.send(stub_outputs(message))


def read_all(connections: Sequence[Connection], received: "SimpleQueue[Any]") -> None:
    left: list[Any] = [*connections]
    while left:
        for connection in wait(left):
            assert isinstance(connection, Connection)
            try:
                received.put((connection, connection.recv()))
            except (EOFError, OSError):
                left.remove(connection)
    received.put(None)


def stub_outputs(message: Requests) -> Outputs:
    """Return outputs of as many tokens as each request may have."""
    params = [pickle.loads(pickled) for pickled in message.params]
    counts = [params[index].max_tokens or 0 for index in message.which_params.tolist()]
    ids = message.columns[:, 0]
    return Outputs(
        np.stack([ids, np.zeros_like(ids), np.ones_like(ids)], axis=1),
        np.full((len(ids), 3), 0.5),
        np.array([(count, 1) for count in counts], np.int32),
        np.ones(sum(counts), np.int32),
        [TEXT * count for count in counts],
        {},
        {},
        {},
    )
