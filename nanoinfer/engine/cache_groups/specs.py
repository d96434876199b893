"""Records what the layers of a model remember of a sequence: all that the scheduler needs in order to plan.

A cache group is a set of layers that remember the same tokens. `KVCacheLayout` in `caches/` says which layers these
are, and where their tensors lie on the device. Each group has one of the records here, which travel in
`RunnerLimits.cache_specs`. From each record the block manager makes the object that gives out the group's pages or
states (`AttentionGroup`, `StateGroup`). The block tables of a row belong to the groups in this order: those of the
first group come first.
"""

from dataclasses import dataclass

from nanoinfer.integers import ceil_div


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Describes keys and values of all tokens. A model has one such group at most, and it is the first.

    What needs the blocks of all tokens, such as the shared prefixes of decode rows, goes by its first table.
    """

    num_tables: int = 1
    window: None = None

    def max_pages(self, num_tokens: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return how many pages a sequence of so many tokens holds at most, if its chunks have no more than that."""
        return self.num_tables * ceil_div(num_tokens, block_size)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Describes keys and values of the last tokens.

    Where more layers have this window than a page holds, they have several tables.
    All tables of the group hold blocks of the same tokens. In a model with such a group, nobody is given page 0 of the
    pool: entries of tables point to it where a window has left their blocks.
    """

    window: int  # tokens that a token attends to, itself included
    num_tables: int = 1

    def max_pages(self, num_tokens: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return how many pages a sequence of so many tokens holds at most, if its chunks have no more than that."""
        within_window = self.max_pages_of_window(block_size, max_chunk_tokens)
        return min(self.num_tables * ceil_div(num_tokens, block_size), within_window)

    def max_pages_of_window(self, block_size: int, max_chunk_tokens: int) -> int:
        """Return how many pages a sequence of any length holds at most."""
        num_tokens = self.window - 1 + max_chunk_tokens  # of a chunk, and those that its first token attends to
        return self.num_tables * (ceil_div(num_tokens, block_size) + 1)  # 1: they may begin and end within blocks


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """Describes recurrent states: of fixed size, found by the row of a sequence, without a block table."""

    num_snapshots: int  # states that can be kept for prefix hits; 0 where prefixes are not cached
    num_tables: int = 0
    window: None = None


CacheGroupSpec = FullAttentionSpec | SlidingWindowSpec | RecurrentStateSpec


def num_tables(groups: tuple[CacheGroupSpec, ...]) -> int:
    """Return how many block tables a row has."""
    return sum(group.num_tables for group in groups)


def num_snapshots(groups: tuple[CacheGroupSpec, ...]) -> int:
    """Return how many recurrent states can be kept for prefix hits."""
    return sum(group.num_snapshots for group in groups if isinstance(group, RecurrentStateSpec))
