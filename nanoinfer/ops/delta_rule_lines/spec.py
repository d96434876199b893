"""The gated delta rule over decode rows of several tokens; how many of them count is known after the step.

A decode step may compute several tokens of each row: the newest one, and tokens that somebody proposes to follow it.
Each of them is a line of the step. After the step it is known how many lines of a row count: the first one always does,
and so do the proposals up to the first wrong one. A state cannot be taken back, so a step adds to the states only what
is certain, the lines of the step before that counted. Its own lines are pending until the next step.

What a token adds to the state S of a head is little. S decays, and the product of two vectors is added to it:

    S <- decay * S + key delta^T        decay = exp(g),  delta = beta (v - decay * S^T key)

(see `delta_rule/spec.py`). So a step reads and writes each state once, however many lines it has:

1. It reads S, and adds the pending tokens of the row that counted, by their decays, keys and deltas.
2. It writes S, which now is the state before the step's first line.
3. It computes the lines in turn from there. S is not written again: only the decay, key and delta of each line are
   kept, and the inputs of the convolution before it.

A row with lines at positions 10 to 13, of which two counted, goes on at position 12. Its next step adds the pending
tokens of positions 10 and 11, then computes positions 12 to 15, and those are pending then. A row that is left out of a
step keeps what is pending. `flush_pending` adds it at any other time.

All that is pending lies token by token, as the products of the layer leave it, so nothing is transposed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.ops.delta_rule.spec import L2_EPS, DeltaRuleWeights, convolve, gated_norm, gates, split_heads
from nanoinfer.ops.dispatch import op


class PendingTokens(NamedTuple):
    """Holds the newest tokens of each row, which its states do not have yet.

    Rows are those of the step tables, and a spare one for padding. The first two tensors serve all layers, the others
    are of one layer, or of all, by layer. A row's pending tokens are its lines in the last step that it was in.

    num_counted: (num_rows,) int32, how many of them count; 0: the states are up to date. After a step of lines, whoever
    knows it writes it, at least 1, and at most the row's number of tokens in that step.
    first_positions: (num_rows,) int64, the position of the first one.
    conv_inputs: (num_rows, ring_size, conv_size), their inputs of the convolution, and the conv_width - 1 before them;
    that of position p is at p % ring_size, and ring_size = conv_width - 1 + max_lines.
    keys: (num_rows, max_lines, num_value_heads, key_head_dim), after the convolution, in the model's dtype.
    deltas: (num_rows, max_lines, num_value_heads, value_head_dim) float32, what is added under them.
    decays: (num_rows, max_lines, num_value_heads) float32.

    Keys are not normalised, so they lose nothing in 16 bits. The factor that normalises a key is part of its delta.
    """

    num_counted: Tensor
    first_positions: Tensor
    conv_inputs: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor

    def layer(self, index: int) -> "PendingTokens":
        return PendingTokens(*self[:2], *(tensor[index] for tensor in self[2:]))


@op
def gated_delta_lines(
    qkvz: Tensor,
    ba: Tensor,
    rows: Tensor,
    positions: Tensor,
    num_row_tokens: Tensor,
    pending: PendingTokens,
    matrices: Tensor,
    conv_inputs: Tensor,
    weights: DeltaRuleWeights,
) -> Tensor:
    """Add the pending tokens of each row that count to its state, and compute its lines, which are pending then.

    Every row has num_lines lines, one after the other; those beyond its own number are padding. Line i * num_lines + j
    is token j of row i.

    qkvz: (num_rows * num_lines, conv_size + value_size), and ba: (num_rows * num_lines, 2 * num_value_heads), of the
    lines as in `gated_delta_step`. rows: (num_rows,) int32, rows of `pending` and places of the states; padding has -1,
    the last one. positions: (num_rows * num_lines,) int64; only those of first lines are read. num_row_tokens:
    (num_rows,) int32, how many lines of a row are no padding, at least one. pending: of this layer; num_counted stays
    as it is, because the other layers read it too. conv_inputs: read where nothing is pending, and not written. The
    others: as in `gated_delta_step`. All but qkvz, ba and rows are contiguous.

    Returns (num_rows * num_lines, value_size), zeros for padding lines.
    """
    if len(rows) == 0:
        return qkvz.new_empty(0, len(weights.norm) * matrices.shape[1])
    (num_channels, width), num_lines, places = weights.conv.shape, len(qkvz) // len(rows), rows.long()
    ring_size = pending.conv_inputs.shape[1]
    first = positions.view(-1, num_lines)[:, 0]
    counts = torch.minimum(pending.num_counted[places], first)  # a padding row's may be any
    state = _with_pending(matrices[places], places, first - counts, counts, pending)
    matrices[places] = state
    pending.first_positions[places] = first

    x, z = qkvz[:, :num_channels], qkvz[:, num_channels:]
    lines = x.view(len(rows), num_lines, num_channels)
    inputs = lines
    for age in range(1, width):
        position = first - age
        kept = pending.conv_inputs[places, position % ring_size]
        earlier = torch.where((counts > 0).unsqueeze(1), kept, conv_inputs[places, position % width])
        earlier = torch.where((position >= 0).unsqueeze(1), earlier, 0)
        pending.conv_inputs[places, position % ring_size] = earlier
        inputs = torch.cat((earlier.unsqueeze(1), inputs), 1)
    windows = [inputs[:, index : index + num_lines].flatten(0, 1) for index in range(width)]
    convolved = convolve(windows, weights.conv)
    q, k, v = (part.unflatten(0, (-1, num_lines)) for part in split_heads(convolved, matrices))
    g, beta = (part.unflatten(0, (-1, num_lines)) for part in gates(ba, weights.a_log, weights.dt_bias))
    keys = _keys_of(convolved, matrices).unflatten(0, (-1, num_lines))
    factors = torch.rsqrt(keys.float().square().sum(-1, keepdim=True) + L2_EPS)  # that make a key k
    outs = []
    for line in range(num_lines):
        decay = g[:, line].exp()
        state = state * decay[..., None, None]
        delta = (v[:, line] - (state * k[:, line].unsqueeze(-1)).sum(-2)) * beta[:, line].unsqueeze(-1)
        delta = delta * factors[:, line]
        state = state + keys[:, line].float().unsqueeze(-1) * delta.unsqueeze(-2)
        outs.append((state * q[:, line].unsqueeze(-1)).sum(-2))
        pending.conv_inputs[places, (first + line) % ring_size] = lines[:, line]
        pending.keys[places, line], pending.deltas[places, line] = keys[:, line], delta
        pending.decays[places, line] = decay
    out = gated_norm(torch.stack(outs, 1).flatten(0, 1).to(x.dtype), z, weights.norm, weights.eps)
    is_padding = torch.arange(num_lines, device=x.device) >= num_row_tokens.unsqueeze(1)
    return out.masked_fill(is_padding.view(-1, 1), 0)


@op
def flush_pending(matrices: Tensor, conv_inputs: Tensor, rows: Tensor, pending: PendingTokens) -> None:
    """Add the pending tokens that count to the states of rows, in all layers. Then nothing of them is pending.

    matrices: (num_layers, num_places, num_value_heads, key_head_dim, value_head_dim) float32. conv_inputs: (num_layers,
    num_places, conv_width, conv_size), which get the newest inputs. rows: (num_flushed,) int32, -1 is the spare one; no
    row twice. pending: of all layers. All are contiguous. So `gated_delta_step`, `gated_delta_prefill` and snapshots
    find the states that single steps would have left.
    """
    places = rows.long()
    places = places[pending.num_counted[places] > 0]
    counts, first = pending.num_counted[places], pending.first_positions[places]
    ring_size, width = pending.conv_inputs.shape[2], conv_inputs.shape[2]
    for layer in range(len(matrices)):
        of_layer = pending.layer(layer)
        matrices[layer, places] = _with_pending(matrices[layer, places], places, first, counts, of_layer)
        for age in range(width):
            position = first + counts - 1 - age
            kept, old = of_layer.conv_inputs[places, position % ring_size], conv_inputs[layer, places, position % width]
            has_newer = (position >= 0).unsqueeze(1)
            conv_inputs[layer, places, position % width] = torch.where(has_newer, kept, old)
    pending.num_counted[places] = 0


def _with_pending(state: Tensor, places: Tensor, first: Tensor, counts: Tensor, pending: PendingTokens) -> Tensor:
    """Return the states of rows after their first `counts` pending tokens, the first of which is at position `first`.

    state: (num_rows, num_value_heads, key_head_dim, value_head_dim), before these tokens; it begins anew at position 0.
    """
    state = torch.where((first > 0)[:, None, None, None], state, 0)
    for index in range(pending.keys.shape[1]):
        key, delta, decay = (x[places, index] for x in (pending.keys, pending.deltas, pending.decays))
        after = state * decay[..., None, None] + key.float().unsqueeze(-1) * delta.unsqueeze(-2)
        state = torch.where((index < counts)[:, None, None, None], after, state)
    return state


def _keys_of(convolved: Tensor, matrices: Tensor) -> Tensor:
    """Return the keys as the convolution leaves them, for each value head: (num_tokens, num_value_heads, key_dim)."""
    _, num_heads, key_dim, value_dim = matrices.shape
    key_size = (convolved.shape[1] - num_heads * value_dim) // 2
    keys = convolved[:, key_size : 2 * key_size].unflatten(1, (-1, key_dim))
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1)
