"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5, in the place of a layer's attention.

Checkpoints of Qwen3.5 have q | k | v, z, b and a one after the other. Those of Qwen3-Next interleave them: of each key
head its query, its key, and then what its value heads have. Here all of them lie one after the other, each by heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.caches.recurrent_states import LayerStates
from nanoinfer.checkpoint.base_config import LinearAttentionConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.joined_weights import lay_together, with_tensors
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, wide_rows
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.delta_rule.spec import DeltaRuleWeights, gated_delta_prefill, gated_delta_step
from nanoinfer.ops.delta_rule_lines.spec import gated_delta_lines
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve
from nanoinfer.quantization.linear_method import MAX_SPLIT_K_TOKENS, LinearMethod

ALIGNMENT = 16  # values; rows of the joined product begin at multiples of it, as tensor cores want


class LinearAttentionProjection(ColumnParallelLinear):
    """Computes several of q, k, v, z (the output's gates), b and a in one product, split by key heads.

    parts: their sizes for one key head, in order. shards: which of them a tensor of the checkpoint holds, by the name
    of the shard. is_interleaved: whether a shard holds all parts of a key head side by side.
    """

    def __init__(
        self,
        input_size: int,
        num_key_heads: int,
        parts: dict[str, int],
        shards: dict[str, tuple[str, ...]],
        is_interleaved: bool,
        tp: TensorParallel,
    ) -> None:
        sizes = {name: num_key_heads * sum(parts[part] for part in packed) for name, packed in shards.items()}
        super().__init__(input_size, sizes, bias=False, tp=tp)
        self.tp, self.num_key_heads, self.is_interleaved = tp, num_key_heads, is_interleaved
        self.part_sizes = {name: [parts[part] for part in packed] for name, packed in shards.items()}

    def share_of(self, full: Tensor, shard: str, dim: int, _outputs_per_entry: int) -> Tensor:
        sizes, num_all = self.part_sizes[shard], full.shape[dim]
        num_parts = sum(sizes)
        # A packed or quantized tensor may have fewer entries than outputs.
        entries = [size * num_all // (num_parts * self.num_key_heads) for size in sizes]
        if self.is_interleaved:
            by_head = self.tp.shard(full.unflatten(dim, (self.num_key_heads, -1)), dim)
            parts = [part.flatten(dim, dim + 1) for part in by_head.split(entries, dim + 1)]
        else:
            whole = full.split([self.num_key_heads * count for count in entries], dim)
            parts = [self.tp.shard(part, dim) for part in whole]
        return torch.cat(parts, dim)


def qkvz_projection(
    input_size: int, config: LinearAttentionConfig, is_interleaved: bool, tp: TensorParallel
) -> LinearAttentionProjection:
    """Return the product that makes queries, keys, values and the gates of the output."""
    num_values = config.value_size // config.num_key_heads
    parts = {"q": config.key_head_dim, "k": config.key_head_dim, "v": num_values, "z": num_values}
    shards: dict[str, tuple[str, ...]]
    shards = {"qkvz": ("q", "k", "v", "z")} if is_interleaved else {"qkv": ("q", "k", "v"), "z": ("z",)}
    return LinearAttentionProjection(input_size, config.num_key_heads, parts, shards, is_interleaved, tp)


def ba_projection(
    input_size: int, config: LinearAttentionConfig, is_interleaved: bool, tp: TensorParallel
) -> LinearAttentionProjection:
    """Return the product that makes a number for how much is written (b) and one for how much is kept (a).

    It is small, and all that a state remembers depends on it, so it is not rounded unless the checkpoint is.
    """
    num_heads = config.num_value_heads // config.num_key_heads
    shards: dict[str, tuple[str, ...]]
    shards = {"ba": ("b", "a")} if is_interleaved else {"b": ("b",), "a": ("a",)}
    parts = {"b": num_heads, "a": num_heads}
    projection = LinearAttentionProjection(input_size, config.num_key_heads, parts, shards, is_interleaved, tp)
    projection.rounds_at_load = False
    return projection


class CausalConvolution(nn.Module):
    """Holds the weights of a convolution of each channel by itself: (conv_size, conv_width), the newest token last."""

    def __init__(self, config: LinearAttentionConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.full_shape = (config.conv_size, 1, config.conv_width)
        self.sizes = [config.key_size, config.key_size, config.value_size]
        num_channels = tp.shard_size(config.conv_size, "channels of the convolution")
        self.weight = nn.Parameter(torch.empty(num_channels, config.conv_width), requires_grad=False)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        shares = [self.tp.shard(part, 0) for part in full.squeeze(1).split(self.sizes)]
        param.copy_(torch.cat(shares))


class GatedNorm(nn.Module):
    """Holds the weight of the norm of each head's output, which the delta rule ends with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)


class JoinedProjection(NamedTuple):
    """Computes both input products as one, which saves a launch. linear: a copy, no part of the model."""

    linear: LinearAttentionProjection
    num_first: int  # outputs of the first product


class GatedDeltaNet(nn.Module):
    """Computes linear attention and the products before and after it, on this rank's key heads and their value heads.

    is_interleaved: whether the checkpoint interleaves the weights by key heads.
    """

    def __init__(
        self, hidden_size: int, eps: float, config: LinearAttentionConfig, is_interleaved: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp, self.eps = tp, eps
        self.full_shape = (config.num_value_heads,)  # of A_log and dt_bias
        self.in_proj_qkvz = qkvz_projection(hidden_size, config, is_interleaved, tp)
        self.in_proj_ba = ba_projection(hidden_size, config, is_interleaved, tp)
        self.conv1d = CausalConvolution(config, tp)
        heads = torch.empty(tp.shard_size(config.num_value_heads, "value heads"), dtype=torch.float32)
        self.A_log = nn.Parameter(heads, requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty_like(heads), requires_grad=False)
        self.norm = GatedNorm(config.value_head_dim)
        self.out_proj = RowParallelLinear(config.value_size, hidden_size, bias=False, tp=tp)
        self.joined: JoinedProjection | None = None

    def settle_weights(self) -> None:
        """Join the input products where that pays: not on a CPU, which launches nothing."""
        if not self.A_log.is_cpu:
            self.join_projections()

    def join_projections(self) -> None:
        """Lay the weights of both input products behind one another, if they are in the dtype of the model."""
        qkvz, ba = self.in_proj_qkvz, self.in_proj_ba
        if self._are_plain() and len(ba.weight) % ALIGNMENT == 0:
            weight = lay_together(qkvz.weight, ba.weight)
            self.joined = JoinedProjection(with_tensors(qkvz, {"weight": weight}), len(qkvz.weight))

    def _are_plain(self) -> bool:
        """Return whether both input products are plain ones: neither in fewer bits, nor with adapters."""
        return all(type(linear.quant_method) is LinearMethod for linear in (self.in_proj_qkvz, self.in_proj_ba))

    @property
    def input_format(self) -> RowFormat | None:
        """How the layer wants its inputs: the small product needs them in the dtype of the model, too."""
        of_large = self.in_proj_qkvz.input_format
        return of_large and replace(of_large, keeps_wide=True)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        param.copy_(self.tp.shard(full, 0))

    def project(self, hidden: Activations) -> tuple[Tensor, Tensor]:
        """Return the two input products, each (num_tokens, size); a line may be longer than its values."""
        if self.joined is not None and len(hidden) <= MAX_SPLIT_K_TOKENS and self._are_plain():
            both = self.joined.linear(hidden)
            return both[:, : self.joined.num_first], both[:, self.joined.num_first :]
        qkvz = self.in_proj_qkvz(hidden)
        return qkvz, self.in_proj_ba(hidden if self.in_proj_ba.input_format is not None else wide_rows(hidden))

    def compiled_ahead(self, num_rows: int) -> list[Callable[[], Tensor]]:
        """Return functions to run while the engine loads, which compile the joined product for few rows."""
        if self.joined is None or not self._are_plain():
            return []
        weight = self.joined.linear.weight
        if not few_rows_kernels_serve(num_rows, weight):
            return []
        return [partial(self.joined.linear, weight.new_zeros(num_rows, weight.shape[1]))]

    def mix(
        self, projected: tuple[Tensor, Tensor], rows: Tensor, positions: Tensor, metadata: Metadata, states: LayerStates
    ) -> Tensor:
        """Return the inputs of `out_proj`, (num_tokens, size). projected: see `project`. rows: of the states.

        Nothing may be pending in rows of a prefill step, nor of a decode step that computes one token of each.
        """
        qkvz, ba = projected
        matrices, conv_inputs, pending = states.matrices, states.conv_inputs, states.pending
        weights = DeltaRuleWeights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self.eps)
        if isinstance(metadata, PrefillMetadata):
            lens, context_lens = metadata.query_lens, metadata.context_lens
            return gated_delta_prefill(qkvz, ba, rows, lens, context_lens, matrices, conv_inputs, weights)
        num_row_tokens = metadata.num_row_tokens
        if num_row_tokens is None:
            return gated_delta_step(qkvz, ba, rows, positions, matrices, conv_inputs, weights)
        assert pending is not None, "states for rows of several tokens are allocated with room for pending ones"
        return gated_delta_lines(qkvz, ba, rows, positions, num_row_tokens, pending, matrices, conv_inputs, weights)
