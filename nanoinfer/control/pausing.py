"""Pauses and resumes sequences: what users ask for by `LLM.pause` and `LLM.resume`, between two steps.

A paused sequence that was running keeps its row and its blocks, so that resuming it costs nothing. `Scheduler.reclaim`
takes both where others need them; the sequence is then computed again when it is resumed, as after a preemption. One
that was waiting leaves the queue, and comes back to its old place.
"""

from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import SequenceStatus


def pause(scheduler: Scheduler, seq_ids: set[int]) -> None:
    """Let these sequences compute nothing until they are resumed. No step may be in flight."""
    running = [seq for seq in scheduler.running if seq.seq_id in seq_ids]
    scheduler.running = [seq for seq in scheduler.running if seq.seq_id not in seq_ids]
    newly = running + scheduler.withdraw(seq_ids)  # those that are paused already come back
    for seq in newly:
        assert seq.num_pending_tokens == 0, f"sequence {seq.seq_id} is paused while a step computes its next token"
        seq.status = SequenceStatus.PAUSED
    scheduler.paused = scheduler.paused + newly
    scheduler.block_manager.num_frees += 1  # a prompt that did not fit may fit now


def resume(scheduler: Scheduler, seq_ids: set[int]) -> None:
    """Let paused sequences go on: at once where they hold a row and blocks, and from the queue where they do not."""
    for seq in scheduler.withdraw(seq_ids):  # those that wait and were not paused come back
        if seq.row is None:
            seq.status = SequenceStatus.WAITING
            scheduler.add(seq)
        else:
            seq.status = SequenceStatus.RUNNING
            scheduler.running.append(seq)
    scheduler.shared_prefixes.forget()
