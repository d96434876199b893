"""How the scheduler runs prompts that are pooled, beside those that generate. No model and no device."""

from nanoinfer.engine.hidden_states_request import ChunkStates, HiddenStatesRequest
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from tests.engine.helpers import FakeDevice, make_scheduler, make_sequence


def pooled(seq_id: int, prompt: list[int]) -> Sequence:
    seq = make_sequence(seq_id, prompt)
    seq.hidden_states_request = HiddenStatesRequest(pools=True, first=len(prompt) - 1)
    return seq


def scheduler_of(*seqs: Sequence, whole_prompts: bool = False, **options: int) -> Scheduler:
    scheduler = make_scheduler(**options)
    scheduler.whole_prompts = whole_prompts
    for seq in seqs:
        scheduler.add(seq)
    return scheduler


def test_chunks_that_sample_come_before_those_that_are_pooled() -> None:
    seqs = pooled(0, [1, 2, 3]), make_sequence(1, [4, 5]), pooled(2, [6])
    scheduler, device = scheduler_of(*seqs), FakeDevice(4, 10)
    batch = scheduler.schedule()
    assert [chunk.seq.seq_id for chunk in batch.prefill] == [1, 0, 2]
    assert [seq.seq_id for seq in batch.sampled] == [1]
    assert [seq.seq_id for seq in batch.pooled] == [0, 2]
    finished = scheduler.update(batch, device.run(batch))
    assert [seq.seq_id for seq in finished] == [0, 2]
    assert [seq.seq_id for seq in scheduler.schedule().decode] == [1]


def test_the_next_step_has_the_rows_and_blocks_of_what_the_step_in_flight_completes() -> None:
    """Two rows and two blocks serve two prompts a step, without waiting for any of them."""
    seqs = [pooled(index, [index, 7, 8]) for index in range(6)]
    scheduler = scheduler_of(*seqs, max_num_seqs=2, num_blocks=2)
    batches = [scheduler.schedule(in_flight=index > 0) for index in range(3)]
    assert [[seq.seq_id for seq in batch.pooled] for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    for batch in batches:
        assert scheduler.update(batch, []) == batch.pooled
    assert all(seq.status is SequenceStatus.FINISHED for seq in seqs)
    scheduler.schedule()
    assert scheduler.is_finished()
    assert scheduler.block_manager.num_used_blocks == 0


def test_steps_that_fail_queue_their_prompts_again_and_leave_nothing_in_the_cache() -> None:
    seqs = [pooled(index, [1, 2, 3, 4, index]) for index in range(3)]
    scheduler = scheduler_of(*seqs, max_num_seqs=1)
    batches = [scheduler.schedule(), scheduler.schedule(in_flight=True)]
    scheduler.discard(batches)
    assert scheduler.num_waiting == 3
    assert scheduler.block_manager.num_cached_blocks == 0
    device, done = FakeDevice(4, 10), []
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        done += scheduler.update(batch, device.run(batch))  # which notices what reads another text
    assert [seq.seq_id for seq in done] == [0, 1, 2]


def test_whole_prompts_are_never_cut() -> None:
    seqs = [pooled(index, [1] * length) for index, length in enumerate((7, 5, 4, 10))]
    scheduler = scheduler_of(*seqs, whole_prompts=True, max_num_batched_tokens=10)
    scheduler.block_manager.enable_prefix_caching = False
    lengths = []
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        lengths.append([chunk.length for chunk in batch.prefill])
        scheduler.update(batch, [])
    assert [found for found in lengths if found] == [[7], [5, 4], [10]]


def test_parts_that_are_computed_again_in_other_chunks_take_the_place_of_the_first_ones() -> None:
    states = HiddenStatesRequest(pools=False, first=0, layers=(1,))
    for start, values in ((0, "abc"), (3, "de"), (0, "ab"), (2, "cde")):
        states.add(ChunkStates(0, 1, start, values))
    assert "".join(states.parts(1)) == "abcde"
