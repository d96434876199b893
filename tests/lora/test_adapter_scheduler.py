"""Sequences wait while the adapters of others take all slots."""

import pytest

from nanoinfer import LoRARequest, RequestError, SamplingParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.sequence import Sequence
from nanoinfer.lora.adapter_scheduler import AdapterScheduler
from nanoinfer.lora.registry import Adapter

ONE_TOKEN = SamplingParams(max_tokens=1)


def make_scheduler(num_slots: int) -> AdapterScheduler:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 32}
    return AdapterScheduler(BlockManager(64, 4), num_slots=num_slots, **options)


def make_adapters(count: int) -> list[Adapter]:
    return [Adapter(LoRARequest(f"adapter {number}", number, "folder"), number) for number in range(1, count + 1)]


def add(scheduler: AdapterScheduler, seq_id: int, adapter: Adapter | None, priority: int = 0) -> Sequence:
    seq = Sequence(seq_id, [1, 2, seq_id], ONE_TOKEN, priority=priority, identity=adapter, adapter=adapter)
    scheduler.add(seq)
    return seq


def run_step(scheduler: AdapterScheduler) -> list[int]:
    """Run a step, which ends its sequences; return their ids."""
    batch = scheduler.schedule()
    return [seq.seq_id for seq in scheduler.update(batch, [7] * len(batch.sampled))]


def test_sequences_whose_adapter_has_a_slot_overtake_those_that_wait_for_one() -> None:
    scheduler, (first, second) = make_scheduler(num_slots=1), make_adapters(2)
    for seq_id, adapter in enumerate((first, second, None, first, second)):
        add(scheduler, seq_id, adapter)
    assert (first.slot, second.slot, scheduler.num_waiting) == (0, None, 5)
    assert run_step(scheduler) == [0, 2, 3]
    assert (first.slot, second.slot) == (None, 0)
    assert run_step(scheduler) == [1, 4]
    assert scheduler.is_finished()
    assert not first.users
    assert not second.users


def test_those_that_wait_for_a_slot_get_it_by_priority_and_arrival() -> None:
    scheduler, adapters = make_scheduler(num_slots=1), make_adapters(4)
    for seq_id, priority in enumerate((0, 0, 5, 0)):
        add(scheduler, seq_id, adapters[seq_id], priority)
    assert [run_step(scheduler) for _ in adapters] == [[0], [2], [1], [3]]


def test_the_adapter_that_is_unused_for_longest_leaves_its_slot() -> None:
    scheduler, adapters = make_scheduler(num_slots=2), make_adapters(3)
    for seq_id, index in enumerate((0, 1, 0)):  # the second is unused for longest then
        add(scheduler, seq_id, adapters[index])
        assert run_step(scheduler) == [seq_id]
    assert [adapter.slot for adapter in adapters] == [0, 1, None]
    add(scheduler, 3, adapters[2])
    assert [adapter.slot for adapter in adapters] == [0, None, 1]
    add(scheduler, 4, adapters[1])
    assert [adapter.slot for adapter in adapters] == [None, 0, 1]
    assert run_step(scheduler) == [3, 4]


def test_a_sequence_that_waits_for_a_slot_can_be_paused_and_aborted() -> None:
    scheduler, (first, second, third) = make_scheduler(num_slots=1), make_adapters(3)
    for seq_id, adapter in enumerate((first, second, third)):
        add(scheduler, seq_id, adapter)
    scheduler.pause({1})
    scheduler.abort({2})
    assert not third.users
    assert run_step(scheduler) == [0]
    assert (scheduler.is_finished(), second.slot) == (True, None)
    scheduler.resume({1})
    assert second.slot == 0
    assert run_step(scheduler) == [1]


def test_paused_sequences_leave_their_adapters_slot_to_those_that_wait_for_it() -> None:
    scheduler, (first, second) = make_scheduler(num_slots=1), make_adapters(2)
    paused = [Sequence(n, [1, 2, n], SamplingParams(max_tokens=2), identity=first, adapter=first) for n in (0, 1)]
    for seq in paused:
        scheduler.add(seq)
    batch = scheduler.schedule()
    scheduler.update(batch, [7, 7])
    waiting = add(scheduler, 2, second)
    scheduler.pause({0})
    assert second.slot is None, "another sequence of the first adapter runs"
    scheduler.pause({1})
    assert (first.slot, second.slot) == (None, 0)
    assert [seq.row for seq in paused] == [None, None]
    scheduler.resume({0})
    assert first.slot is None
    scheduler.pause({2})
    assert (first.slot, second.slot, waiting.row) == (0, None, None)
    scheduler.abort({1, 2})
    assert run_step(scheduler) == [0]
    assert scheduler.is_finished()
    assert not first.users
    assert not second.users


def test_a_preempted_sequence_keeps_its_slot() -> None:
    scheduler, (first, second) = make_scheduler(num_slots=1), make_adapters(2)
    seq = add(scheduler, 0, first)
    add(scheduler, 1, second)
    scheduler.discard([scheduler.schedule()])  # a step that failed
    assert (seq.row, first.slot, second.slot) == (None, 0, None)
    assert [run_step(scheduler), run_step(scheduler)] == [[0], [1]]


def test_a_sequence_of_an_adapter_that_was_removed_is_refused() -> None:
    scheduler, [adapter] = make_scheduler(num_slots=1), make_adapters(1)
    adapter.is_removed = True
    with pytest.raises(RequestError, match="was removed; name it again"):
        add(scheduler, 0, adapter)
    assert scheduler.is_finished()
