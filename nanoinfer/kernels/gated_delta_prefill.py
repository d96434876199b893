"""The gated delta rule over a prefill step, with the convolution before it and the gated norm after it.

Twin: `gated_delta_prefill` in `layers/linear_attention/delta_rule.py`. The kernels here go over all tokens once each;
`chunked_delta_rule.py` has those between them.
"""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.device import to_device
from nanoinfer.kernels.chunked_delta_rule import CHUNK, chunked_delta_rule
from nanoinfer.kernels.gated_delta_math import gated_norm, silu
from nanoinfer.ops.common.device_properties import next_power_of_2

CHANNEL_BLOCK = 64  # of the convolution: channels of a program
KEPT_CHANNELS = 1024  # channels of a program that keeps inputs
HEAD_BLOCK = 16  # heads of a program that normalises outputs, of one token or several


@triton.jit(do_not_specialize=["chunks_ptr"])  # or a step of another size compiles it again
def _convolve_kernel(
    qkvz_ptr,
    conv_inputs_ptr,
    weight_ptr,
    rows_ptr,
    sequences_ptr,
    chunks_ptr,
    out_ptr,
    qkvz_stride,
    num_places,
    rows_stride,
    num_channels,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    sequence, offset = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    first, length = tl.load(sequences_ptr + 3 * sequence).to(tl.int64), tl.load(sequences_ptr + 3 * sequence + 1)
    index = offset + tl.arange(0, CHUNK)  # of the tokens in their sequence
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    is_token, is_channel = (index < length)[:, None], (channel < num_channels)[None, :]
    x_ptrs = qkvz_ptr + (first + index)[:, None] * qkvz_stride + channel[None, :]
    total = tl.zeros((CHUNK, CHANNEL_BLOCK), tl.float32)
    for age in tl.static_range(WIDTH - 1, -1, -1):
        is_here = is_token & (index >= age)[:, None]
        inputs = tl.load(x_ptrs - age * qkvz_stride, mask=is_here & is_channel, other=0.0).to(tl.float32)
        if offset == 0 and age > 0:  # these may be of an earlier step
            place = tl.load(rows_ptr + sequence * rows_stride).to(tl.int64)
            place = tl.where(place < 0, place + num_places, place)
            position = tl.load(sequences_ptr + 3 * sequence + 2) + index - age
            kept_ptrs = conv_inputs_ptr + place * WIDTH * num_channels + channel[None, :]
            kept_ptrs += ((position + WIDTH) % WIDTH)[:, None] * num_channels
            is_kept = is_token & ((index < age) & (position >= 0))[:, None]
            inputs += tl.load(kept_ptrs, mask=is_kept & is_channel, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - age, mask=channel < num_channels, other=0.0)
        total += inputs * weight.to(tl.float32)[None, :]
    out_ptrs = out_ptr + (first + index)[:, None] * num_channels + channel[None, :]
    tl.store(out_ptrs, silu(total, out_ptr.dtype.element_ty), mask=is_token & is_channel)


@triton.jit
def _keep_inputs_kernel(
    qkvz_ptr,
    conv_inputs_ptr,
    rows_ptr,
    sequences_ptr,
    qkvz_stride,
    num_places,
    rows_stride,
    num_channels,
    WIDTH: tl.constexpr,
    KEPT_CHANNELS: tl.constexpr,
):
    sequence = tl.program_id(0)
    first, length = tl.load(sequences_ptr + 3 * sequence).to(tl.int64), tl.load(sequences_ptr + 3 * sequence + 1)
    start = tl.load(sequences_ptr + 3 * sequence + 2)
    place = tl.load(rows_ptr + sequence * rows_stride).to(tl.int64)
    place = tl.where(place < 0, place + num_places, place)
    channel = tl.program_id(1) * KEPT_CHANNELS + tl.arange(0, KEPT_CHANNELS)
    for age in tl.static_range(WIDTH):
        if age < length:
            index = length - 1 - age
            inputs = tl.load(qkvz_ptr + (first + index) * qkvz_stride + channel, mask=channel < num_channels)
            kept_ptr = conv_inputs_ptr + (place * WIDTH + (start + index) % WIDTH) * num_channels
            tl.store(kept_ptr + channel, inputs, mask=channel < num_channels)


@triton.jit(do_not_specialize=["num_lines"])
def _gated_norm_kernel(
    x_ptr,
    qkvz_ptr,
    weight_ptr,
    out_ptr,
    num_lines,
    num_channels,
    qkvz_stride,
    eps,
    num_heads: tl.constexpr,
    value_dim: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # value_dim, rounded up to a power of two
):
    line = tl.program_id(0).to(tl.int64) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)  # a head of a token
    value_index = tl.arange(0, VALUE_DIM)
    mask = (line < num_lines)[:, None] & (value_index < value_dim)[None, :]
    index = line[:, None] * value_dim + value_index[None, :]
    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    z_ptrs = qkvz_ptr + (line // num_heads * qkvz_stride + num_channels + line % num_heads * value_dim)[:, None]
    z = tl.load(z_ptrs + value_index[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + value_index, mask=value_index < value_dim, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, gated_norm(x.to(tl.float32), z, weight[None, :], eps, value_dim, x.dtype), mask=mask)


def gated_delta_prefill(
    qkvz: Tensor,
    ba: Tensor,
    rows: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    matrices: Tensor,
    conv_inputs: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Compute the tokens of a prefill step, and update the states in place.

    qkvz: (num_tokens, conv_size + value_size), rows contiguous. ba: (num_tokens, 2 * num_value_heads), likewise. rows:
    (num_sequences,) int32, places of states; -1 is the last. query_lens: tokens of each sequence, end to end.
    context_lens: the same with tokens of earlier steps; a sequence without those ignores its old state. The others:
    see `gated_delta_step`. Returns (num_tokens, value_size).
    """
    num_heads, value_dim = matrices.shape[1], matrices.shape[3]
    num_channels, width = conv_weight.shape
    assert qkvz.stride(1) == 1, f"the rows of qkvz must be contiguous, strides {qkvz.stride()}"
    assert ba.stride(1) == 1, f"the rows of ba must be contiguous, strides {ba.stride()}"
    sequences, chunks = _tables(query_lens, context_lens, qkvz.device)
    qkv, out = qkvz.new_empty(len(qkvz), num_channels), qkvz.new_empty(len(qkvz), num_heads * value_dim)
    _convolve_kernel[(len(chunks), triton.cdiv(num_channels, CHANNEL_BLOCK))](
        *(qkvz, conv_inputs, conv_weight, rows, sequences, chunks, qkv),
        *(qkvz.stride(0), len(conv_inputs), rows.stride(0), num_channels),
        WIDTH=width,
        CHUNK=CHUNK,
        CHANNEL_BLOCK=CHANNEL_BLOCK,
    )
    # Not by the first kernel: its other programs may not have read yet what this overwrites.
    _keep_inputs_kernel[(len(sequences), triton.cdiv(num_channels, KEPT_CHANNELS))](
        *(qkvz, conv_inputs, rows, sequences, qkvz.stride(0), len(conv_inputs), rows.stride(0), num_channels),
        WIDTH=width,
        KEPT_CHANNELS=KEPT_CHANNELS,
    )
    read = chunked_delta_rule(qkv, ba, a_log, dt_bias, matrices, rows, sequences, chunks)
    num_lines = len(qkvz) * num_heads
    _gated_norm_kernel[(triton.cdiv(num_lines, HEAD_BLOCK),)](
        *(read, qkvz, norm_weight, out, num_lines, num_channels, qkvz.stride(0), eps),
        num_heads=num_heads,
        value_dim=value_dim,
        HEAD_BLOCK=HEAD_BLOCK,
        VALUE_DIM=next_power_of_2(value_dim),
    )
    return out


def _tables(query_lens: tuple[int, ...], context_lens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first token, the number of tokens and the first position of each sequence, (num_sequences, 3) int32.

    And of each of their chunks the sequence and its first token's place there, (num_chunks, 2) int32.
    """
    sequences = [
        (first, length, context - length)
        for first, length, context in zip(accumulate(query_lens, initial=0), query_lens, context_lens, strict=False)
    ]
    chunks = [(sequence, offset) for sequence, length in enumerate(query_lens) for offset in range(0, length, CHUNK)]
    numbers = [number for line in (*sequences, *chunks) for number in line]
    table = to_device(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device)
    return table[: 3 * len(sequences)].view(-1, 3), table[3 * len(sequences) :].view(-1, 2)
