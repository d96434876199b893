"""What the tests of scheduler and block manager share: short makers, and a device that runs packets without a model."""

from collections import defaultdict
from collections.abc import Iterable, Set
from itertools import accumulate
from random import Random

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.blocks.hybrid_blocks import HybridBlockManager
from nanoinfer.engine.blocks.partial_hits import MIN_COPIED_TOKENS, BlockCopy
from nanoinfer.engine.blocks.windowed_blocks import WindowedBlockManager
from nanoinfer.engine.packet import pack, read_header
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.sampling_params import SamplingParams

EMPTY_TEXT = 0  # the fingerprint of no token at all


def always_seven(data: bytes) -> int:
    """The worst hash function there is: any two blocks collide."""
    return 7


def make_sequence(seq_id: int, prompt: list[int], max_tokens: int = 4, ignore_eos: bool = False) -> Sequence:
    return Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    max_model_len: int | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    max_prefix_sharers: int = 0,
) -> Scheduler:
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len or num_blocks * block_size,
        stop_token_ids=stop_token_ids,
        reserved_tokens=block_size,  # a block for each running sequence
        max_prefix_sharers=max_prefix_sharers,
    )
    scheduler.prefix_grouper.min_saved_tokens = 0  # tests share a few blocks
    return scheduler


def add_prompts(scheduler: Scheduler, *prompts: list[int], max_tokens: int = 4) -> list[Sequence]:
    """Queue these prompts, numbered from 0."""
    seqs = [make_sequence(seq_id, prompt, max_tokens) for seq_id, prompt in enumerate(prompts)]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def step(scheduler: Scheduler, token_id: int = 0) -> ScheduledBatch:
    """One step in which every sequence gets `token_id`."""
    batch = scheduler.schedule()
    scheduler.update(batch, [token_id] * len(batch.sampled))
    return batch


def run_to_the_end(scheduler: Scheduler, max_steps: int = 100_000) -> list[ScheduledBatch]:
    """Step until every request has finished; return the steps."""
    batches = []
    while not scheduler.is_finished():
        batches.append(step(scheduler))
        assert batches[-1], "nothing is scheduled and requests are left"
        assert len(batches) <= max_steps, f"not finished after {max_steps} steps"
    return batches


def benchmark_requests(num_requests: int, max_prompt_token_id: int = 10_000) -> list[Sequence]:
    """The benchmark's workload: 100 to 1024 random ids in, 100 to 1024 tokens out."""
    randint = Random(0).randint
    prompts = [[randint(0, max_prompt_token_id) for _ in range(randint(100, 1024))] for _ in range(num_requests)]
    return [make_sequence(i, prompt, randint(100, 1024), ignore_eos=True) for i, prompt in enumerate(prompts)]


def num_found(length: int, block_size: int) -> int:
    """How many tokens of a prompt are found if the same prompt ran before: all but the last, or few of a last block."""
    tail = (length - 1) % block_size
    return length - 1 - (tail if tail < MIN_COPIED_TOKENS else 0)


def prefill(manager: BlockManager, seq: Sequence, use_cache: bool = True) -> list[int]:
    """Give `seq` its blocks and compute all its tokens; return the ids of the blocks found in the cache."""
    cached_block_ids = manager.find_cached_prefix(seq) if use_cache else []
    manager.allocate(seq, cached_block_ids)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_blocks(seq, seq.num_computed_tokens)
    return cached_block_ids


class FakeDevice:
    """Runs packets as the real device does, with texts in place of keys and values.

    A slot holds the fingerprint of the whole text it was computed from, a key's or value's true dependence. So a step
    that reads a slot of another text, a stale one or one not written yet fails, and the next token, which depends on
    the whole text, is right only if everything else was. So is the state of a row, if the model has states. windows:
    how many tokens a token attends to in each group of layers; None for all. num_rows: rows of a group's table.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int,
        has_states: bool = False,
        windows: tuple[int | None, ...] = (None,),
        num_rows: int = 0,
    ) -> None:
        self.windows = windows
        self.num_rows = num_rows
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.has_states = has_states
        self.states: dict[int, int | None] = {}  # by place, the first ones of rows -> text up to and including a token
        self.slots: dict[tuple[int, int], int | None] = {}  # (block_id, offset) -> text up to and including that token
        self.token_ids: dict[int, list[int]] = {}  # by row
        self.block_tables: dict[int, dict[int, int]] = defaultdict(dict)  # by row and column

    def run(self, batch: ScheduledBatch, fails: bool = False) -> list[int]:
        """Return the token ids of `batch.sampled`. A step that fails leaves garbage where it was to write."""
        packet = pack(batch)
        header = read_header(packet)
        sections = header.on_host(packet)
        known_tokens = iter(sections.known_tokens[:, 0].tolist())
        for row, num_tokens, *_ in sections.row_records.tolist():
            self.token_ids[row] = [next(known_tokens) for _ in range(num_tokens)]
            self.block_tables[row] = {}
        for row, column, block_id in sections.new_blocks.tolist():
            self.block_tables[row][column] = block_id
        copied = {
            (target, offset): None if fails else self.slots.get((source, offset))
            for source, target, num_tokens in sections.block_copies.tolist()
            for offset in range(num_tokens)
        }
        self.slots.update(copied)
        for source, target in [*sections.kept_states.tolist(), *sections.restored_states.tolist()]:
            self.states[target] = None if fails else self.states.get(source)

        decode_rows = sections.decode_rows[:, 0].tolist()
        chunks = sections.chunks.tolist() + [[row, len(self.token_ids[row]) - 1, 1] for row in decode_rows]
        for row, start, length in chunks:  # every layer writes all its keys and values before it reads any
            texts = fingerprints(self.token_ids[row])
            for group in range(len(self.windows)):
                for position in range(start, start + length):
                    self.slots[self.slot(row, position, group)] = None if fails else texts[position] + group
            if self.has_states:
                assert fails or start == 0 or self.states[row] == texts[start - 1], (
                    f"the state of row {row} is that of another text than its first {start} tokens"
                )
                self.states[row] = None if fails else texts[start + length - 1]
        sampled_rows = [row for row, _, _ in chunks[: header.num_prefill_samples]] + decode_rows
        if fails:
            for row in sampled_rows:
                self.token_ids[row].append(0)
            return []
        self.check_prefix_groups(sections.decode_rows.tolist())
        for row, start, length in chunks:
            texts = fingerprints(self.token_ids[row])
            for group, window in enumerate(self.windows):
                for position in range(0 if window is None else max(0, start - window + 1), start + length):
                    found = self.slots.get(self.slot(row, position, group))
                    assert found == texts[position] + group, f"row {row} reads another text at position {position}"
                for column in range(0 if window is None else max(0, start - window + 1) // self.block_size):
                    block_id, first = self.block_tables[row + group * self.num_rows][column], column * self.block_size
                    own = self.slots.get((block_id, 0)) == texts[first] + group
                    assert block_id == 0 or own, "an entry before the window points to a block of another text"

        for row in sampled_rows:
            self.token_ids[row].append(next_token(self.token_ids[row], self.vocab_size))
        return [self.token_ids[row][-1] for row in sampled_rows]

    def check_prefix_groups(self, decode_rows: list[list[int]]) -> None:
        """Attention takes the first blocks of a group's first row for all rows of the group, and masks no token."""
        in_no_group = [True] * len(decode_rows)
        for first_row, (first, num_blocks, num_rows) in enumerate(decode_rows):
            if num_rows == 0:
                continue
            assert num_rows > 1
            assert num_blocks > 0
            for index in range(first_row, first_row + num_rows):
                assert in_no_group[index], "a row is in two groups"
                in_no_group[index] = False
                row, num_shared_blocks, _ = decode_rows[index]
                assert num_shared_blocks == num_blocks
                assert num_blocks * self.block_size < len(self.token_ids[row]), "the newest token is its row's own"
                for column in range(num_blocks):
                    assert self.block_tables[row][column] == self.block_tables[first][column]
        assert all(decode_rows[index][1] == 0 for index, alone in enumerate(in_no_group) if alone)

    def slot(self, row: int, position: int, group: int = 0) -> tuple[int, int]:
        block_id = self.block_tables[row + group * self.num_rows][position // self.block_size]
        assert block_id != 0 or len(self.windows) == 1, "the page that nobody is given"
        return block_id, position % self.block_size


def fingerprints(token_ids: list[int]) -> list[int]:
    """One number for each prefix of `token_ids`, that of its whole text."""
    return list(accumulate(token_ids, lambda text, token_id: hash((text, token_id)), initial=EMPTY_TEXT))[1:]


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The fake model: any token of the text changes what comes next."""
    return fingerprints(token_ids)[-1] % vocab_size


def completion_alone(seq: Sequence, scheduler: Scheduler, vocab_size: int) -> tuple[list[int], str]:
    """What `seq` must generate, and why it ends: worked out with no cache, no batch and no scheduler."""
    token_ids = list(seq.prompt_token_ids)
    params = seq.sampling_params
    while True:
        token_ids.append(next_token(token_ids, vocab_size))
        completion = token_ids[seq.num_prompt_tokens :]
        if token_ids[-1] in scheduler.stop_token_ids and not params.ignore_eos:
            return completion, "stop"
        if len(completion) == params.max_tokens or len(token_ids) == scheduler.max_model_len:
            return completion, "length"


def check_batch(scheduler: Scheduler, batch: ScheduledBatch, in_flight: bool) -> None:
    """What holds for every step that was scheduled."""
    assert not (batch.prefill and batch.decode)
    assert batch.num_prefill_tokens <= scheduler.max_num_batched_tokens
    assert all(chunk.length > 0 for chunk in batch.prefill)
    if not isinstance(scheduler.block_manager, HybridBlockManager):
        assert all(chunk.samples for chunk in batch.prefill[:-1]), "only the last chunk may be cut"
    if batch.decode:
        assert all(seq.num_tokens <= seq.stopping.max_num_tokens for seq in batch.decode), "longer than it may be"
        left_out = [seq for seq in scheduler.running if seq not in batch.decode]
        assert all(in_flight and seq.num_tokens == seq.stopping.max_num_tokens for seq in left_out), (
            "its last token is in flight"
        )
        in_groups = batch.decode[: sum(group.num_rows for group in batch.prefix_groups)]
        others = [seq for seq in scheduler.running if seq not in left_out and seq not in in_groups]
        assert batch.decode == in_groups + others, "only the rows of groups leave their order"
        assert len(batch.decode) == len(scheduler.running) - len(left_out)


def check_invariants(
    scheduler: Scheduler, seqs: list[Sequence], overtaken: Set[int] = frozenset(), copies: Iterable[BlockCopy] = ()
) -> None:
    """What holds between any two calls of the scheduler, to which `seqs` were added: nothing is lost or held twice.

    overtaken: ids of those that later ones may have overtaken.
    copies: those of the steps in flight.
    """
    manager = scheduler.block_manager
    waiting = [seq for seq in seqs if seq.status is SequenceStatus.WAITING]
    assert scheduler.num_waiting == len(waiting)
    for seq in waiting:
        assert (seq.row, seq.block_table, seq.num_computed_tokens, seq.num_pending_tokens) == (None, [], 0, 0)
    running = {seq for seq in seqs if seq.status is SequenceStatus.RUNNING}
    ending = running - {*scheduler.running}
    assert {*scheduler.running} <= running
    for seq in ending:  # a later step has its row
        assert (seq.row, seq.num_tokens, seq.num_pending_tokens) == (None, seq.stopping.max_num_tokens, 1)
    for priority in {seq.priority for seq in waiting} & {seq.priority for seq in scheduler.running}:
        running_ids = [seq.seq_id for seq in scheduler.running if seq.priority == priority]
        waiting_ids = [seq.seq_id for seq in waiting if seq.priority == priority and seq.seq_id not in overtaken]
        assert max(running_ids) < min(waiting_ids, default=max(running_ids) + 1), "not FIFO"

    assert {seq for seq in seqs if seq.status is SequenceStatus.PAUSED} == {*scheduler.paused}
    assert all(seq.num_pending_tokens == 0 for seq in scheduler.paused)
    assert all((seq.row is None) == (not seq.block_table) for seq in scheduler.paused)
    holding = scheduler.running + [seq for seq in scheduler.paused if seq.row is not None]
    rows = {seq.row for seq in holding}
    assert len(rows) == len(holding), "a row has two sequences"
    assert rows <= set(range(scheduler.max_num_seqs))
    holding += ending

    users = defaultdict(list)
    for seq in holding:
        assert len(seq.block_table) * manager.block_size >= seq.num_computed_tokens
        for column, block_id in enumerate(seq.block_table):
            users[block_id].append((column, seq.token_ids[: (column + 1) * manager.block_size]))
        if isinstance(manager, WindowedBlockManager):
            tables = manager._tables[seq]
            for column, block_ids in enumerate(tables.columns, tables.first):
                for block_id in block_ids:
                    users[block_id].append((column, seq.token_ids[: (column + 1) * manager.block_size]))
    for texts in users.values():
        assert all(text == texts[0] for text in texts), "a block is shared by different texts"
    assert manager.num_used_blocks == len(users.keys() | {copy.source for copy in copies})
    assert manager.num_free_blocks + manager.num_used_blocks == manager.num_blocks
    if isinstance(manager, HybridBlockManager):
        check_snapshots(manager, seqs)
    if isinstance(manager, WindowedBlockManager):
        check_windows(manager, holding)


def check_windows(manager: WindowedBlockManager, holding: list[Sequence]) -> None:
    """A sequence holds no block that its window has left, but for those of its last block and chunk."""
    assert {*manager._tables} == {*holding}
    owned = {block_id: owner for owner, column in manager._cached_columns.items() for block_id in column}
    assert owned == manager._owners
    assert all(manager._blocks[block_id].entry is not None for block_id in manager._cached_columns)
    for tables in manager._tables.values():
        assert len(tables.columns) <= manager._max_columns


def check_snapshots(manager: HybridBlockManager, seqs: list[Sequence]) -> None:
    """Every place has one snapshot, kept or planned, or is free; what waits is known, and nothing else."""
    snapshots = manager.snapshots
    planned = [snapshot for plan in manager._plans.values() for snapshot in plan]
    places = [snapshot.place for snapshot in [*planned, *snapshots._kept]] + snapshots._free
    assert len({*places}) == len(places) == snapshots.num_places
    holding = {seq for seq in seqs if seq.row is not None}
    assert {*manager._plans} <= holding, "a sequence without a row is to leave states"
    found = [snapshot for children in snapshots._children.values() for snapshot in children.values()]
    assert {*found} == {*snapshots._kept}
    awaited = [snapshot for by_text in snapshots._awaited.values() for snapshot in by_text.values()]
    assert {*awaited} <= {*planned, *snapshots._new}
    waiting = sorted(seq.token_ids for seq in seqs if seq.status is SequenceStatus.WAITING)
    assert manager._queued._sorted() == waiting, (manager._queued._sorted(), waiting)


def check_cache_contents(manager: BlockManager, device: FakeDevice, seqs: list[Sequence]) -> None:
    """Whatever a lookup of one of these sequences finds holds just that sequence's text on the device."""
    for seq in seqs:
        texts = fingerprints(seq.token_ids)
        for index, block_id in enumerate(manager.find_cached_prefix(seq)):
            blocks = [block_id]
            if isinstance(manager, WindowedBlockManager):
                blocks += manager._cached_columns.get(block_id, ())
            for group, one in enumerate(blocks):
                held = [device.slots.get((one, offset)) for offset in range(manager.block_size)]
                expected = [text + group for text in texts[index * manager.block_size :][: manager.block_size]]
                assert held == expected, f"block {one} is cached under a text that it does not hold"
