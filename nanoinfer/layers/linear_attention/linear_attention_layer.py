"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5, in the place of a layer's attention."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import LinearAttentionConfig
from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.linear import PartialSum, RowParallelLinear, wide_rows
from nanoinfer.layers.linear_attention.projections import CausalConvolution, ba_projection, qkvz_projection
from nanoinfer.layers.linear_attention.recurrent_states import LayerStates
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.delta_rule.spec import gated_delta_prefill, gated_delta_step


class GatedNorm(nn.Module):
    """Holds the weight of the norm of each head's output; `gated_norm` computes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)


class GatedDeltaNet(nn.Module):
    """Computes linear attention and the products before and after it, on this rank's key heads and their value heads.

    is_interleaved: how the checkpoint orders the weights; see `projections.py`.
    """

    def __init__(
        self, hidden_size: int, eps: float, config: LinearAttentionConfig, is_interleaved: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp, self.eps = tp, eps
        self.num_heads = config.num_value_heads
        self.in_proj_qkvz = qkvz_projection(hidden_size, config, is_interleaved, tp)
        self.in_proj_ba = ba_projection(hidden_size, config, is_interleaved, tp)
        self.conv1d = CausalConvolution(config, tp)
        heads = torch.empty(tp.shard_size(self.num_heads, "value heads"), dtype=torch.float32)
        self.A_log = nn.Parameter(heads, requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty_like(heads), requires_grad=False)
        self.norm = GatedNorm(config.value_head_dim)
        self.out_proj = RowParallelLinear(config.value_size, hidden_size, bias=False, tp=tp)

    @property
    def input_format(self) -> RowFormat | None:
        """How the layer wants its inputs: those of the small product stay in the dtype of the model."""
        of_large = self.in_proj_qkvz.input_format
        return of_large and replace(of_large, keeps_wide=True)

    def check_weight(self, _param: Tensor, full: Tensor) -> None:
        check_shape(full, (self.num_heads,))

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        self.check_weight(param, full)
        param.copy_(self.tp.shard(full, 0))

    def compute(
        self, hidden: Activations, rows: Tensor, positions: Tensor, metadata: Metadata, states: LayerStates
    ) -> PartialSum:
        """(num_tokens, hidden_size) -> the same, to be added up by the next norm. rows: the places of the states."""
        qkvz = self.in_proj_qkvz(hidden)
        ba = self.in_proj_ba(hidden if self.in_proj_ba.input_format is not None else wide_rows(hidden))
        weights = self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self.eps
        layer = states.matrices, states.conv_inputs, *weights
        if isinstance(metadata, PrefillMetadata):
            out = gated_delta_prefill(qkvz, ba, rows, metadata.query_lens, metadata.context_lens, *layer)
        else:
            out = gated_delta_step(qkvz, ba, rows, positions, *layer)
        return self.out_proj(out)
