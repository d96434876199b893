"""What low-rank adapters add to the outputs of a linear layer: x A^T B^T, of each token by the adapter of its row.

LoRA is by Hu et al. 2021; batches of several adapters by Chen et al. (Punica) and Sheng et al. (S-LoRA), 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.dispatch import op


class LoRAMatrices(NamedTuple):
    """Holds one layer's matrices of the adapters in all slots; numbers beyond the rank of an adapter are 0.

    A slot is a device slot here: an index of these matrices (`lora/slot_memory.py`).

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
def add_lora(out: Tensor, x: Tensor, rows: LoRARows, matrices: LoRAMatrices, shrunk: Tensor | None = None) -> None:
    """Add x A^T B^T to `out` in place, each token by the matrices in its slot; tokens without an adapter stay.

    out: (num_tokens, num_outputs). x: (num_tokens, num_inputs). Both have contiguous rows, and the dtype of the
    matrices, to which x A^T is rounded. shrunk: x A^T, where `gated_with_lora` has returned it.
    """
    a, b, sizes = matrices
    inner = _shrink(x, rows, a) if shrunk is None else shrunk
    inner = inner.sum(0).to(x.dtype)
    for slot in rows.slots.unique().tolist():
        if slot < len(a):
            tokens = (rows.slots == slot).nonzero().squeeze(1)
            inners = inner[tokens].chunk(len(sizes), dim=1)
            parts = [F.linear(one, part) for one, part in zip(inners, b[slot].split(sizes), strict=True)]
            start = 0
            for part in parts:
                out[:, start : start + part.shape[1]].index_add_(0, tokens, part)
                start += part.shape[1]


@op
def gated_with_lora(
    gate_up: Tensor,
    x: Tensor,
    rows: LoRARows,
    matrices: LoRAMatrices,
    activation: Callable[[Tensor], Any],
    next_a: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what a gated activation makes of `gate_up` + x A^T B^T, (num_tokens, size); `gate_up` may change.

    gate_up: (num_tokens, 2 * size). activation: of ops/activations. next_a: of the product that reads the result,
    (num_slots, max_rank, size). With it comes the result times it, as partial sums, (num_parts, num_tokens, max_rank),
    in float32, or None if it is not computed; the sums of tokens without an adapter are undefined. The rest is as for
    add_lora.
    """
    add_lora(gate_up, x, rows, matrices)
    gated: Tensor = activation(gate_up)
    return gated, None if next_a is None else _shrink(gated, rows, next_a)


def _shrink(x: Tensor, rows: LoRARows, a: Tensor) -> Tensor:
    """Return x A^T of each token, (1, num_tokens, num_lines), in float32."""
    inner = x.new_zeros(1, len(x), a.shape[1], dtype=torch.float32)
    for slot in rows.slots.unique().tolist():
        if slot < len(a):
            tokens = (rows.slots == slot).nonzero().squeeze(1)
            inner[0, tokens] = F.linear(x[tokens], a[slot]).float()
    return inner
