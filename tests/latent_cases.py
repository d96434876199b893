"""Random steps of latent attention, for its kernels in the interpreter and on a GPU, against plain PyTorch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanoinfer.caches.block_layout import LatentLayout
from nanoinfer.checkpoint.base_config import LatentAttentionConfig
from nanoinfer.layers.attention.latent import LatentAttentionSpec, TorchLatentBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata, SharedPrefixes, cumulative_lens
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.latent_attention.spec import gather_latents
from nanoinfer.ops.prefill_attention.spec import causal_attention

SIZES = LatentAttentionConfig(None, latent_size=24, rotary_size=8, plain_size=12, value_size=20, is_interleaved=False)
FLASH = LatentAttentionConfig(768, latent_size=512, rotary_size=64, plain_size=192, value_size=256, is_interleaved=True)
BLOCK_SIZE = 16
# By name: heads, lengths of contexts, tokens of a row.
DECODES: dict[str, tuple[int, tuple[int, ...], int]] = {
    "one head": (1, (1, 16, 17, 40), 1),
    "16 heads, rows without context": (16, (0, 33, 0, 5, 90), 1),
    "20 heads": (20, (70, 1, 47), 1),
    "64 heads": (64, (20, 35), 1),
    "128 heads, in two parts": (128, (20, 35), 1),
    "3 tokens of 20 heads": (20, (5, 16, 0, 40), 3),
    "4 tokens of 20 heads, in two parts": (20, (13, 31), 4),
}
# Heads, and the tokens that each chunk computes and attends to.
PREFILLS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "whole prompts": (3, (1, 16, 17, 70), (1, 16, 17, 70)),
    "chunks and whole prompts": (3, (1, 16, 20), (40, 16, 53)),
    "chunks of 20 heads": (20, (1, 7, 30), (33, 40, 30)),
    "chunks of 128 heads": (128, (3,), (20,)),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class LatentStep:
    """A step over a cache of random vectors, which are NaN beyond the contexts."""

    spec: LatentAttentionSpec
    cache: LayerCache
    metadata: Any
    absorbed: Tensor
    rotated: Tensor

    def to(self, device: str, dtype: torch.dtype) -> "LatentStep":
        layout = LatentLayout(((1, self.cache.k.shape[3]),), self.spec.sizes.latent_size)
        moved = {name: value.to(device) for name, value in tensors_of(self.metadata).items()}
        shared = getattr(self.metadata, "shared_prefixes", None)
        if shared is not None:
            moved["shared_prefixes"] = SharedPrefixes(*(x.to(device) for x in shared))
        return replace(
            self,
            cache=layout.layer_cache(self.cache.k.to(device, dtype)),
            metadata=replace(self.metadata, **moved),
            absorbed=self.absorbed.to(device, dtype),
            rotated=self.rotated.to(device, dtype),
        )

    def run(self, backend: Any) -> Tensor:
        metadata = backend.plan(self.metadata, self.cache)
        return backend.attend_to_latents(self.absorbed, self.rotated, self.cache, metadata)

    def specification(self) -> Tensor:
        """What plain PyTorch makes of the same numbers, in float32."""
        step = self.to("cpu", torch.float32)
        if isinstance(step.metadata, DecodeMetadata):
            return step.run(TorchLatentBackend(step.spec))
        parts, q = [], torch.cat((step.absorbed, step.rotated), dim=2).split(step.metadata.query_lens)
        for row, length in enumerate(step.metadata.context_lens):
            vectors = gather_latents(step.cache, step.metadata.block_tables[row], length).unsqueeze(1)
            parts.append(
                causal_attention(q[row], vectors, vectors[..., : step.spec.sizes.latent_size], step.spec.scale)
            )
        return torch.cat(parts)


def tensors_of(record: Any) -> dict[str, Tensor]:
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def random_cache(
    sizes: LatentAttentionConfig, lens: tuple[int, ...], num_shared: int = 0, block_size: int = BLOCK_SIZE
) -> tuple[LayerCache, Tensor]:
    """Return a cache and block tables in random order. num_shared: blocks that all rows begin with."""
    num_blocks = [max(1, -(-length // block_size)) for length in lens]
    order = (torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    tables = torch.full((len(lens), max(num_blocks)), -1, dtype=torch.int32)
    vectors = randn(sum(num_blocks) + 1, 1, block_size, sizes.vector_size)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        if row:
            tables[row, :num_shared] = tables[0, :num_shared]
        if lens[row] % block_size or not lens[row]:
            vectors[tables[row, count - 1], 0, lens[row] % block_size :] = torch.nan
    return LatentLayout(((1, sizes.vector_size),), sizes.latent_size).layer_cache(vectors), tables


def decode_step(
    num_heads: int,
    lens: tuple[int, ...],
    num_tokens: int = 1,
    sizes: LatentAttentionConfig = SIZES,
    num_shared: int = 0,
    num_sharers: tuple[int, ...] = (),
    block_size: int = BLOCK_SIZE,
) -> LatentStep:
    """num_shared: blocks that runs of so many sharers have in common."""
    real = tuple(1 + row % num_tokens for row in range(len(lens)))  # tokens of each row
    ends = tuple(length + count - 1 if length else 0 for length, count in zip(lens, real, strict=True))
    cache, tables = random_cache(sizes, ends, num_shared, block_size)
    shared = None
    if num_shared:
        counts = [count for run in num_sharers for count in (run, *[0] * (run - 1))]
        blocks = [num_shared * (run > 1) for run in num_sharers for _ in range(run)]
        shared = SharedPrefixes(torch.tensor(blocks, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
        shared.num_sharers[shared.num_shared_blocks == 0] = 0
    metadata = DecodeMetadata(
        torch.full((len(lens) * num_tokens,), -1),
        torch.tensor(lens, dtype=torch.int32),
        tables,
        shared,
        num_tokens,
        torch.tensor(real, dtype=torch.int32) if num_tokens > 1 else None,
    )
    return _step(num_heads, len(lens) * num_tokens, sizes, cache, metadata)


def prefill_step(
    num_heads: int, query_lens: tuple[int, ...], context_lens: tuple[int, ...], sizes: LatentAttentionConfig = SIZES
) -> LatentStep:
    cache, tables = random_cache(sizes, context_lens)
    cu_lens = (cumulative_lens(torch.tensor(lens, dtype=torch.int32)) for lens in (query_lens, context_lens))
    slots = torch.full((sum(query_lens),), -1)
    metadata = PrefillMetadata(query_lens, context_lens, *cu_lens, slots, tables)
    return _step(num_heads, sum(query_lens), sizes, cache, metadata)


def _step(
    num_heads: int, num_tokens: int, sizes: LatentAttentionConfig, cache: LayerCache, metadata: Any
) -> LatentStep:
    spec = LatentAttentionSpec(num_heads, sizes, scale=(sizes.plain_size + sizes.rotary_size) ** -0.5)
    absorbed = randn(num_tokens, num_heads, sizes.latent_size, seed=2)
    heads = randn(num_tokens, num_heads, sizes.plain_size + sizes.rotary_size, seed=3)  # rotated parts have strides
    return LatentStep(spec, cache, metadata, absorbed, heads[..., sizes.plain_size :])


def write_arguments(sizes: LatentAttentionConfig, num_tokens: int, num_heads: int, dtype: torch.dtype) -> list[Any]:
    """Return the arguments of a write for tokens with and without a slot; queries are in rows with others."""
    q_size, num_blocks = sizes.plain_size + sizes.rotary_size, 1 + num_tokens // BLOCK_SIZE
    projected = randn(num_tokens, num_heads * q_size + sizes.vector_size).to(dtype)
    q, latents = projected.split([num_heads * q_size, sizes.vector_size], dim=1)
    cache = torch.zeros(num_blocks, 1, BLOCK_SIZE, sizes.vector_size, dtype=dtype)
    layout = LatentLayout(((1, sizes.vector_size),), sizes.latent_size)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(4))[:num_tokens]
    slots[::3] = -1
    weight, positions = 1 + 0.2 * randn(sizes.latent_size, seed=5).to(dtype), torch.arange(num_tokens) * 7 % 50
    q = q.unflatten(1, (num_heads, q_size))
    table = randn(50, sizes.rotary_size, seed=6)
    return [latents, weight, 1e-6, q, positions, table, layout.layer_cache(cache), slots, sizes.is_interleaved]


def moved(arguments: list[Any], device: str) -> list[Any]:
    """Return the same arguments in other memory, with the strides that they have."""

    def move(x: Any) -> Any:
        if isinstance(x, LayerCache):
            return LayerCache(k := x.k.to(device, copy=True), k[..., : x.v.shape[3]])
        return x.to(device, copy=True) if isinstance(x, Tensor) else x

    latents, _, _, q, *_ = arguments
    projected = torch.cat((q.flatten(1), latents), dim=1).to(device)
    others = [move(x) for x in arguments]
    others[0] = projected[:, q.shape[1] * q.shape[2] :]
    others[3] = projected[:, : q.shape[1] * q.shape[2]].unflatten(1, q.shape[1:])
    return others
