"""What is asked of requests while they wait in the parent, are on a replica, or on one that dies: no processes."""

import multiprocessing
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from nanoinfer import SamplingParams
from nanoinfer.bench.host import NoWorkers
from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import Action, Recipient
from nanoinfer.executor.processes import Failure
from nanoinfer.executor.shm_ring import Ring
from nanoinfer.replicas.handles import ReplicaHandle
from nanoinfer.replicas.replica_messages import Act, Requests
from nanoinfer.replicas.replicated_engine import ReplicatedEngine
from nanoinfer.text.prompts import PreparedRequest

ROOM = 9  # sequences that each replica is given


class Parent:
    """An engine with stubs for two replicas, and 20 requests: 0 to 17 are on the stubs, 18 and 19 wait."""

    def __init__(self) -> None:
        pipes = [multiprocessing.Pipe() for _ in range(2)]
        self.theirs: list[Connection] = [theirs for _, theirs in pipes]
        workers: Any = NoWorkers()
        replicas = [ReplicaHandle(index, workers, ours) for index, (ours, _) in enumerate(pipes)]
        self.engine = ReplicatedEngine(
            EngineConfig("stub", data_parallel_size=2, max_num_seqs=1), replicas, Ring(2, 1, 1), max_model_len=100
        )
        self.outputs: list[Any] = []
        for request_id in self.engine.reserved_ids.reserve(20):
            params = SamplingParams(max_tokens=50 - request_id)
            prepared = PreparedRequest(prompt=None, token_ids=[1], sampling_params=params)
            self.engine.add_request(request_id, prepared, Recipient(self.outputs))
        sent = self.step()
        self.home = {request_id: replica for replica, (ids, _) in enumerate(sent) for request_id in ids}
        assert sorted(self.home) == [*range(18)]

    def step(self) -> list[tuple[list[int], list[Any]]]:
        """Run a step; return for each replica the ids of requests that were sent to it, and all else."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a replica was lost
            self.engine.step()
        found: list[tuple[list[int], list[Any]]] = []
        for connection in self.theirs:
            ids, others = [], []
            while not connection.closed and connection.poll():
                match connection.recv():
                    case Requests() as message if message.are_aborted:
                        others.append(("aborted", message.columns[:, 0].tolist()))
                    case Requests() as message:
                        ids += message.columns[:, 0].tolist()
                    case message:
                        others.append(message)
            found.append((ids, others))
        return found

    def lose(self, replica: int) -> None:
        self.theirs[replica].close()
        self.engine.replicas[replica].workers.failure = Failure("the stub has ended")


@pytest.fixture
def parent() -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.engine.close()


def test_a_request_that_is_paused_in_the_parent_is_sent_once_it_is_resumed(parent: Parent) -> None:
    engine = parent.engine
    engine.act_later(Action.PAUSE, [18])
    parent.step()
    engine.abort([0, *(request_id for request_id, replica in parent.home.items() if request_id and replica == 1)])
    assert [ids for ids, _ in parent.step()] in ([[19], []], [[], [19]])
    engine.act_later(Action.RESUME, [18])
    engine.act_later(Action.RESUME, [18])
    assert [ids for ids, _ in parent.step()] in ([[18], []], [[], [18]])
    assert engine.num_only_paused() == 0


def test_what_is_asked_of_a_request_on_a_replica_is_told_to_it(parent: Parent) -> None:
    engine, home = parent.engine, parent.home[4]
    engine.act_later(Action.PAUSE, [4])
    [(mine, told), (_, nothing)] = sorted(parent.step(), key=lambda found: not found[1])
    assert (told, nothing) == ([Act(Action.PAUSE, [4])], [])
    assert mine in ([18], [19]), "it makes room for another one"
    assert engine.dispatcher.num_seqs[home] == ROOM
    engine.act_later(Action.RESUME, [4])
    engine.act_later(Action.ABORT, [4])
    assert parent.step()[home][1] == [Act(Action.RESUME, [4]), Act(Action.ABORT, [4])]
    assert engine.dispatcher.num_seqs[home] == ROOM + 1


def test_a_request_that_is_aborted_in_the_parent_gets_its_output_from_a_replica(parent: Parent) -> None:
    parent.engine.act_later(Action.ABORT, [19])
    told = [("aborted", [19])]
    assert [others for _, others in parent.step()] in ([told, []], [[], told])
    assert parent.engine.num_unfinished() == 20


def test_only_paused_requests_are_left_when_all_others_have_gone(parent: Parent) -> None:
    engine = parent.engine
    engine.act_later(Action.PAUSE, [3, 19])
    parent.step()
    engine.abort([request_id for request_id in range(19) if request_id != 3])
    assert engine.num_only_paused() == 2
    engine.act_later(Action.ABORT, [3])
    parent.step()
    assert engine.num_only_paused() == 0


def test_of_a_replica_that_dies_paused_requests_wait_and_aborted_ones_end_on_another(parent: Parent) -> None:
    engine = parent.engine
    paused, aborted, *rest = sorted(request_id for request_id, replica in parent.home.items() if replica == 1)
    engine.act_later(Action.PAUSE, [paused])
    engine.act_later(Action.ABORT, [aborted])
    engine.act_later(Action.PAUSE, [aborted])  # too late
    parent.step()
    engine.abort([request_id for request_id, replica in parent.home.items() if replica == 0])
    parent.lose(1)
    sent: list[int] = []
    told: list[Any] = []
    for _ in range(3):
        ids, others = parent.step()[0]
        sent, told = sent + ids, told + others
    assert Act(Action.ABORT, [aborted]) in told
    assert set(sent) <= {18, 19, aborted, *rest}
    assert engine.dispatcher.num_seqs == [ROOM, 0]
    engine.abort([*rest, 18, 19, aborted])
    assert engine.num_only_paused() == 1
    engine.act_later(Action.RESUME, [paused])
    assert parent.step()[0][0] == [paused]
