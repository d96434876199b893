"""Computes the attention calls of a model of transformers, each over its part of the paged cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.image_attention import attend_to_whole_images
from nanoinfer.layers.attention.metadata import PrefillMetadata
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.transformers.attention_interface import AttentionHandler
from nanoinfer.models.transformers.probe import AttentionCall
from nanoinfer.models.transformers.transformers_config import TransformersConfig

# (query, key, value, sinks) -> the heads' outputs, each (num_tokens, heads, size).
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class CachedAttention:
    """Computes one attention call of each step, over the paged cache.

    place: its part of the cache, to whose heads and sizes, those of `backend.spec`, the call's own are filled up.
    """

    def __init__(self, call: AttentionCall, place: LayerPlace, backend: AttentionBackend) -> None:
        self._place, self._backend, self._value_dim = place, backend, call.value_dim
        self._num_kv_heads, self._head_dim = backend.spec.num_kv_heads, backend.spec.head_dim
        self._has_window = call.sight.window is not None

    def __call__(self, step: ForwardStep, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the heads' outputs (num_tokens, num_heads, the values' size). q, k, v: (num_tokens, heads, size)."""
        q, k, v = (self._padded(x) for x in (query, key, value))
        if k.shape[1] != self._num_kv_heads:
            k, v = (x.repeat_interleave(self._num_kv_heads // x.shape[1], dim=1) for x in (k, v))
        q, k = q.to(v.dtype).contiguous(), k.to(v.dtype)
        cache, metadata = step.kv_cache.layer(self._place), step.metadata[self._place.table]
        self._backend.store(k, v, cache, metadata)
        sinks = None if sinks is None else sinks.flatten().to(q.dtype)
        if isinstance(metadata, PrefillMetadata):
            heads = self._backend.prefill(q, k, v, cache, metadata, sinks)
            if step.images is not None and (whole := step.images.whole_in(self._has_window)):
                attend_to_whole_images(heads, q, cache, metadata, self._backend.spec, whole)
        else:
            heads = self._backend.decode(q, cache, metadata, sinks)
        return heads[:, :, : self._value_dim]

    def _padded(self, x: Tensor) -> Tensor:
        missing = self._head_dim - x.shape[2]
        return F.pad(x, (0, missing)) if missing else x


def attend_in_order(attentions: Sequence[CachedAttention], step: ForwardStep) -> Attend:
    """Return a function that computes the attention calls of one step, in order."""
    calls = iter(attentions)
    return lambda *tensors: next(calls)(step, *tensors)


def by_tokens(attend: Attend) -> AttentionHandler:
    """Return what handles the calls of models by `attend`. Each call is of one text, without a mask."""

    def handle(
        _module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        assert mask is None, "a mask was made, though none was asked for"
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, options.get("s_aux"))[None]

    return handle


def cached_attentions(
    config: TransformersConfig, max_positions: int, backends: AttentionBackends
) -> list[CachedAttention]:
    """Return the attentions that compute the calls of a step, in order. max_positions: the longest sequence."""
    windows, places = config.windows_within(max_positions), backends.places
    attentions = []
    for call, window, place in zip(config.calls, windows, places, strict=True):
        chunk = call.sight.chunk
        spec = AttentionSpec(
            num_heads=call.num_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=call.scale,
            window=window,
            has_sinks=call.has_sinks,
            causal=call.sight.causal,
            soft_cap=call.soft_cap,
            chunk=chunk if chunk is not None and chunk < max_positions else None,
        )
        attentions.append(CachedAttention(call, place, backends.for_layer(spec, place)))
    return attentions
