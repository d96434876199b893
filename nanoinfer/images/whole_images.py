"""Keeps images whole in chunks and prefix hits, for models in which an image's tokens attend to all of the image."""

from typing import Any

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.cache_group import Hit
from nanoinfer.engine.sequence import Sequence
from nanoinfer.images.virtual_ids import VirtualIds


class WholeImages(BlockManager):
    """Manages blocks so that no chunk and no hit ends within an image. virtual_ids: knows the images."""

    def __init__(self, virtual_ids: VirtualIds, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.state_group is None, "snapshots of recurrent states are kept within images"
        self._virtual_ids = virtual_ids

    def find_cached_prefix(self, seq: Sequence) -> Hit:
        hit = super().find_cached_prefix(seq)
        end = len(hit.entries) * self.block_size + hit.num_copied
        while (cut := self._cut_image(seq, end)) is not None:
            # The tokens between the last whole block and the image are computed again.
            del hit.entries[cut.start // self.block_size :]
            hit.source, hit.num_copied, hit.num_later = None, 0, 0
            while self._trimming and any(group.trim(seq, hit) for group in self._trimming):
                pass
            hit.pages = [group.needed_pages(hit.entries) for group in self.attention]
            end = len(hit.entries) * self.block_size
        return hit

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return an end that cuts no image: before the image, or after it if the chunk begins with the image.

        A chunk that ends after an image may exceed the step's budget, by less than an image.
        """
        end = super().chunk_end(seq, end)
        cut = self._cut_image(seq, end)
        if cut is None:
            return end
        return cut.start if cut.start > seq.num_computed_tokens else cut.stop

    def make_room(self, seqs: list[Sequence], num_tokens: int = 1) -> bool:
        starts = [seq.num_computed_tokens for seq in seqs]
        longest = [self.chunk_end(seq, start + num_tokens) - start for seq, start in zip(seqs, starts, strict=True)]
        return super().make_room(seqs, max([num_tokens, *longest]))

    def _cut_image(self, seq: Sequence, end: int) -> range | None:
        """Return the tokens of the image that a cut before token `end` of a sequence would divide, or None."""
        token_ids = seq.token_ids
        if not 0 < end < len(token_ids) or (image := self._virtual_ids.at(token_ids[end])) is None:
            return None
        start = end - (token_ids[end] - image.first_id)
        return range(start, start + len(image.token_ids)) if start < end else None
