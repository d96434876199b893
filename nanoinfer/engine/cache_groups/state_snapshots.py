"""Keeps recurrent states of places in texts, so that prompts of hybrids can begin there (prefix caching of states).

Keys and values of a prefix serve any text that begins with it, wherever the two part. A recurrent state holds all
tokens before one place and cannot be cut, so a hit has to end where a state was kept. An offline engine knows its
prompts beforehand: it ends a chunk where they part, and keeps the state of that place (`state_group.py`).

A snapshot hangs in the chain of the prefix cache: under the serial number of the entry of the last full block before
it, with the tokens after that block. Serial numbers are never used again, so it is verified as blocks are.

States are copied on the device, in the order of the steps. What a step computes is copied before the next one computes
anything. So a snapshot is found from the step after that of its text on, and its row may be given away at once.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from nanoinfer.engine.block_pool import BlockPool
from nanoinfer.engine.cache_groups.partial_hits import CacheEntry, Parent
from nanoinfer.engine.cache_groups.queued_prompts import QueuedPrompts
from nanoinfer.engine.scheduled_batch import StateCopy
from nanoinfer.engine.sequence import Sequence, SequenceStatus

MAX_COMPARED = 16  # snapshots that are compared before one is evicted


@dataclass(slots=True, eq=False)
class Snapshot:
    """Describes the states after the tokens of `text`, kept or still to be computed.

    place: where the states are, or will be, on the device. seq: computes them. parent, tail: once they are kept, what
    they hang under, and the tokens after it (ids as int32). step: the number of the step that computes the states.
    """

    text: "array[int]"
    place: int
    seq: Sequence
    parent: Parent = 0
    tail: bytes = b""
    step: int = 0


class StateSnapshots:
    """Gives places to snapshots, and finds them.

    first_place, num_places: which places of the states on the device are theirs. queued: says who waits for a snapshot,
    by the identity of sequences.
    """

    def __init__(
        self, pool: BlockPool, first_place: int, num_places: int, queued: Mapping[Hashable, QueuedPrompts]
    ) -> None:
        self.num_places = num_places
        self._pool, self._queued = pool, queued
        self._free = list(range(first_place + num_places - 1, first_place - 1, -1))
        self._kept: OrderedDict[Snapshot, None] = OrderedDict()  # the least recently used first
        self._children: defaultdict[Parent, dict[bytes, Snapshot]] = defaultdict(dict)  # by parent and tail
        # By length, and by identity and text:
        self._awaited: defaultdict[int, dict[tuple[Hashable, bytes], Snapshot]] = defaultdict(dict)
        self._new: list[Snapshot] = []  # kept since the last step began
        self._step = 0
        self._kept_next: list[StateCopy] = []  # what the last step computes
        self._to_keep: list[StateCopy] = []
        self._to_restore: list[tuple[Snapshot, Sequence]] = []

    def __len__(self) -> int:
        """Return how many snapshots can be found."""
        return len(self._kept)

    def texts(self) -> Iterator[bytes]:
        """Yield the tokens of each snapshot that no entry has."""
        for snapshot in self._kept:
            yield snapshot.tail

    def start_step(self) -> None:
        """Let the next step find what the steps before it compute."""
        self._step += 1
        self._to_keep += self._kept_next
        self._kept_next = []
        for snapshot in self._new:
            self._await_no_more(snapshot)
        self._new = []

    def take_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Return the copies that the step begins with: to snapshots, and then from snapshots to rows."""
        restored = []
        for snapshot, seq in self._to_restore:
            restored.append(StateCopy(snapshot.place, seq.held_row))
        kept, self._to_keep, self._to_restore = self._to_keep, [], []
        return kept, restored

    def plan(self, seq: Sequence, num_tokens: int, may_evict: bool = False) -> Snapshot | None:
        """Return the snapshot that `seq` is to leave after so many tokens; None where there is no free place for it.

        may_evict: whether a snapshot that no queued text needs may be evicted for it.
        """
        if not self._free and not (may_evict and self._make_room(1)):
            return None
        return Snapshot(seq.token_ids[:num_tokens], self._free.pop(), seq)

    def plan_awaited(self, seq: Sequence, num_tokens: int, num_users: int) -> Snapshot | None:
        """Do as `plan` for a snapshot that so many texts wait for; it may evict one that saves less.

        None also if another sequence is to leave this snapshot.
        """
        text = seq.token_ids[:num_tokens]
        key = seq.identity, text.tobytes()
        if key in self._awaited.get(num_tokens, ()):
            return None
        if not self._free and not self._make_room(num_users * num_tokens):
            return None
        snapshot = Snapshot(text, self._free.pop(), seq)
        self._awaited[num_tokens][key] = snapshot
        return snapshot

    def drop_plan(self, snapshot: Snapshot) -> None:
        """Forget a snapshot that will not be computed."""
        self._await_no_more(snapshot)
        self._free.append(snapshot.place)

    def keep(self, snapshot: Snapshot, parent: Parent, tail: bytes) -> None:
        """Keep what the row of its sequence holds after the step that is being scheduled, or was scheduled last."""
        row = snapshot.seq.row
        assert row is not None, f"sequence {snapshot.seq.seq_id} leaves a state and has no row"
        self._pool.retain((parent,))
        older = self._children[parent].get(tail)
        if older is not None:
            self.drop(older)
        snapshot.parent, snapshot.tail, snapshot.step = parent, tail, self._step
        self._children[parent][tail] = snapshot
        self._kept[snapshot] = None
        self._new.append(snapshot)
        self._kept_next.append(StateCopy(row, snapshot.place))

    def find(self, parent: Parent, tokens: bytes) -> Iterator[Snapshot]:
        """Yield the snapshots that hang under this entry and go on with the first of `tokens`, the longest first."""
        children = self._children.get(parent)
        if children:
            for tail in sorted(filter(tokens.startswith, children), key=len, reverse=True):
                if children[tail].step < self._step:
                    yield children[tail]

    def find_later(self, seq: Sequence, max_tokens: int) -> int:
        """Return where the longest snapshot ends that `seq` can begin with once others have computed it; 0: nowhere."""
        for length in sorted(self._awaited, reverse=True):
            if length <= max_tokens:
                snapshot = self._awaited[length].get((seq.identity, seq.token_ids[:length].tobytes()))
                if snapshot is not None and (snapshot in self._kept or snapshot.seq.status is SequenceStatus.RUNNING):
                    return length
        return 0

    def restore(self, snapshot: Snapshot, seq: Sequence) -> None:
        """Have the step that is being scheduled begin with a copy of the snapshot to the row of `seq`."""
        self._kept.move_to_end(snapshot)
        self._to_restore.append((snapshot, seq))

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. Copies that are due are still made, before its place can be written again."""
        del self._kept[snapshot]
        siblings = self._children[snapshot.parent]
        del siblings[snapshot.tail]
        if not siblings:
            del self._children[snapshot.parent]
        self._await_no_more(snapshot)
        self._free.append(snapshot.place)
        self._pool.release((snapshot.parent,))

    def drop_children(self, entry: CacheEntry) -> None:
        """Forget the snapshots under an entry that is removed: no lookup can find them any more."""
        for snapshot in list(self._children.get(entry.serial, {}).values()):
            self.drop(snapshot)

    def clear(self) -> None:
        """Forget all that is kept."""
        for snapshot in list(self._kept):
            self.drop(snapshot)
        self._kept_next, self._to_keep = [], []

    def _await_no_more(self, snapshot: Snapshot) -> None:
        length, key = len(snapshot.text), (snapshot.seq.identity, snapshot.text.tobytes())
        if self._awaited.get(length, {}).get(key) is snapshot:
            del self._awaited[length][key]
            if not self._awaited[length]:
                del self._awaited[length]

    def _make_room(self, worth: int) -> bool:
        """Evict the snapshot that saves the least, the least recently used among equals; False if all save more."""
        least: Snapshot | None = None
        for snapshot in islice(self._kept, MAX_COMPARED):
            queued = self._queued.get(snapshot.seq.identity)
            saves = queued.num_beginning_with(snapshot.text) * len(snapshot.text) if queued else 0
            if saves < worth:
                least, worth = snapshot, saves
            if saves == 0:
                break
        if least is None:
            return False
        self.drop(least)
        return True
