"""Attention of images whose tokens see all of their own image, beside what a causal model sees (Gemma 3).

Backends know causal attention alone. So the few tokens of images are computed again here, in plain PyTorch.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.metadata import PrefillMetadata
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.prefill_attention.spec import gather_context


class SeenImage(NamedTuple):
    """Names an image whose tokens a step computes, all of them.

    chunk: which of the step's chunks. place: of its first token in the step. start: the same in its sequence.
    """

    chunk: int
    place: int
    start: int
    num_tokens: int


def attend_to_whole_images(
    heads: Tensor,
    q: Tensor,
    cache: LayerCache,
    metadata: PrefillMetadata,
    spec: AttentionSpec,
    images: Iterable[SeenImage],
) -> None:
    """Put into `heads` what tokens of images see: all of their image, and what is before them, within the window.

    heads, q: (num_tokens, num_heads, head_dim). The step's keys and values are in the cache.
    """
    assert spec.soft_cap is None, "images are not computed with soft caps"
    assert not spec.has_sinks, "images are not computed with sinks"
    for image in images:
        end = image.start + image.num_tokens
        k, v = gather_context(cache, metadata.block_tables[image.chunk], end, q.dtype)
        queries = slice(image.place, image.place + image.num_tokens)
        mask = None
        if spec.window is not None:
            places = torch.arange(end, device=q.device)
            mask = places > places[image.start :, None] - spec.window
        q_of_image, k, v = (x.transpose(0, 1)[None] for x in (q[queries], k, v))  # (1, heads, tokens, head_dim)
        seen = F.scaled_dot_product_attention(q_of_image, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True)
        heads[queries] = seen[0].transpose(0, 1)
