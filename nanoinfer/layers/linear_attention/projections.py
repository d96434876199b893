"""The products and the convolution of linear attention: how a checkpoint orders their weights, and how we do.

Checkpoints of Qwen3.5 have q | k | v, z, b and a one after the other. Those of Qwen3-Next interleave them: of each key
head its query, its key, and then what its value heads have. Here all of them lie one after the other, each by heads.
"""

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import LinearAttentionConfig
from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import ColumnParallelLinear
from nanoinfer.quantization.linear_method import ParamSpec


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

    def share_of(self, full: Tensor, shard: str, spec: ParamSpec) -> Tensor:
        dim = spec.output_dim
        assert dim is not None, "what has no outputs is not packed"
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

    def check_weight(self, _param: Tensor, full: Tensor) -> None:
        check_shape(full, self.full_shape)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        self.check_weight(param, full)
        shares = [self.tp.shard(part, 0) for part in full.squeeze(1).split(self.sizes)]
        param.copy_(torch.cat(shares))
