"""Decode rows of several tokens, as speculative decoding has them: the newest one, and tokens that a proposer expects.

A decode step computes the proposals after the newest token, and draws a token after each: with the noise of its own
position, so that it is the one that single steps would draw if the proposals before it are right. It counts if they are
what was drawn there. So the tokens are those of single steps, whoever proposes. A wrong proposal costs time and leaves
no trace: what it wrote lies behind the known tokens, and is written again.

A proposer has to know all tokens of a sequence, so a step with proposals waits until the step before it is collected.
The proposer says which steps are worth it; `nanoinfer/speculation` has the one that `speculative_config` asks for.
Proposals take blocks from nobody: where none is free, a row has fewer. Drawn tokens are collected in turns, as if a
step of its own had drawn each. So whatever ends a sequence, or is told of tokens, knows of single steps alone.
"""

import collections.abc as abc
from collections.abc import Iterator
from typing import Protocol

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.interfaces import row_sizes
from nanoinfer.engine.prefix_sharers import split_sharers
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.metrics import EngineMetrics
from nanoinfer.token_ids import NOT_COUNTED


class Proposer(Protocol):
    """Expects what sequences go on with."""

    max_num_tokens: int  # the most tokens that it proposes for a sequence: the engine's memory is sized by it

    def waits(self, seqs: list[Sequence]) -> bool:
        """Return whether the next decode step waits until the one in flight is collected, to have proposals.

        seqs: all that run. If the step in flight has proposals, the next one waits whatever is returned: this is the
        time for work that needs none of its tokens, since a device computes them meanwhile.
        """

    def propose(self, seqs: list[Sequence]) -> abc.Sequence[abc.Sequence[int]]:
        """Return the ids of the tokens that each sequence may go on with, maybe none; nothing if no sequence has any.

        It is asked in each decode step. All tokens are known, except where `waits` has just returned False: then
        nothing can be proposed.
        """


def add_proposals(
    batch: ScheduledBatch,
    seqs: list[Sequence],
    proposals: abc.Sequence[abc.Sequence[int]],
    max_row_tokens: int,
    manager: BlockManager,
    max_prefix_sharers: int,
) -> None:
    """Have the rows of a decode step compute what is proposed for them, as far as there is room for it.

    The step has been scheduled with one token a row. proposals: of each of seqs, all that decode. max_row_tokens: the
    most that the runner takes. max_prefix_sharers: the most rows of one token that read a shared prefix at once.
    """
    proposed = dict(zip(seqs, proposals, strict=True))
    most = max_row_tokens - 1
    batch.proposals = [
        _take(batch, seq, ids[:most], manager) if (ids := proposed[seq]) else ids for seq in batch.decode
    ]
    longest = 1 + max(map(len, batch.proposals), default=0)
    if longest > 1:
        batch.num_tokens = num_tokens = next(size for size in row_sizes(max_row_tokens) if size >= longest)
        batch.prefix_sharers = split_sharers(batch.prefix_sharers, max_prefix_sharers // num_tokens)


def _take(batch: ScheduledBatch, seq: Sequence, ids: abc.Sequence[int], manager: BlockManager) -> abc.Sequence[int]:
    """Have a row compute these ids, too, if they can count and have blocks; return those that it computes."""
    ids = ids[: seq.stopping.max_num_tokens - len(seq.token_ids) - 1]
    num_tokens = 1 + (len(ids) if seq.constraint is None else seq.constraint.num_allowed(ids))
    first = seq.num_computed_tokens = seq.num_computed_tokens - 1  # where the row's first token goes
    if first + num_tokens > seq.num_slots:
        if not manager.make_room([seq], num_tokens):
            num_tokens = seq.num_slots - first
        manager.extend(batch, [seq], num_tokens)  # also if there is no room: its window may have moved
    seq.num_computed_tokens = first + num_tokens
    return ids[: num_tokens - 1]


def drawn_in_turns(
    batch: ScheduledBatch,
    token_ids: list[int],
    stats: EngineMetrics,
    manager: BlockManager,
    watched: abc.Container[int] = (),
) -> Iterator[tuple[ScheduledBatch, list[int], list[bool]]]:
    """Yield the tokens that a step has drawn, one of each sequence at a time, as steps for `Scheduler.update`.

    Each comes with its token ids, and with which of all tokens of the step are in it and wanted: those of sequences
    that were still running. If rows have several tokens, all first ones come first, then those second ones that count,
    and so on. What has finished with a token gets none of the later ones. Most tokens end nothing, and nobody asks for
    them one by one. To save time, those of a row are appended here, all but the last one, which comes in the first
    turn.

    stats: where proposals are counted. watched: by seq_id, whose tokens somebody looks at one by one.
    """
    num_tokens = batch.num_tokens
    if num_tokens == 1:
        yield batch, token_ids, [seq.status is SequenceStatus.RUNNING for seq in batch.sampled]
        return
    seqs, ids, wanted = list[Sequence](), list[int](), [False] * len(token_ids)
    later = list[tuple[Sequence, int, list[int]]]()  # of which tokens are left, the first one's place, all that count
    places = range(0, len(token_ids), num_tokens)
    for place, seq, proposed in zip(places, batch.decode, batch.proposals, strict=True):
        token_id, num_known = token_ids[place], len(seq.token_ids)
        seq.num_computed_tokens, seq.num_pending_tokens = num_known, 0
        is_running = seq.status is SequenceStatus.RUNNING
        if proposed and token_ids[place + 1] != NOT_COUNTED:
            counted = token_ids[place : place + 1 + len(proposed)]
            if counted[-1] == NOT_COUNTED:
                del counted[counted.index(NOT_COUNTED) :]
            seq.num_computed_tokens += len(counted) - 1
            if is_running and seq.seq_id not in watched and _end_nothing(seq, counted[:-1], manager.block_size):
                token_id = counted.pop()
                seq.token_ids.extend(counted)
                wanted[place + 1 : place + 1 + len(counted)] = [True] * len(counted)
            elif is_running:
                later.append((seq, place, counted))
        if is_running:
            seq.num_pending_tokens = 1
            seqs.append(seq)
            ids.append(token_id)
            wanted[place] = True
    num_accepted = [sum(wanted[token::num_tokens]) for token in range(1, num_tokens)]
    yield ScheduledBatch(decode=seqs, sampled=seqs), ids, wanted
    for token in range(1, num_tokens):
        later = [one for one in later if token < len(one[2]) and one[0].status is SequenceStatus.RUNNING]
        if not later:
            break
        seqs, ids, wanted = [seq for seq, _, _ in later], [its[token] for _, _, its in later], [False] * len(token_ids)
        for seq, place, _ in later:
            seq.num_pending_tokens = 1
            wanted[place + token] = True
        num_accepted[token - 1] += len(seqs)
        yield ScheduledBatch(decode=seqs, sampled=seqs), ids, wanted
    stats.count_drafts([*map(len, batch.proposals)], num_accepted)


def _end_nothing(seq: Sequence, token_ids: list[int], block_size: int) -> bool:
    """Return whether these next tokens of a sequence, which are not its last ones, end neither it nor a block."""
    return (
        seq.constraint is None
        and seq.sampling_params.num_logprobs is None
        and -len(seq.token_ids) % block_size >= len(token_ids)
        and seq.stopping.tokens.ids.isdisjoint(token_ids)
    )
