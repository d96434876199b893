"""Says what the layers of a model remember of a sequence, in the numbers that plan by it.

A cache group is a set of layers that remember the same tokens. `CacheGroups` in `caches/` says which layers these are,
and where their tensors lie on the device. `RunnerLimits.cache_specs` has one record of each group, and of each record
the block manager makes what keeps its pages or states (`AttentionGroup`, `StateGroup`). The block tables of a row
belong to the groups in this order: those of the first group come first.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of all tokens. A model has one such group at most, and it is the first.

    What needs the blocks of all tokens, such as the shared prefixes of decode rows, goes by its first table.
    """

    num_tables: int = 1
    window: None = None


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Keys and values of the last tokens. Where more layers have this window than a page holds, they have more tables.

    All tables of the group hold blocks of the same tokens. In a model with such a group, nobody is given page 0 of the
    pool: entries of tables point to it where a window has left their blocks.
    """

    window: int  # tokens that a token attends to, itself included
    num_tables: int = 1


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """A state of fixed size, found by the row of a sequence. It has no block table."""

    num_snapshots: int  # states that can be kept for prefix hits; 0 where prefixes are not cached
    num_tables: int = 0


CacheGroupSpec = FullAttentionSpec | SlidingWindowSpec | RecurrentStateSpec


def num_tables(groups: tuple[CacheGroupSpec, ...]) -> int:
    """Return how many block tables a row has."""
    return sum(group.num_tables for group in groups)


def num_snapshots(groups: tuple[CacheGroupSpec, ...]) -> int:
    """Return how many recurrent states can be kept for prefix hits."""
    return sum(group.num_snapshots for group in groups if isinstance(group, RecurrentStateSpec))
