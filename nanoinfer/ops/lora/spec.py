"""What low-rank adapters add to the outputs of a linear layer: x A^T B^T, of each token by the adapter of its row.

LoRA is by Hu et al. 2021; batches of several adapters by Chen et al. (Punica) and Sheng et al. (S-LoRA), 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.dispatch import op


class LoRAMatrices(NamedTuple):
    """Holds one layer's matrices of the adapters in all slots; numbers beyond the rank of an adapter are 0.

    A layer may pack several products (shards) of the same inputs: q, k and v, say. Each has an A of its own, and the
    rows of its B are its outputs.
    """

    a: Tensor  # (num_slots, num_shards * max_rank, num_inputs)
    b: Tensor  # (num_slots, num_outputs, max_rank)
    sizes: tuple[int, ...]  # the outputs of each shard, which follow one another


@dataclass(slots=True)
class LoRARows:
    """Says which adapter each token of a step has.

    plan: how the kernels group the tokens, the same for all layers. The first of them makes it; None until then.
    """

    slots: Tensor  # (num_tokens,) int32; num_slots where a token has none
    plan: Any = None


@op
def add_lora(out: Tensor, x: Tensor, rows: LoRARows, matrices: LoRAMatrices) -> None:
    """Add x A^T B^T to `out` in place, each token by the matrices in its slot; tokens without an adapter stay.

    out: (num_tokens, num_outputs). x: (num_tokens, num_inputs). Both have contiguous rows, and the dtype of the
    matrices, to which x A^T is rounded.
    """
    a, b, sizes = matrices
    for slot in rows.slots.unique().tolist():
        if slot < len(a):
            tokens = (rows.slots == slot).nonzero().squeeze(1)
            inner = F.linear(x[tokens], a[slot]).chunk(len(sizes), dim=1)
            parts = [F.linear(one, part) for one, part in zip(inner, b[slot].split(sizes), strict=True)]
            start = 0
            for part in parts:
                out[:, start : start + part.shape[1]].index_add_(0, tokens, part)
                start += part.shape[1]


@op
def gated_with_lora(
    gate_up: Tensor, x: Tensor, rows: LoRARows, matrices: LoRAMatrices, activation: Callable[[Tensor], Any]
) -> Tensor:
    """Return what a gated activation makes of `gate_up` + x A^T B^T, (num_tokens, size); `gate_up` may change.

    gate_up: (num_tokens, 2 * size). activation: of ops/activations. The rest is as for add_lora.
    """
    add_lora(gate_up, x, rows, matrices)
    gated: Tensor = activation(gate_up)
    return gated
