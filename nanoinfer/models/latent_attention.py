"""Latent attention (MLA, DeepSeek-V2, 2024) in the place of a decoder layer's attention.

Keys and values of all heads are made of a latent, by kv_b_proj, and of a rotated part that the heads share. The cache
holds these two alone. Prefill expands them to keys and values. Decode reads them as they are: the part of kv_b_proj
that makes keys is multiplied into the queries, and the part that makes values into the sums.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.latent import LatentAttentionSpec, select_latent_backend
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.models.decoder_spec import DecoderSetup
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve, few_rows_product
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.latent_attention.spec import norm_rope_store_latents, store_and_absorb, values_of_sums
from nanoinfer.ops.norms.spec import rms_norm
from nanoinfer.quantization.linear_method import ProductKind

ALONE = TensorParallel()  # each rank has all latents
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


class LatentExpansion(ColumnParallelLinear):
    """Makes keys and values of all heads from latents: its outputs are those of the first head, then of the next.

    Absorbing multiplies by parts of the weight alone. So a weight that a checkpoint has in fewer bits is held in the
    dtype of the model too, and both ways multiply by that. It is not rounded at load.
    """

    rounds_at_load = False
    takes_adapters = False
    _wide: Tensor | None

    def __init__(self, latent_size: int, num_heads: int, size: int, tp: TensorParallel) -> None:
        super().__init__(latent_size, {"kv": num_heads * size}, bias=False, tp=tp)
        self.head_size = size
        self._missing: set[str] | None = None  # parameters that were never filled; None: all
        self.register_buffer("_wide", None, persistent=False)

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        super().weight_loader(param, full, shard)
        params = dict(self.named_parameters())
        self._missing = {
            name
            for name, other in params.items()
            if other is not param and (self._missing is None or name in self._missing)
        }
        if not self._missing:
            self.widen()

    def widen(self) -> None:
        """Take over a new weight. It stays at its address, which CUDA graphs hold."""
        wide = self.quant_method.wide_weight(self)
        if self._wide is not None:
            self._wide.copy_(wide)
        elif wide is not self.weight:
            self._wide = wide

    @property
    def wide_weight(self) -> Tensor:
        """The weight in the dtype of the model: (num_heads, size, latent_size)."""
        weight = self.quant_method.wide_weight(self) if self._wide is None else self._wide
        return weight.unflatten(0, (-1, self.head_size))

    def forward(self, x: Activations) -> Tensor:
        """Return (num_tokens, num_heads, size) of latents, (num_tokens, latent_size)."""
        assert isinstance(x, Tensor), "latents are not rounded to 8 bits"
        return nn.functional.linear(x, self.wide_weight.flatten(0, 1)).unflatten(1, (-1, self.head_size))


class LatentAttention(nn.Module):
    """Computes latent attention and the products before and after it; see `DecoderAttention`."""

    def __init__(
        self, setup: DecoderSetup, place: LayerPlace, _window: int | None, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        config, tp = setup.config, setup.tp
        sizes, num_heads = config.latent_attention, config.num_attention_heads
        assert sizes is not None, "the config says how large latents are"
        self.place, self.sizes, self.rotary_emb = place, sizes, rotary_emb
        query_size = num_heads * config.head_dim
        outputs = {"q": sizes.query_rank or query_size, "kv": sizes.vector_size}
        splits = {"q": ALONE if sizes.query_rank else tp, "kv": ALONE}
        self.qkv_a_proj = ColumnParallelLinear(config.hidden_size, outputs, config.attention_bias, tp, splits)
        if sizes.query_rank is not None:
            self.q_a_layernorm = RMSNorm(sizes.query_rank, LATENT_EPS)
            self.q_b_proj = ColumnParallelLinear(sizes.query_rank, {"q": query_size}, False, tp)
        self.kv_a_layernorm = RMSNorm(sizes.latent_size, LATENT_EPS)
        self.kv_b_proj = LatentExpansion(sizes.latent_size, num_heads, sizes.plain_size + sizes.value_size, tp)
        self.o_proj = RowParallelLinear(num_heads * sizes.value_size, config.hidden_size, config.attention_bias, tp)
        self.num_heads, self.block_size = tp.shard_size(num_heads, "query heads"), setup.backends.block_size
        spec = LatentAttentionSpec(self.num_heads, sizes, config.attention_scale)
        self.backend = setup.backends.shared(spec, place, partial(select_latent_backend, setup.backends, spec))

    @property
    def input_format(self) -> RowFormat | None:
        return self.qkv_a_proj.input_format

    def project(self, hidden: Activations) -> Tensor:
        return self.qkv_a_proj(hidden)

    def attend(self, projected: Tensor, step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, o_proj's input size). projected: what `project` returns."""
        sizes, cache, metadata = self.sizes, step.kv_cache.layer(self.place), step.metadata[self.place.table]
        q, latents = projected.split([projected.shape[1] - sizes.vector_size, sizes.vector_size], dim=1)
        if sizes.query_rank is not None:
            q = self._project_queries(q, step.adapters is not None)
        q = q.unflatten(1, (self.num_heads, -1))  # (num_tokens, num_heads, plain_size + rotary_size)
        weight = self.kv_b_proj.wide_weight
        arguments = (
            latents,
            self.kv_a_layernorm.weight,
            LATENT_EPS,
            q,
            step.positions,
            self.rotary_emb.cos_sin_cache,
            cache,
            metadata.slot_mapping,
            sizes.is_interleaved,
        )
        if not metadata.is_prefill and few_rows_kernels_serve(len(q), weight.flatten(0, 1)):
            of_keys, of_values = weight.split([sizes.plain_size, sizes.value_size], dim=1)
            absorbed = store_and_absorb(*arguments, of_keys)
            sums = self.backend.attend_to_latents(absorbed, q[..., sizes.plain_size :], cache, metadata)
            return values_of_sums(sums, of_values).flatten(1)
        vectors = norm_rope_store_latents(*arguments)
        if self.backend.reads_latents(metadata):
            return self._attend_to_latents(q, cache, metadata).flatten(1)
        assert isinstance(metadata, PrefillMetadata), "decode reads latents"
        return self.backend.attend_to_heads(q, vectors, self.kv_b_proj, cache, metadata).flatten(1)

    def _has_few_rows(self, num_rows: int) -> bool:
        """Return whether the kernel for few rows makes the queries, with the norm before."""
        proj = self.q_b_proj
        return proj.quant_method.kind is ProductKind.PLAIN and few_rows_kernels_serve(num_rows, proj.weight)

    def _project_queries(self, rows: Tensor, has_adapters: bool = False) -> Tensor:
        """Normalise what `project` has for the queries, and return these."""
        norm = self.q_a_layernorm.weight, LATENT_EPS
        if self._has_few_rows(len(rows)) and not has_adapters:
            return few_rows_product(rows, self.q_b_proj.weight, norm=norm)
        return self.q_b_proj(rms_norm(rows, *norm))

    def compiled_ahead(self, num_rows: int) -> list[Callable[[], Tensor]]:
        """Return functions to run while the engine loads, so that no later step waits for their kernels to be compiled.

        They compute the queries of so many rows, and with one row attention from a chunk to the cache, of zeros.
        """
        functions: list[Callable[[], Tensor]] = []
        if self.sizes.query_rank is not None and self._has_few_rows(num_rows):
            rows = self.q_b_proj.weight.new_zeros(num_rows, self.sizes.query_rank)
            functions.append(partial(self._project_queries, rows))
        if num_rows == 1 and not self.backend.needs_host:
            functions.append(self._attend_from_a_chunk)
        return functions

    def _attend_from_a_chunk(self) -> Tensor:
        """Attend from the second token of a prompt, absorbed, to a cache of zeros."""
        sizes, weight = self.sizes, self.kv_b_proj.wide_weight
        vectors = weight.new_zeros(1, 1, self.block_size, sizes.vector_size)
        cache = LayerCache(vectors, vectors[..., : sizes.latent_size])
        ends, context_ends = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32, device=weight.device)
        slots = torch.full((1,), -1, device=weight.device)
        metadata = PrefillMetadata((1,), (2,), ends, context_ends, slots, ends.new_zeros(1, 1))
        queries = weight.new_zeros(1, self.num_heads, sizes.plain_size + sizes.rotary_size)
        return self._attend_to_latents(queries, cache, self.backend.plan(metadata, cache))

    def _attend_to_latents(self, q: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
        """Absorb kv_b_proj: return (num_tokens, num_heads, value_size)."""
        sizes, num_tokens = self.sizes, len(q)
        out = q.new_empty(num_tokens, self.num_heads, sizes.value_size)
        at_once = self.backend.spec.heads_at_once(num_tokens)
        for first in range(0, self.num_heads, at_once):
            heads = slice(first, first + at_once)
            of_keys, of_values = self.kv_b_proj.wide_weight[heads].split([sizes.plain_size, sizes.value_size], dim=1)
            plain, rotated = q[:, heads].split([sizes.plain_size, sizes.rotary_size], dim=2)
            absorbed = q.new_empty(num_tokens, at_once, sizes.latent_size)
            torch.bmm(plain.transpose(0, 1), of_keys, out=absorbed.transpose(0, 1))
            sums = self.backend.attend_to_latents(absorbed, rotated, cache, metadata).transpose(0, 1)
            torch.bmm(sums, of_values.transpose(1, 2), out=out[:, heads].transpose(0, 1))
        return out
