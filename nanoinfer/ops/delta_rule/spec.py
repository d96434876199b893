"""The gated delta rule (Yang et al. 2024): a recurrence by steps for decode, and in chunks for prefill.

A head's state is a matrix S that maps keys to values. For each token it decays, and what it holds under the token's key
k moves towards the token's value v:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   output: S^T q

g <= 0 is the logarithm of the decay, beta in (0, 1) how far it moves. All of it is computed in float32. Before it, a
causal convolution and SiLU go over queries, keys and values, and queries and keys are normalised to a length of 1.

In chunks of 64 tokens the same becomes products of matrices (the UT transform, Yang et al. 2024, "Parallelizing linear
transformers with the delta rule"): what each token of a chunk writes follows from a triangular system, and only the
state between chunks is computed in turn.

`delta_rule_lines/spec.py` has decode steps that compute several tokens of each row, not all of which may count.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.dispatch import op

CHUNK = 64  # tokens
L2_EPS = 1e-6


class DeltaRuleWeights(NamedTuple):
    """Holds the weights of a layer that are applied between its input products and its output product, contiguous."""

    conv: Tensor  # (conv_size, conv_width), the newest token last
    a_log: Tensor  # (num_value_heads,) float32
    dt_bias: Tensor  # (num_value_heads,) float32
    norm: Tensor  # (value_head_dim,), of the gated norm of the output
    eps: float  # of that norm


@op
def gated_delta_step(
    qkvz: Tensor,
    ba: Tensor,
    rows: Tensor,
    positions: Tensor,
    matrices: Tensor,
    conv_inputs: Tensor,
    weights: DeltaRuleWeights,
) -> Tensor:
    """Compute one token of each row, and leave the states as they are after it.

    qkvz: (num_rows, conv_size + value_size), queries, keys and values before their convolution, and the output's gates;
    rows contiguous. ba: (num_rows, 2 * num_value_heads), likewise. rows: (num_rows,) int32, the places of their states;
    padding has -1, the last place. positions: (num_rows,) int64; at position 0 a state begins anew. matrices:
    (num_places, num_value_heads, key_head_dim, value_head_dim) float32. conv_inputs: (num_places, conv_width,
    conv_size), the inputs of the newest tokens; that of position p is at p % conv_width. From positions on, all are
    contiguous. Returns (num_rows, value_size).
    """
    places = rows.long()
    num_channels, width = weights.conv.shape
    x, z = qkvz[:, :num_channels], qkvz[:, num_channels:]
    earlier = [positions - age for age in range(width - 1, 0, -1)]
    window = [
        torch.where((position >= 0).unsqueeze(1), conv_inputs[places, position % width], 0) for position in earlier
    ]
    q, k, v = split_heads(convolve([*window, x], weights.conv), matrices)
    conv_inputs[places, positions % width] = x
    g, beta = gates(ba, weights.a_log, weights.dt_bias)
    state = torch.where((positions > 0)[:, None, None, None], matrices[places], 0) * g.exp()[..., None, None]
    delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)  # (num_rows, heads, key_head_dim, value_head_dim)
    matrices[places] = state
    out = (state * q.unsqueeze(-1)).sum(-2)
    return gated_norm(out.to(x.dtype), z, weights.norm, weights.eps)


@op
def gated_delta_prefill(
    qkvz: Tensor,
    ba: Tensor,
    rows: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    matrices: Tensor,
    conv_inputs: Tensor,
    weights: DeltaRuleWeights,
) -> Tensor:
    """Compute the chunks of a prefill step, and leave the states as they are after them.

    qkvz, ba: as in `gated_delta_step`, of all tokens. rows: (num_chunks,) int32, the places of the chunks' states.
    query_lens: tokens of each chunk, laid end to end. context_lens: the same with tokens of earlier steps; a chunk
    without any ignores what its state was. The others: as in `gated_delta_step`. Returns (num_tokens, value_size).
    """
    num_channels = len(weights.conv)
    x, z = qkvz[:, :num_channels], qkvz[:, num_channels:]
    layout = _layout_of(query_lens, context_lens, x.device)
    places = rows.long()
    convolved = convolve(_conv_windows(x, layout, places, conv_inputs), weights.conv)
    _keep_conv_inputs(x, layout, places, conv_inputs)
    q, k, v = split_heads(convolved, matrices)
    g, beta = gates(ba, weights.a_log, weights.dt_bias)
    begun = (layout.starts > 0)[:, None, None, None]
    initial = torch.where(begun, matrices[places], 0)
    out, matrices[places] = chunked_delta_rule(q, k, v, g, beta, initial, query_lens)
    return gated_norm(out.to(x.dtype), z, weights.norm, weights.eps)


class Layout(NamedTuple):
    """Says where the tokens of a prefill step belong.

    token_chunks: (num_tokens,), which chunk of the step a token is in; offsets: (num_tokens,), its place there. starts:
    (num_chunks,), the position of a chunk's first token; firsts: (num_chunks,), its index in the step; lens:
    (num_chunks,), how many tokens the chunk has.
    """

    token_chunks: Tensor
    offsets: Tensor
    starts: Tensor
    firsts: Tensor
    lens: Tensor


def _layout_of(query_lens: tuple[int, ...], context_lens: tuple[int, ...], device: torch.device) -> Layout:
    lens, contexts = torch.tensor([query_lens, context_lens], device=device)
    firsts = lens.cumsum(0) - lens
    token_chunks = torch.arange(len(lens), device=device).repeat_interleave(lens)
    offsets = torch.arange(len(token_chunks), device=device) - firsts[token_chunks]
    return Layout(token_chunks, offsets, contexts - lens, firsts, lens)


def _conv_windows(x: Tensor, layout: Layout, places: Tensor, conv_inputs: Tensor) -> list[Tensor]:
    """Return the inputs of the convolution, from the oldest to each token's own; each (num_tokens, conv_size)."""
    width = conv_inputs.shape[1]
    index = torch.arange(len(x), device=x.device)
    positions = layout.starts[layout.token_chunks] + layout.offsets
    windows = []
    for age in range(width - 1, 0, -1):
        of_step = x[(index - age).clamp(min=0)]
        before = conv_inputs[places[layout.token_chunks], (positions - age) % width]
        is_here, is_any = (layout.offsets >= age).unsqueeze(1), (positions >= age).unsqueeze(1)
        windows.append(torch.where(is_here, of_step, torch.where(is_any, before, 0)))
    return [*windows, x]


def _keep_conv_inputs(x: Tensor, layout: Layout, places: Tensor, conv_inputs: Tensor) -> None:
    """Write the inputs of each chunk's last tokens to its state."""
    width = conv_inputs.shape[1]
    for age in range(width):
        # A chunk that is too short writes its first one again, to the same place.
        last = (layout.lens - 1 - age).clamp(min=0)
        conv_inputs[places, (layout.starts + last) % width] = x[layout.firsts + last]


def convolve(windows: list[Tensor], weight: Tensor) -> Tensor:
    """Return silu(sum of inputs x weights), each rounded to the dtype of the inputs: (num_tokens, conv_size)."""
    total = torch.zeros_like(windows[-1], dtype=torch.float32)
    for inputs, column in zip(windows, weight.unbind(1), strict=True):
        total += inputs.float() * column.float()
    return F.silu(total.to(windows[-1].dtype))


def split_heads(convolved: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values for each value head in float32, queries and keys normalised.

    Each is (num_tokens, num_value_heads, key_head_dim or value_head_dim).
    """
    _, num_heads, key_dim, value_dim = matrices.shape
    key_size = (convolved.shape[1] - num_heads * value_dim) // 2
    q, k, v = convolved.float().split([key_size, key_size, num_heads * value_dim], dim=1)
    q, k = (x.unflatten(1, (-1, key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    group = num_heads // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * key_dim**-0.5, k))
    return q, k, v.unflatten(1, (num_heads, value_dim))


def gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return g, the logarithm of the decay, and beta: (num_tokens, num_value_heads) float32 each."""
    b, a = ba.chunk(2, dim=1)
    g = -a_log.exp() * F.softplus(a.float() + dt_bias)
    return g, b.sigmoid().float()


def gated_norm(out: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return each head's RMSNorm times silu(z), (num_tokens, value_size). out: (num_tokens, num_value_heads, dim).

    The norm is rounded before it is multiplied by its weight, and after.
    """
    wide = out.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * wide.to(out.dtype)
    return (normed * F.silu(z.float()).view_as(out)).to(out.dtype).flatten(1)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, lens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return what the tokens read, (num_tokens, heads, value_dim), and the states after the last one of each sequence.

    q, k: (num_tokens, heads, key_dim); v: (num_tokens, heads, value_dim); g, beta: (num_tokens, heads); all float32.
    initial: (num_sequences, heads, key_dim, value_dim), the states before the first tokens. lens: of the sequences, end
    to end.
    """
    order, places, num_active = _chunks_of(lens, q.device)
    is_token = places >= 0
    gather = places.clamp(min=0)

    def chunked(x: Tensor) -> Tensor:  # (chunks, heads, CHUNK, ...), zero beyond a sequence's end
        return x[gather].masked_fill(~is_token.view(*is_token.shape, *(1,) * (x.dim() - 1)), 0).transpose(1, 2)

    q, k, v, g, beta = chunked(q), chunked(k), chunked(v), chunked(g), chunked(beta).unsqueeze(-1)
    total_decay = g.cumsum(-1)  # (chunks, heads, CHUNK)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total_decay.unsqueeze(-1) - total_decay.unsqueeze(-2)).masked_fill(upper, -torch.inf).exp()
    system = ((k * beta) @ k.transpose(-1, -2)) * decay
    scores = (q @ k.transpose(-1, -2)) * decay
    from_start = total_decay.exp().unsqueeze(-1)
    right = torch.cat((v * beta, k * beta * from_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read_keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q = q * from_start
    to_end = (total_decay[..., -1:] - total_decay).exp().unsqueeze(-1)
    k = (k * to_end).transpose(-1, -2)
    chunk_decay = total_decay[..., -1].exp()[..., None, None]

    states = initial[order]  # the longest sequences first
    outs = torch.empty_like(written)
    first = 0
    for count in num_active:
        now, active = slice(first, first + count), states[:count]
        new_values = written[now] - read_keys[now] @ active
        outs[now] = q[now] @ active + scores[now] @ new_values
        states[:count] = active * chunk_decay[now] + k[now] @ new_values
        first += count
    final = torch.empty_like(states)
    final[order] = states
    out = outs.transpose(1, 2)[is_token]  # by chunk and place
    return torch.empty_like(out).index_copy_(0, places[is_token], out), final


def _chunks_of(lens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Cut sequences into chunks, all first chunks before all second ones, and so on, the longest sequences first.

    Returns the sequences in that order, the tokens of each chunk (num_chunks, CHUNK) with -1 beyond the end, and how
    many sequences have a first chunk, a second one, and so on.
    """
    counts = [ceil_div(length, CHUNK) for length in lens]
    order = sorted(range(len(counts)), key=lambda index: -counts[index])
    num_active = [sum(count > number for count in counts) for number in range(max(counts))]
    sequences = torch.tensor([order[line] for count in num_active for line in range(count)], device=device)
    numbers = torch.tensor([number for number, count in enumerate(num_active) for _ in range(count)], device=device)
    offsets = numbers.unsqueeze(1) * CHUNK + torch.arange(CHUNK, device=device)  # (num_chunks, CHUNK)
    firsts, lengths = torch.tensor([[*accumulate(lens, initial=0)][:-1], lens], device=device)[:, sequences].unsqueeze(
        -1
    )
    places = torch.where(offsets < lengths, firsts + offsets, -1)
    return torch.tensor(order, device=device), places, num_active
