"""Groups the layers of models that have layers with a window beside others, by what they remember of a sequence.

Layers of a group share a block table. All groups take their blocks from one pool of equal pages: a page holds the keys
and values of `block_size` tokens in as many layers as attend to all tokens. These are the first group; those with a
window make up the others, and the last group may leave a part of its pages empty. So a layer's part of the pool is as
it would be without groups, and kernels know nothing of them.
"""

from typing import NamedTuple

from nanoinfer.checkpoint.base_config import BaseModelConfig

MAX_GROUPS = 9  # more tables take each step too long
MAX_EMPTY_SHARE = 0.15  # of the memory that a token takes while it is within the window


class LayerPlace(NamedTuple):
    """Which group a layer is in, and which of a page's layers it is."""

    group: int
    layer: int


class KVCacheGroups(NamedTuple):
    """How the layers with attention share the pool.

    window: the window of all groups but the first; None if there is only one group. num_groups: how many groups, the
    first included. layers_per_page: how many layers a group has. places: the place of each layer with attention.
    """

    window: int | None
    num_groups: int
    layers_per_page: int
    places: tuple[LayerPlace, ...]

    @classmethod
    def of(cls, config: BaseModelConfig, max_positions: int) -> "KVCacheGroups":
        """Return the groups of a model whose sequences have so many tokens at most; one group where more do not pay."""
        windows = [
            window for index, window in enumerate(config.windows_within(max_positions)) if not config.is_linear(index)
        ]
        num_layers, num_full = len(windows), windows.count(None)
        num_windowed = num_layers - num_full
        alone = cls(None, 1, config.num_attention_layers, tuple(LayerPlace(0, index) for index in range(num_layers)))
        if not 0 < num_full <= num_windowed or len({*windows}) > 2 or config.linear_attention is not None:
            return alone
        num_groups = 1 + -(-num_windowed // num_full)
        if num_groups > MAX_GROUPS or num_groups * num_full - num_layers > MAX_EMPTY_SHARE * num_layers:
            return alone
        places, counts = [], {True: 0, False: 0}
        for window in windows:
            group, index = divmod(counts[window is None], num_full)
            places.append(LayerPlace(group + (window is not None), index))
            counts[window is None] += 1
        [size] = {*windows} - {None}
        return cls(size, num_groups, num_full, tuple(places))

    def num_pages_of(self, num_blocks: int) -> int:
        """Return how many pages have the bytes of so many blocks of all layers, and hold as many tokens at least.

        Where there are several groups, one page more is nobody's.
        """
        return num_blocks * self.num_groups + (self.num_groups > 1)

    def num_pages(self, num_tokens: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return how many pages a sequence of so many tokens takes at most, if its chunks have no more than that."""
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        within = -(-(self.window - 1 + max_chunk_tokens) // block_size) + 1
        return num_blocks + (self.num_groups - 1) * min(num_blocks, within)

    def max_tokens(self, num_pages: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return the longest sequence that a pool of so many pages holds, a multiple of the block size."""
        num_pages -= self.num_groups > 1
        least, most = 0, num_pages  # in blocks
        while least < most:
            middle = (least + most + 1) // 2
            fits = self.num_pages(middle * block_size, block_size, max_chunk_tokens) <= num_pages
            least, most = (middle, most) if fits else (least, middle - 1)
        return least * block_size

    def describe(self, num_pages: int, block_size: int, max_chunk_tokens: int) -> str:
        """Say what a page holds where that is not a part of all layers, and how far the pages go."""
        if self.window is None:
            return ""
        within = (self.num_groups - 1) * -(-self.window // block_size)
        return (
            f"of {self.layers_per_page} layers (one sequence of up to "
            f"{self.max_tokens(num_pages, block_size, max_chunk_tokens)} tokens, or the windows of "
            f"{num_pages // within} sequences, {self.window} tokens each) "
        )
