"""The experts of gpt-oss: products with biases, and a SwiGLU that is clamped; a router with biases."""

from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import wide_rows
from nanoinfer.layers.moe import Experts, PackedExperts, Router
from nanoinfer.ops.common.fp8_format import Activations
from nanoinfer.ops.experts.spec import clamped_expert_mlp
from nanoinfer.quantization.linear_method import PER_OUTPUT, stored


class BiasedExperts(PackedExperts):
    """Holds projections with a bias for each output. In checkpoints inputs come before outputs, gate and up in turn."""

    rounds_at_load = False
    clamps: tuple[float, float]  # of gate and up: limit and alpha of `clamped_swiglu`

    def __init__(
        self, num_experts: int, parts: tuple[str, ...], full_shape: tuple[int, int], split_dim: int, tp: TensorParallel
    ) -> None:
        super().__init__(num_experts, parts, full_shape, split_dim, tp)
        self.bias = stored(torch.empty(num_experts, self.weight.shape[1]), PER_OUTPUT)

    def unpack(self, full: Tensor, param: Tensor | None) -> dict[str, Tensor]:
        """Cut a tensor of all experts, (num_experts, [inputs,] outputs of all parts in turn), into shards."""
        num_outputs = len(self.parts) * self.full_shape[0]
        if full.dim() != (2 if param is self.bias else 3) or full.shape[::2][-1] != num_outputs:
            check_shape(full, (len(self.weight), *([] if param is self.bias else [self.full_shape[1]]), num_outputs))
        check_shape(full[:, ..., 0], (len(self.weight), *full.shape[1:-1]))
        full = full.movedim(-1, 1)
        return {
            f"{expert}.{part}": full[expert, index :: len(self.parts)]
            for expert in range(len(full))
            for index, part in enumerate(self.parts)
        }

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        super().weight_loader(param, full, shard)
        if param is self.bias and self.is_row_parallel and self.tp.rank > 0:
            param[int(shard.partition(".")[0])].zero_()  # sums of all ranks have it once


class ClampedExperts(Experts):
    """Computes experts with biases and `clamped_swiglu`, by weights in 16 bits or in MXFP4."""

    projection: ClassVar = BiasedExperts
    gate_up_proj: BiasedExperts
    down_proj: BiasedExperts

    def __init__(self, hidden_size: int, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__(hidden_size, moe, tp)
        assert moe.swiglu_limit is not None, "experts that are clamped have a limit"
        self.gate_up_proj.clamps = moe.swiglu_limit, moe.swiglu_alpha

    def _mlp(self, hidden: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        terms = gate_up.quant_method.expert_mlp(gate_up, down, hidden, expert_ids, weights)
        if terms is not None:
            return terms
        wide = gate_up.quant_method.wide_weight(gate_up), down.quant_method.wide_weight(down)
        biases = gate_up.bias, down.bias
        return clamped_expert_mlp(wide_rows(hidden), *wide, *biases, expert_ids, weights, gate_up.clamps)


class BiasedRouter(Router):
    """Scores the experts with a bias for each."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe)
        self.bias = torch.nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)
