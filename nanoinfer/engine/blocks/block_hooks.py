"""Hooks of the block manager for models whose layers keep recurrent states, or keys and values of a window alone.

The scheduler calls these hooks for every model, and they do nothing where all layers attend to all tokens.
"""

from nanoinfer.engine.blocks.state_snapshots import StateCopy
from nanoinfer.engine.scheduled_batch import NewBlock
from nanoinfer.engine.sequence import Sequence


class BlockHooks:
    """The hooks as `BlockManager` has them.

    `hybrid_blocks.py` overrides the hooks before `free_outside_window`, to keep recurrent states and find them again.
    `windowed_blocks.py` overrides the hooks from there on: its sequences take blocks and give them back while they run.
    Hybrid and windowed managers override these private methods of `BlockManager` too; keep the three files in step:
    `_find_partial_hit` and `_remove_entry` (both), `_take_block`, `_is_cached` and `_hold_source` (windowed).
    """

    @property
    def num_snapshots(self) -> int:
        """Recurrent states that are kept for prefix hits."""
        return 0

    @property
    def keeps_rows(self) -> bool:
        """Whether `cache_end` keeps what the row of a sequence holds."""
        return False

    def enqueue(self, seq: Sequence) -> None:
        """Note that a sequence waits for blocks."""

    def dequeue(self, seq: Sequence) -> None:
        """Note that a sequence waits no more."""

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk that could compute the tokens before `end` is to end."""
        return end

    def take_state_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Return the copies of recurrent states that the scheduled step begins with: to snapshots, then from them."""
        return [], []

    def free_outside_window(self, seq: Sequence) -> None:
        """Take back the blocks that no token after the computed ones attends to."""

    def num_blocks_for_chunk(self, seq: Sequence, end: int) -> int:
        """Return how many free blocks `take_chunk_blocks` would take."""
        return 0

    def take_chunk_blocks(self, seq: Sequence, end: int) -> list[NewBlock]:
        """Prepare for a chunk that ends before token `end`; return what the device has to know beside `block_table`."""
        return []

    def num_blocks_to_grow(self, seqs: list[Sequence]) -> int:
        """Return how many free blocks `grow` would take for these sequences. All of them need a block."""
        return len(seqs)

    def num_growing_tables(self, seq: Sequence) -> int:
        """Return how many blocks a sequence takes for a block of tokens."""
        return 1
