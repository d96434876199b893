"""Starts the replicas, and what the parent needs in front of them."""

import logging
import multiprocessing
import pickle
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import wait

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.constraints.grammars import Grammar
from nanoinfer.constraints.request_constraint import RequestConstraint
from nanoinfer.constraints.token_sets import TokenSet
from nanoinfer.device import select_devices
from nanoinfer.engine.preparer import Preparer
from nanoinfer.engine.request_queue import RequestQueue
from nanoinfer.errors import RequestError, WorkerError
from nanoinfer.executor.processes import Workers
from nanoinfer.executor.shm_ring import Ring
from nanoinfer.loading import LoadedEngine, ModelFiles
from nanoinfer.lora.registry import AdapterRegistry
from nanoinfer.replicas.control import ReplicaAdapters, ReplicaControl
from nanoinfer.replicas.handles import ReplicaHandle, end_replicas
from nanoinfer.replicas.replica import run_replica
from nanoinfer.replicas.replica_messages import Logged, Ready, Reply
from nanoinfer.replicas.replicated_engine import ReplicatedEngine
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import Errors
from nanoinfer.text.prompts import PreparedRequest

logger = logging.getLogger("nanoinfer")

RING_SLOTS, RING_SLOT_SIZE = 16, 2**18  # 16 MiB for new weights


class CheckedConstraints(Constraints):
    """Finds errors in the constraints of requests; replicas compile them for themselves."""

    def add_constraints(self, requests: Mapping[int, PreparedRequest], errors: Errors, use_tqdm: bool = False) -> None:
        super().add_constraints(requests, errors, use_tqdm)
        for request in requests.values():
            request.constraint = None

    def plan(self, params: SamplingParams, grammar: Grammar | None, token_set: TokenSet | None) -> RequestConstraint:
        check_functions(params)
        return super().plan(params, grammar, token_set)


def check_functions(params: SamplingParams) -> None:
    """Raise RequestError for functions that cannot be sent to another process."""
    for function in params.logits_processors or ():
        try:
            pickle.dumps(function)
        except Exception as error:  # pickling runs what the function's own class does
            raise RequestError(
                f"logits_processors has {function!r}, which cannot be sent to a replica ({error}); with "
                "data_parallel_size above 1, use functions that are defined at the top of a module"
            ) from None


def choose_devices(config: EngineConfig) -> list[str]:
    """Return the first device of each replica. Raises ConfigError if there are not enough GPUs."""
    requested, size, ranks = config.device, config.data_parallel_size, config.tensor_parallel_size
    if requested == "cuda" or (requested == "auto" and torch.cuda.is_available()):
        requested = "cuda:0"  # which makes no context on a GPU
    option = f"data_parallel_size={size} with tensor_parallel_size={ranks}"
    return [str(device) for device in select_devices(requested, size * ranks, option)[::ranks]]


def load_replicas(files: ModelFiles) -> LoadedEngine:
    """Start the replicas, which load the model side by side. Raises what `LLM` raises."""
    config, model_config = files.config, files.model_config
    size, started = config.data_parallel_size, time.perf_counter()
    model_config.check_tensor_parallel_size(config.tensor_parallel_size)
    model_config.longest_sequence(config.max_model_len)  # raises before there are processes
    devices = choose_devices(config)
    ring = Ring(size, RING_SLOTS, RING_SLOT_SIZE)
    num_threads = max(1, torch.get_num_threads() // (size * config.tensor_parallel_size))
    replicas: list[ReplicaHandle] = []
    try:
        for index, device in enumerate(devices):
            own = replace(files, config=replace(config, device=device, data_parallel_size=1, trace=None))
            ours, theirs = multiprocessing.Pipe()
            args = theirs, ring, index, own, num_threads, logger.getEffectiveLevel()
            with theirs:
                workers = Workers(2, run_replica, args, f"data_parallel_size={size}", f"replica {index}")
            replicas.append(ReplicaHandle(index, workers, ours))
        tokenizer = files.load_tokenizer()
        image_processor = files.load_image_processor(tokenizer)
        ready = wait_until_ready(replicas)
        for text in ready[0].warnings:
            warnings.warn(text, stacklevel=3)
    except BaseException:
        end_replicas(replicas, patience=0.0)
        raise
    max_model_len = min(one.max_model_len for one in ready)
    engine = ReplicatedEngine(config, replicas, ring, max_model_len, torch.device(devices[0]).type, tokenizer)
    engine.call("limit", max_model_len)
    image_reader = files.make_image_reader(tokenizer, image_processor, ready[0].info.dtype)
    prompt_processor = files.make_prompt_processor(tokenizer, max_model_len, image_reader)
    constraints = files.make_constraints(CheckedConstraints, tokenizer, prompt_processor)
    queue = RequestQueue(engine)
    first = ready[0].info
    longest = max((one.seconds for one in ready), key=lambda seconds: sum(seconds.values()))
    description = f"{size} replicas, each with {first.description}"
    info = replace(first, description=description, start_seconds=longest)
    preparer = Preparer(engine, prompt_processor, constraints)
    adapters = AdapterRegistry(engine, ReplicaAdapters(engine), queue.lock) if config.enable_lora else None
    preparer.adapters_of = adapters.adapters_of if adapters else None
    return LoadedEngine(
        engine=engine,
        queue=queue,
        preparer=preparer,
        constraints=constraints,
        control=ReplicaControl(engine, queue.lock),
        max_model_len=max_model_len,
        info=info,
        seconds={"replicas": time.perf_counter() - started},
        adapters=adapters,
    )


def wait_until_ready(replicas: list[ReplicaHandle]) -> list[Ready]:
    """Wait until all have loaded the model. Raises what one of them raises, or WorkerError if one has ended."""
    connections = {replica.connection: replica for replica in replicas}
    ready: dict[int, Ready] = {}
    while len(ready) < len(replicas):
        for connection in wait([*connections]):
            replica = connections[connection]  # type: ignore[index]
            try:
                message = replica.connection.recv()
            except (EOFError, OSError):
                raise WorkerError(str(replica.explain_end())) from None
            match message:
                case Ready():
                    ready[replica.index] = message
                    del connections[replica.connection]
                case Reply(error=Exception() as error):
                    raise error
                case Logged(level, text):
                    logger.log(level, "replica %d: %s", replica.index, text)
    return [ready[index] for index in range(len(replicas))]
