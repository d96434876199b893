"""What the tests of scheduler and block manager share: short makers, and a device that runs packets without a model."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Set
from itertools import accumulate
from random import Random

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.attention_group import AttentionGroup, SlidingWindowGroup
from nanoinfer.engine.cache_groups.cache_group import Hit
from nanoinfer.engine.cache_groups.partial_hits import MIN_COPIED_TOKENS, CacheEntry
from nanoinfer.engine.cache_groups.state_group import StateGroup
from nanoinfer.engine.packet import pack, read_header
from nanoinfer.engine.scheduled_batch import BlockCopy, ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.token_ids import NO_TOKEN, NOT_COUNTED

EMPTY_TEXT = 0  # the fingerprint of no token at all
NAN = "NaN"  # in place of a fingerprint


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
    scheduler.sharer_finder.min_saved_tokens = 0  # tests share a few blocks
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


def found_block_ids(manager: BlockManager, seq: Sequence) -> list[int]:
    """The blocks of the first table that hold the longest cached prefix of `seq`, without one that is copied."""
    return [column[0] for entry in manager.find_cached_prefix(seq).entries if (column := entry.columns[0])]


def allocate(manager: BlockManager, seq: Sequence, hit: Hit | None = None) -> list[BlockCopy]:
    """Give `seq` a row, and its blocks: by default, what it finds in the cache; return the copies to begin with."""
    seq.row, batch = 0, ScheduledBatch()
    manager.allocate(batch, seq, hit or manager.find_cached_prefix(seq))
    return batch.block_copies


def prefill(manager: BlockManager, seq: Sequence, use_cache: bool = True) -> list[int]:
    """Give `seq` its blocks and compute all its tokens; return the ids of the blocks found in the cache."""
    hit = manager.find_cached_prefix(seq) if use_cache else Hit([], [[]])
    found = [column[0] for entry in hit.entries if (column := entry.columns[0])]
    allocate(manager, seq, hit)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_blocks(seq, seq.num_computed_tokens)
    return found


class FakeDevice:
    """Runs packets as the real device does, with texts in place of keys and values.

    A slot holds the fingerprint of the whole text it was computed from, a key's or value's true dependence. So a step
    that reads a slot of another text, a stale one or one not written yet fails, and the next token, which depends on
    the whole text, is right only if everything else was. So is the state of a row, if the model has states. The
    identity of a sequence is the beginning of its text. windows: how many tokens a token attends to in the layers of
    each block table; None for all. num_rows: rows of a table.
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
        self.has_hidden_nans = False  # whether a row has had NaN and sampled nothing, so that nobody knows
        # By place, the first ones of rows, and by block id and offset: the text up to and including that token.
        self.states: dict[int, int | str | None] = {}
        self.slots: dict[tuple[int, int], int | str | None] = {}
        self.token_ids: dict[int, list[int]] = {}  # by row
        self.identities: dict[int, Hashable] = {}  # by row
        self.block_tables: dict[int, dict[int, int]] = defaultdict(dict)  # by row and column

    def run(self, batch: ScheduledBatch, fails: bool = False, nans: Set[int] = frozenset()) -> list[int]:
        """Return the token ids of `batch.sampled`. A step that fails leaves garbage where it was to write.

        nans: ids of sequences that compute NaN, and so does whoever reads what they write. They get NO_TOKEN.
        """
        packet = pack(batch)
        header = read_header(packet)
        sections = header.on_host(packet)
        self.identities |= {seq.held_row: seq.identity for seq in batch.admitted}
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
        proposals: dict[int, list[int]] = defaultdict(list)  # by row
        if len(sections.proposals):
            for row, (count, *ids) in zip(decode_rows, sections.proposals.reshape(len(decode_rows), -1), strict=True):
                proposals[row] = [int(token_id) for token_id in ids[: count - 1]]
        chunks = sections.chunks.tolist()
        chunks += [[row, len(self.token_ids[row]) - 1, 1 + len(proposals[row])] for row in decode_rows]
        sampled_rows = [row for row, _, _ in chunks[: header.num_prefill_samples]] + decode_rows
        for row, start, length in chunks:  # every layer writes all its keys and values before it reads any
            texts = fingerprints(self.token_ids[row] + proposals[row], self.identities.get(row))
            for group in range(len(self.windows)):
                for position in range(start, start + length):
                    self.slots[self.slot(row, position, group)] = None if fails else texts[position] + group
        if fails:
            for row in {row for row, _, _ in chunks}:
                self.states[row] = None
            for row in sampled_rows:
                self.token_ids[row].append(0)
            return []
        self.check_prefix_sharers(sections.decode_rows.tolist())
        nan_rows = self.spread_nans(chunks, {seq.held_row for seq in batch.sampled if seq.seq_id in nans})
        self.has_hidden_nans |= not nan_rows <= {*sampled_rows}
        drawn = {row: self.draw(row, proposals[row], row in nan_rows) for row in sampled_rows}
        for row, start, length in chunks:
            texts = fingerprints(self.token_ids[row] + proposals[row], self.identities.get(row))
            for group, window in enumerate(self.windows):
                for position in range(0 if window is None else max(0, start - window + 1), start + length):
                    found = self.slots.get(self.slot(row, position, group))
                    right = found == texts[position] + group or (row in nan_rows and found == NAN)
                    assert right, f"row {row} reads another text at position {position}"
                for column in range(0 if window is None else max(0, start - window + 1) // self.block_size):
                    block_id, first = self.block_tables[row + group * self.num_rows][column], column * self.block_size
                    own = self.slots.get((block_id, 0)) in (texts[first] + group, NAN)
                    assert block_id == 0 or own, "an entry before the window points to a block of another text"
            if self.has_states:
                right = start == 0 or self.states[row] == texts[start - 1] or row in nan_rows
                assert right, f"the state of row {row} is that of another text than its first {start} tokens"
                num_counted = len(drawn[row]) if proposals[row] else length
                self.states[row] = NAN if row in nan_rows else texts[start + num_counted - 1]
        for row in sampled_rows:
            self.token_ids[row] += drawn[row]
        return [
            token_id
            for row in sampled_rows
            for token_id in drawn[row] + [NOT_COUNTED] * (batch.num_tokens - len(drawn[row]))
        ]

    def draw(self, row: int, proposals: list[int], is_nan: bool) -> list[int]:
        """Return the next tokens of a row, up to the first one that is not what is proposed."""
        drawn: list[int] = []
        for proposal in [*proposals, None]:
            token_id = next_token(self.token_ids[row] + drawn, self.vocab_size, self.identities.get(row))
            drawn.append(NO_TOKEN if is_nan else token_id)
            if drawn[-1] != proposal:
                break
        return drawn

    def spread_nans(self, chunks: list[list[int]], nan_rows: set[int]) -> set[int]:
        """Have these rows, and those that read what they write, write NaN; return all these rows."""
        num_known = -1
        while num_known < len(nan_rows):
            num_known = len(nan_rows)
            for row, start, length in chunks:
                for group, window in enumerate(self.windows):
                    read = range(0 if window is None else max(0, start - window + 1), start + length)
                    if any(self.slots.get(self.slot(row, position, group)) == NAN for position in read):
                        nan_rows.add(row)
                if self.has_states and start > 0 and self.states[row] == NAN:
                    nan_rows.add(row)
                for group in range(len(self.windows) if row in nan_rows else 0):
                    for position in range(start, start + length):
                        self.slots[self.slot(row, position, group)] = NAN
        return nan_rows

    def check_prefix_sharers(self, decode_rows: list[list[int]]) -> None:
        """Attention takes the first blocks of the first of some sharers for all of them, and masks no token."""
        shares_with_none = [True] * len(decode_rows)
        for first_row, (first, num_blocks, num_rows) in enumerate(decode_rows):
            if num_rows == 0:
                continue
            assert num_rows > 1
            assert num_blocks > 0
            for index in range(first_row, first_row + num_rows):
                assert shares_with_none[index], "a row shares in two ways"
                shares_with_none[index] = False
                row, num_shared_blocks, _ = decode_rows[index]
                assert num_shared_blocks == num_blocks
                assert num_blocks * self.block_size < len(self.token_ids[row]), "the newest token is its row's own"
                for column in range(num_blocks):
                    assert self.block_tables[row][column] == self.block_tables[first][column]
        assert all(decode_rows[index][1] == 0 for index, alone in enumerate(shares_with_none) if alone)

    def slot(self, row: int, position: int, group: int = 0) -> tuple[int, int]:
        block_id = self.block_tables[row + group * self.num_rows][position // self.block_size]
        assert block_id != 0 or not any(self.windows), "the page that nobody is given"
        return block_id, position % self.block_size


def fingerprints(token_ids: Iterable[int], identity: Hashable = None) -> list[int]:
    """One number for each prefix of `token_ids`, that of its whole text."""
    empty = EMPTY_TEXT if identity is None else hash(identity)
    return list(accumulate(token_ids, lambda text, token_id: hash((text, token_id)), initial=empty))[1:]


def next_token(token_ids: list[int], vocab_size: int, identity: Hashable = None) -> int:
    """The fake model: any token of the text changes what comes next."""
    return fingerprints(token_ids, identity)[-1] % vocab_size


def completion_alone(seq: Sequence, scheduler: Scheduler, vocab_size: int) -> tuple[list[int], str]:
    """What `seq` must generate, and why it ends: worked out with no cache, no batch and no scheduler."""
    token_ids = list(seq.prompt_token_ids)
    params = seq.sampling_params
    if seq.stopping.ends_with_prompt:
        return [], "length"
    while True:
        token_ids.append(next_token(token_ids, vocab_size, seq.identity))
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
    if scheduler.block_manager.state_group is None:
        cut = [chunk for chunk in batch.prefill if not chunk.samples and chunk.seq not in batch.pooled]
        assert len(cut) <= 1, "one chunk may be cut, the last that was scheduled"
    if batch.decode:
        assert all(seq.num_tokens <= seq.stopping.max_num_tokens for seq in batch.decode), "longer than it may be"
        left_out = [seq for seq in scheduler.running if seq not in batch.decode]
        assert all(in_flight and seq.num_tokens == seq.stopping.max_num_tokens for seq in left_out), (
            "its last token is in flight"
        )
        sharing = batch.decode[: sum(sharers.num_rows for sharers in batch.prefix_sharers)]
        others = [seq for seq in scheduler.running if seq not in left_out and seq not in sharing]
        # Rows of several tokens share in smaller sets, which may leave some rows out.
        assert batch.num_tokens > 1 or batch.decode == sharing + others, "only sharers leave their order"
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
        assert not manager.holds(seq)
        assert (seq.row, seq.block_table, seq.num_computed_tokens, seq.num_pending_tokens) == (None, [], 0, 0)
    running = {seq for seq in seqs if seq.status is SequenceStatus.RUNNING}
    ending = running - {*scheduler.running}
    assert {*scheduler.running} <= running
    for seq in ending:  # a later step has its row, and what is pooled has given up its blocks too
        if seq.stopping.ends_with_prompt:
            assert (seq.row, seq.block_table, seq.num_pending_tokens) == (None, [], 0)
            continue
        assert (seq.row, seq.num_tokens, seq.num_pending_tokens) == (None, seq.stopping.max_num_tokens, 1)
    for priority in {seq.priority for seq in waiting} & {seq.priority for seq in scheduler.running}:
        running_ids = [seq.seq_id for seq in scheduler.running if seq.priority == priority]
        waiting_ids = [seq.seq_id for seq in waiting if seq.priority == priority and seq.seq_id not in overtaken]
        assert max(running_ids) < min(waiting_ids, default=max(running_ids) + 1), "not FIFO"

    assert {seq for seq in seqs if seq.status is SequenceStatus.PAUSED} == {*scheduler.paused}
    assert all(seq.num_pending_tokens == 0 for seq in scheduler.paused)
    assert all((seq.row is None) != manager.holds(seq) for seq in scheduler.paused)
    holding = scheduler.running + [seq for seq in scheduler.paused if seq.row is not None]
    rows = {seq.row for seq in holding}
    assert len(rows) == len(holding), "a row has two sequences"
    assert rows <= set(range(scheduler.max_num_seqs))
    holding += [seq for seq in ending if not seq.stopping.ends_with_prompt]

    tables = manager.attention
    users = defaultdict(list)
    for seq in holding:
        assert manager.holds(seq)
        for group in tables:
            held = group.held[seq]
            num_blocks, rest = divmod(len(held.pages), group.num_tables)
            assert (held.first + num_blocks) * manager.block_size >= seq.num_computed_tokens
            assert rest == 0
            for index, block_id in enumerate(held.pages, held.first * group.num_tables):
                block, table = divmod(index, group.num_tables)
                text = seq.identity, seq.token_ids[: (block + 1) * manager.block_size]
                users[block_id].append((group.index, table, block, *text))
            if not isinstance(group, SlidingWindowGroup):
                assert held.pages[:: group.num_tables] == seq.block_table
    for group in tables:
        assert {*group.held} == {*holding}
        for held in group.held.values():
            assert len(held.pages) <= group.max_pages(scheduler.max_model_len), (
                "it holds blocks that its window has left"
            )
    for texts in users.values():
        assert all(text == texts[0] for text in texts), "a block is shared by different texts"
    assert manager.num_used_blocks == len(users.keys() | {copy.source for copy in copies})
    assert manager.num_free_blocks + manager.num_used_blocks == manager.num_blocks
    check_entries(manager)
    if group := manager.state_group:
        check_snapshots(group, seqs)


def check_entries(manager: BlockManager) -> None:
    """Pages and entries name each other; entries that nothing hangs on are gone; copies are made from whole entries."""
    pool = manager.pool
    entries = pool._entries.values()
    owners = {block_id: entry for entry in entries for column in entry.columns for block_id in column or ()}
    assert owners == {block.block_id: block.entry for block in pool.blocks if block.entry is not None}
    assert pool._full == {entry.hash: entry for entry in entries if entry.hash is not None}
    listed = [entry for items in pool.copies._new.values() for _, _, entry in items]
    listed += [entry for items in pool.copies._siblings.values() for _, _, entry in items]
    assert {*listed} == {entry for entry in entries if None not in entry.columns}
    if not pool.counts_uses:
        assert all(entry.columns[0] is not None for entry in entries)
        return
    uses = Counter(entry.parent for entry in entries)
    uses.update(entry.serial for entry in entries for column in entry.columns if column is not None)
    uses.update(serial for seq in manager._holding for serial in seq.prefix_serials)
    if group := manager.state_group:
        uses.update(snapshot.parent for snapshot in group.snapshots._kept)
    assert all(0 < entry.num_uses == uses[entry.serial] for entry in entries)


def check_snapshots(group: StateGroup, seqs: list[Sequence]) -> None:
    """Every place has one snapshot, kept or planned, or is free; what waits is known, and nothing else."""
    snapshots = group.snapshots
    planned = [snapshot for plan in group.plans.values() for snapshot in plan]
    places = [snapshot.place for snapshot in [*planned, *snapshots._kept]] + snapshots._free
    assert len({*places}) == len(places) == snapshots.num_places
    holding = {seq for seq in seqs if seq.row is not None}
    assert {*group.plans} <= holding, "a sequence without a row is to leave states"
    found = [snapshot for children in snapshots._children.values() for snapshot in children.values()]
    assert {*found} == {*snapshots._kept}
    awaited = [snapshot for by_text in snapshots._awaited.values() for snapshot in by_text.values()]
    assert {*awaited} <= {*planned, *snapshots._new}
    for identity in {seq.identity for seq in seqs}:
        waiting = [seq for seq in seqs if seq.status is SequenceStatus.WAITING and seq.identity == identity]
        assert group.queued[identity]._sorted() == sorted(seq.token_ids for seq in waiting)


def check_cache_contents(manager: BlockManager, device: FakeDevice, seqs: list[Sequence]) -> None:
    """Whatever a lookup of one of these sequences finds holds just that sequence's text on the device."""
    size, tables = manager.block_size, manager.attention
    for seq in seqs:
        hit, texts = manager.find_cached_prefix(seq), fingerprints(seq.token_ids, seq.identity)
        num_full = len(hit.entries) * size
        for index, entry in enumerate([*hit.entries, *([hit.source] if hit.source else [])]):
            expected = texts[
                index * size : (index + 1) * size if index < len(hit.entries) else num_full + hit.num_copied
            ]
            for table, block_id in pages_of(tables, entry):
                held = [device.slots.get((block_id, offset)) for offset in range(len(expected))]
                assert held == [text + table for text in expected], (
                    f"{block_id} is cached under a text it does not hold"
                )
        group = manager.state_group
        if group and hit.snapshot and all(copy.target != hit.snapshot.place for copy in group.snapshots._to_keep):
            assert device.states[hit.snapshot.place] == texts[num_full + hit.num_copied - 1]


def pages_of(tables: list[AttentionGroup], entry: CacheEntry) -> Iterable[tuple[int, int]]:
    """The pages of an entry, each with the number of its table."""
    first_table = 0
    for group in tables:
        yield from enumerate(entry.columns[group.index] or (), first_table)
        first_table += group.num_tables
