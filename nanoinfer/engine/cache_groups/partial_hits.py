"""Finds cached blocks that begin like a prompt's next block, so that prefix hits end at a token and not at a block.

Prompts part anywhere. Where one parts from a cached text within a block, the tokens before that are copied from the
cached block to one of its own (copy on write), and only the rest is computed. So a cached prefix is found whole, as in
a radix tree over tokens (RadixAttention, Zheng et al. 2024), and blocks can still be large.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from nanoinfer.engine.sequence import Sequence

MIN_COPIED_TOKENS = 8  # so prompts that have nothing but their first token in common copy nothing
# A prompt waits one step if it then finds MIN_AWAITED_TOKENS more tokens in the cache. If the step has room left, the
# waiting prompts must save MIN_AWAITED_IN_ALL tokens together: about what a step costs beyond its tokens.
MIN_AWAITED_TOKENS = 32
MIN_AWAITED_IN_ALL = 1024
MAX_PASSED_OVER = 256  # in a step, since each is looked up


Column = tuple[int, ...]  # the pages of a block of text, one in each table of a group
Columns = tuple[Column | None, ...]  # by group with block tables; None where a group has lost its pages
Parent = int | tuple[Hashable]  # what a block comes after: the serial number of an entry, or `Sequence.prefix_root`


@dataclass(slots=True, eq=False)
class CacheEntry:
    """Holds the pages of one block of tokens in the prefix cache, and what verifies that a prompt has these tokens.

    hash: None if the block is not full: then it can be copied from, and not be shared. tokens: ids as int32, block_size
    of them if it is full.
    """

    serial: int
    parent: Parent
    columns: Columns
    hash: int | None = None
    tokens: bytes = b""
    copyable: bytes = b""  # the first of these tokens, which steps before this one have computed
    num_uses: int = 0  # what hangs on it, where that decides how long it lives

    @property
    def pages(self) -> list[int]:
        """All pages of its columns."""
        return [page for column in self.columns if column for page in column]


Buffer = bytes | memoryview  # of token ids as int32
Siblings = list[tuple[bytes, int, CacheEntry]]  # entries after their tokens and serials, sorted


class PartialHits:
    """Finds entries of the prefix cache by their parent, in the order of their tokens.

    What a step computes can be copied by later steps only: a copy is made before the step's own keys and values are
    written. So tokens are found from the next `start_step` on.

    min_tokens: what has fewer tokens in common is no hit.
    """

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens
        self._siblings: dict[Parent, Siblings] = {}
        self._new: defaultdict[Parent, Siblings] = defaultdict(list)  # entries of the current step

    def start_step(self) -> None:
        for parent, items in self._new.items():
            for tokens, _, entry in items:
                if entry.copyable:
                    _remove(self._siblings, entry, entry.copyable)
                entry.copyable = tokens
            siblings = self._siblings.setdefault(parent, items)
            if siblings is not items:
                for item in items:
                    insort(siblings, item)
        self._new.clear()

    def add(self, entry: CacheEntry) -> None:
        """Let later steps copy the tokens of an entry."""
        if entry.tokens != entry.copyable:
            insort(self._new[entry.parent], (entry.tokens, entry.serial, entry))

    def remove_new(self, entry: CacheEntry) -> None:
        """Forget what the current step computes of an entry."""
        if entry.tokens != entry.copyable:
            _remove(self._new, entry, entry.tokens)

    def remove(self, entry: CacheEntry) -> None:
        self.remove_new(entry)
        if entry.copyable:
            _remove(self._siblings, entry, entry.copyable)
            entry.copyable = b""

    def find(self, parent: Parent, tokens: bytes) -> tuple[CacheEntry | None, int]:
        """Return the entry after this parent that begins with the most of `tokens` (ids as int32), and how many.

        The entry is None if these are too few to be copied.
        """
        entry, num_tokens = _longest(self._siblings.get(parent), tokens)
        return entry if num_tokens >= self.min_tokens else None, num_tokens

    def num_found_later(self, parent: Parent, tokens: bytes, num_found: int) -> int:
        """Return how many more of these tokens `find` finds from the next step on than now."""
        _, num_later = _longest(self._new.get(parent), tokens, above=num_found)
        return num_later - num_found


class PassedOver:
    """Collects the prompts that stay in the queue for a step, because the next one finds more of them in the cache.

    They begin like prompts that this very step computes, and part from them within a block. Others overtake them, but
    take neither the rows nor the blocks that they will need. max_prompts: how many may stay.
    """

    def __init__(self, max_prompts: int = MAX_PASSED_OVER) -> None:
        self.max_prompts = max_prompts
        self.seqs: list[Sequence] = []
        self.num_saved = 0  # tokens that the next step finds, of all of them together

    @property
    def is_full(self) -> bool:
        return len(self.seqs) >= self.max_prompts

    def add(self, seq: Sequence, num_saved: int) -> None:
        self.seqs.append(seq)
        self.num_saved += num_saved


def _remove(by_parent: dict[Parent, Siblings], entry: CacheEntry, tokens: bytes) -> None:
    """Take out an entry that lies there under these tokens, if it does."""
    siblings = by_parent.get(entry.parent)
    if siblings:
        item = tokens, entry.serial, entry
        index = bisect_left(siblings, item)
        if siblings[index : index + 1] == [item]:
            del siblings[index]
            if not siblings:
                del by_parent[entry.parent]


def _longest(siblings: Siblings | None, tokens: bytes, above: int = 0) -> tuple[CacheEntry | None, int]:
    """Return the entry that begins with the most of `tokens`, if more than `above`, and how many these are.

    In sorted order, it is next to where they belong.
    """
    found: tuple[CacheEntry | None, int] = None, above
    if siblings:
        index = bisect_left(siblings, (tokens,))
        for its_tokens, _, entry in siblings[max(0, index - 1) : index + 1]:
            least = 4 * (found[1] + 1)  # bytes
            # Most share no more than was found already: one comparison shows it, without a search.
            if len(tokens) >= least and its_tokens.startswith(tokens[:least]):
                found = entry, num_common(its_tokens, tokens)
    return found


def num_common(one: Buffer, other: Buffer) -> int:
    """Return how many token ids two texts have in common before they part."""
    if one[:4] != other[:4]:
        return 0  # nearly always
    one, other = bytes(one), bytes(other)  # bytes compare by memory, and are not copied here
    least, most = 0, min(len(one), len(other)) // 4
    if one[: 4 * most] == other[: 4 * most]:
        return most
    while least < most - 1:  # they agree before `least`, and part before `most`
        middle = (least + most) // 2
        if one[4 * least : 4 * middle] == other[4 * least : 4 * middle]:
            least = middle
        else:
            most = middle
    return least
