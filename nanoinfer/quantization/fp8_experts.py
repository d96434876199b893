"""The experts' MLP in FP8, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer import kernels
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.ops.common.fp8_format import QuantizedRows, RowFormat
from nanoinfer.ops.fp8.spec import dequantize_rows, dequantize_weight, quantize_rows


@triton_on_cuda(lambda: kernels.fp8_experts.fp8_expert_mlp)
def fp8_expert_mlp(
    x: Tensor,
    x_scales: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_format: RowFormat,
    expert_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return what each expert of a token adds to it, (num_experts_per_tok, num_tokens, hidden_size), weighted.

    x, x_scales: of QuantizedRows of hidden_size. gate_up, down: as in `expert_mlp` of layers/moe.py, in e4m3, with the
    scales of their rows or blocks. down_format: how SwiGLU's results are rounded, in groups or by one static scale.
    expert_ids, weights: from `route`. dtype: of the result, to which gate, up and SwiGLU are rounded, too.
    """
    num_tokens, num_experts_per_tok = expert_ids.shape
    wide = dequantize_rows(QuantizedRows(x, x_scales))
    terms = torch.zeros(num_experts_per_tok, num_tokens, x.shape[1], dtype=dtype, device=x.device)
    for expert in expert_ids[expert_ids < len(gate_up)].unique().tolist():
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        sums = wide[token] @ dequantize_weight(gate_up[expert], gate_up_scales[expert]).t()
        gate, up = sums.to(dtype).chunk(2, dim=1)
        gated = dequantize_rows(quantize_rows(F.silu(gate) * up, down_format))
        result = gated @ dequantize_weight(down[expert], down_scales[expert]).t()
        terms[choice, token] = (result * weights[token, choice].unsqueeze(1)).to(dtype)
    return terms
