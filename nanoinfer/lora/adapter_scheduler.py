"""Schedules sequences with adapters: a sequence waits while the adapters of others take all slots on the device."""

from collections.abc import Iterable
from typing import Any

from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.lora.registry import Adapter


class AdapterScheduler(Scheduler):
    """Queues a sequence once its adapter has a slot. The adapter keeps the slot until its sequences have finished.

    After that the adapter is idle, and stays in its slot until another adapter needs it. Evicted are, in this order: an
    idle adapter that was removed; the adapter that has been idle for longest; an adapter with paused sequences alone.
    Such sequences give up their rows and blocks, and wait for a slot once they are resumed. Sequences whose adapter has
    a slot overtake those that wait for a slot, which are served by priority and arrival.

    num_slots: slots on the device.
    """

    def __init__(self, *arguments: Any, num_slots: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._free_slots = [*range(num_slots)]
        self._idle: dict[Adapter, None] = {}  # in slots, without sequences; idle for longest first
        self._held: list[Sequence] = []  # they wait until their adapters have slots

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._held)

    def add(self, seq: Sequence) -> None:
        adapter = seq.adapter
        if adapter is not None:
            adapter.enter(seq)
            self._idle.pop(adapter, None)
        super().add(seq)

    def _enqueue(self, seq: Sequence) -> None:
        if seq.adapter is None or self._has_slot(seq.adapter):
            super()._enqueue(seq)
        else:
            self._held.append(seq)

    def _has_slot(self, adapter: Adapter) -> bool:
        """Give an adapter a slot, if it has none; return whether it has one now."""
        if adapter.slot is None and not self._free_slots:
            evicted = self._adapter_to_evict()
            if evicted is not None:
                self._idle.pop(evicted, None)
                self._free_slots.append(evicted.slot)
                evicted.slot = None
        if adapter.slot is None and self._free_slots:
            adapter.slot = self._free_slots.pop(0)
        return adapter.slot is not None

    def _adapter_to_evict(self) -> Adapter | None:
        """Return an adapter without running or waiting sequences, which is to leave its slot; None if there is none."""
        if self._idle:
            return next((one for one in self._idle if one.is_removed), next(iter(self._idle)))
        for last in sorted(self.paused, key=lambda seq: seq.queue_key, reverse=True):
            adapter = last.adapter
            if adapter is not None and adapter.slot is not None and all(map(_is_paused, adapter.users)):
                for seq in self.paused:
                    if seq.adapter is adapter and seq.row is not None:
                        self.num_preemptions += 1
                        self._release(seq, SequenceStatus.PAUSED)
                return adapter
        return None

    def finish(self, reasons: list[tuple[Sequence, str]]) -> list[Sequence]:
        finished = super().finish(reasons)
        self._leave(finished)
        return finished

    def abort(self, seq_ids: set[int]) -> None:
        withdrawn = [seq for _, seq in self._waiting] + self.paused + self._held
        super().abort(seq_ids)
        self._leave(seq for seq in withdrawn if seq.seq_id in seq_ids)

    def pause(self, seq_ids: set[int]) -> None:
        super().pause(seq_ids)
        self._enqueue_held()

    def _withdraw(self, seq_ids: set[int]) -> list[Sequence]:
        held = [seq for seq in self._held if seq.seq_id in seq_ids]
        self._held = [seq for seq in self._held if seq.seq_id not in seq_ids]
        return super()._withdraw(seq_ids) + held

    def _leave(self, seqs: Iterable[Sequence]) -> None:
        """Note that these sequences have finished; queue sequences for whose adapters there are slots now."""
        num_idle = len(self._idle)
        for seq in seqs:
            adapter = seq.adapter
            if adapter is not None and seq in adapter.users:
                adapter.users.remove(seq)
                if not adapter.users and adapter.slot is not None:
                    self._idle[adapter] = None
        if len(self._idle) > num_idle:
            self._enqueue_held()

    def _enqueue_held(self) -> None:
        """Queue the sequences that wait for slots, as far as slots are free now."""
        held, self._held = self._held, []
        for seq in sorted(held, key=lambda seq: seq.queue_key):
            self._enqueue(seq)


def _is_paused(seq: Any) -> bool:
    return seq.status is SequenceStatus.PAUSED
