"""The gated delta rule, with the convolution before it and the gated norm after it. Rounds as the specification does.

A decode step is bound by reading and writing the states. So one program holds the whole state of one head of a row in
registers, and what is around it comes for nothing. Sums over a head run in float32, in an order that depends on the
size of the head alone. The value heads of a key head all read its query and key, and the first of them keeps their
inputs for later tokens. That is no race: the inputs of a position go to a place that a step at this position does not
read.

A prefill step has five kernels. Three of them go over all tokens once: the convolution, the inputs that it keeps, and
the gated norm. The two between them compute the chunks. The first prepares all chunks at once: it inverts the
triangular system of each chunk, and computes how much each token reads of what earlier ones of the chunk write. The
second goes through the chunks of a sequence in turn, with a part of the state of one head in registers.

Queries and keys stay in the model's dtype, as the convolution leaves them. They are normalised by factors for the rows
and columns of products, so a product of bfloat16 inputs is exact. A float32 operand is split into two bfloat16 parts,
which keep 16 bits: that takes two tensor-core products if the other operand is an input, and three if it is not. With
inputs of other dtypes, a product is made of three in TF32, which keeps about the precision of float32. Sums run over a
chunk and over a head's dimensions, in an order that depends on a sequence's own length alone.
"""

from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from nanoinfer.device import to_device
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import wait_for_inputs
from nanoinfer.ops.delta_rule import spec
from nanoinfer.ops.delta_rule.spec import CHUNK

BLOCK = 16  # lines of a system that are solved one by one
VALUE_BLOCK = 64  # value dimensions of a program
CHANNEL_BLOCK = 64  # of the convolution: channels of a program
KEPT_CHANNELS = 1024  # channels of a program that keeps inputs
HEAD_BLOCK = 16  # heads of a program that normalises outputs, of one token or several
L2_EPS = tl.constexpr(spec.L2_EPS)
# What differs from step to step, or the kernels would be compiled again for the first real steps: places in packets and
# in tables, and how many states there are, which an engine knows only when it has measured its memory.
CHANGING = ["rows_ptr", "num_places", "rows_stride"]


@triton.jit
def silu(x, dtype: tl.constexpr):
    """Return silu of float32 values in `dtype`, to which they are rounded before."""
    x = x.to(dtype).to(tl.float32)
    return (x * tl.sigmoid(x)).to(dtype)


@triton.jit
def gates(ba_ptr, a_log_ptr, dt_bias_ptr, head, num_heads, mask):
    """Return g, the logarithm of the decay, and beta in float32, each shaped as `ba_ptr`; zero where masked.

    ba_ptr: to the line of each token.
    """
    b = tl.load(ba_ptr + head, mask=mask, other=0.0)
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    a = tl.load(ba_ptr + num_heads + head, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
    g = -tl.exp(tl.load(a_log_ptr + head)) * softplus
    return tl.where(mask, g, 0.0), tl.where(mask, beta, 0.0)


@triton.jit
def gated_norm(out, z, weight, eps, size, dtype: tl.constexpr):
    """Return the RMSNorm of `out` over its last dimension, of `size` values and zeros, times silu(z), in `dtype`.

    All are float32. The norm is rounded before it is multiplied by its weight, and after, as PyTorch does it.
    """
    out = out.to(dtype).to(tl.float32)
    out *= tl.rsqrt(tl.sum(out * out, axis=-1, keep_dims=True) / size + eps)
    out = (out.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    return (out * (z * tl.sigmoid(z))).to(dtype)


@triton.jit
def _convolved(x_ptr, inputs_ptr, weight_ptr, channel, mask, position, num_channels, WIDTH: tl.constexpr):
    """Return the newest inputs of these channels, and silu of their convolution in float32."""
    x = tl.load(x_ptr + channel, mask=mask, other=0.0)
    total = tl.zeros(channel.shape, tl.float32)
    for index in tl.static_range(WIDTH - 1):
        earlier = position - (WIDTH - 1 - index)
        inputs_ptrs = inputs_ptr + (earlier + WIDTH) % WIDTH * num_channels + channel
        inputs = tl.load(inputs_ptrs, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + index, mask=mask, other=0.0)
        inputs = tl.where(earlier >= 0, inputs.to(tl.float32), 0.0)
        total += inputs * weight.to(tl.float32)
    total += x.to(tl.float32) * tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    return x, silu(total, x.dtype).to(tl.float32)


@triton.jit
def _gated_delta_step_kernel(
    qkvz_ptr,
    ba_ptr,
    rows_ptr,
    positions_ptr,
    matrices_ptr,
    conv_inputs_ptr,
    conv_weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    out_ptr,
    qkvz_stride,
    ba_stride,
    rows_stride,
    num_places,
    num_channels,
    eps,
    q_scale,
    num_heads: tl.constexpr,  # value heads
    group: tl.constexpr,  # value heads of a key head
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    WIDTH: tl.constexpr,  # of the convolution
    KEY_DIM: tl.constexpr,  # the dimensions, rounded up to powers of two
    VALUE_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    line, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // group
    place = tl.load(rows_ptr + line * rows_stride).to(tl.int64)
    place = tl.where(place < 0, place + num_places, place)
    position = tl.load(positions_ptr + line)
    key_index, value_index = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    is_key, is_value = key_index < key_dim, value_index < value_dim

    # Asked for first of all, so that it comes while the rest of the inputs is computed. It and the rows are older than
    # the step's embeddings, which a kernel looks up that begins when all before it are done.
    matrix_ptrs = matrices_ptr + (place * num_heads + head) * key_dim * value_dim
    matrix_ptrs += key_index[:, None] * value_dim + value_index[None, :]
    in_matrix = is_key[:, None] & is_value[None, :]
    matrix = tl.load(matrix_ptrs, mask=in_matrix, other=0.0)
    wait_for_inputs(OVERLAP)

    x_ptr = qkvz_ptr + line * qkvz_stride
    inputs_ptr = conv_inputs_ptr + place * WIDTH * num_channels
    key_size = num_heads // group * key_dim
    q_channel = key_head * key_dim + key_index
    k_channel = key_size + q_channel
    v_channel = 2 * key_size + head * value_dim + value_index
    q_inputs, q = _convolved(x_ptr, inputs_ptr, conv_weight_ptr, q_channel, is_key, position, num_channels, WIDTH=WIDTH)
    k_inputs, k = _convolved(x_ptr, inputs_ptr, conv_weight_ptr, k_channel, is_key, position, num_channels, WIDTH=WIDTH)
    v_inputs, v = _convolved(
        x_ptr, inputs_ptr, conv_weight_ptr, v_channel, is_value, position, num_channels, WIDTH=WIDTH
    )
    newest_ptr = inputs_ptr + position % WIDTH * num_channels
    if head % group == 0:
        tl.store(newest_ptr + q_channel, q_inputs, mask=is_key)
        tl.store(newest_ptr + k_channel, k_inputs, mask=is_key)
    tl.store(newest_ptr + v_channel, v_inputs, mask=is_value)

    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * q_scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
    g, beta = gates(ba_ptr + line * ba_stride, a_log_ptr, dt_bias_ptr, head, num_heads, True)

    matrix = tl.where(position > 0, matrix, 0.0) * tl.exp(g)
    delta = (v - tl.sum(matrix * k[:, None], axis=0)) * beta
    matrix += k[:, None] * delta[None, :]
    tl.store(matrix_ptrs, matrix, mask=in_matrix)

    out = tl.sum(matrix * q[:, None], axis=0)
    weight = tl.load(norm_weight_ptr + value_index, mask=is_value, other=0.0).to(tl.float32)
    z = tl.load(x_ptr + num_channels + head * value_dim + value_index, mask=is_value, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + (line * num_heads + head) * value_dim + value_index
    tl.store(out_ptrs, gated_norm(out, z, weight, eps, value_dim, v_inputs.dtype), mask=is_value)


@triton.jit(do_not_specialize=["chunks_ptr", *CHANGING])
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


@triton.jit(do_not_specialize=CHANGING)
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


@triton.jit
def _split(x):
    """Return two bfloat16 tensors whose sum is x, to 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _inputs_dot(inputs, x, total):
    """Return total + inputs @ x in float32. inputs: in the model's dtype; x: float32."""
    if inputs.dtype == tl.bfloat16:
        high, low = _split(x)
        return tl.dot(inputs, high, tl.dot(inputs, low, total))
    else:
        return tl.dot(inputs.to(tl.float32), x, total, input_precision="tf32x3")


@triton.jit
def _wide_dot(x, y, total, IN_PARTS: tl.constexpr):
    """Return total + x @ y; all are float32. IN_PARTS: whether x and y are cut into parts in bfloat16."""
    if IN_PARTS:
        x_high, x_low = _split(x)
        y_high, y_low = _split(y)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high, total)))
    else:
        return tl.dot(x, y, total, input_precision="tf32x3")


@triton.jit
def _join_pairs(inverse, system, SIZE: tl.constexpr, IN_PARTS: tl.constexpr):
    """Return the inverses of the blocks of 2 * SIZE on the diagonal of 1 + system. inverse: of those of SIZE.

    The inverse of ((A, 0), (B, C)) has -C^-1 B A^-1 in the place of B.
    """
    block = tl.arange(0, inverse.shape[0]) // SIZE
    is_joint = (block[:, None] // 2 == block[None, :] // 2) & (block[:, None] != block[None, :])
    zeros = tl.zeros_like(inverse)
    left = _wide_dot(inverse, tl.where(is_joint, system, 0.0), zeros, IN_PARTS)
    return inverse - _wide_dot(left, inverse, zeros, IN_PARTS)


@triton.jit
def _invert(system, CHUNK: tl.constexpr, BLOCK: tl.constexpr, IN_PARTS: tl.constexpr):
    """Return the inverse of 1 + system, which is zero on and above its diagonal.

    It inverts four blocks on the diagonal by forward substitution, and joins them by products. Powers of the system
    would cancel each other where keys repeat.
    """
    tl.static_assert(CHUNK == 4 * BLOCK)
    index, line, number = tl.arange(0, CHUNK), tl.arange(0, BLOCK), tl.arange(0, CHUNK // BLOCK)
    is_diagonal = (number[:, None] == number[None, :])[:, None, :, None]
    blocks = tl.reshape(system, (CHUNK // BLOCK, BLOCK, CHUNK // BLOCK, BLOCK))
    solved = -tl.sum(tl.where(is_diagonal, blocks, 0.0), axis=2)  # (CHUNK // BLOCK, BLOCK, BLOCK)
    for row in range(1, BLOCK):
        is_row = (line == row)[None, :, None]
        factors = tl.sum(tl.where(is_row, solved, 0.0), axis=1)
        factors += tl.sum(factors[:, :, None] * solved, axis=1)
        solved = tl.where(is_row, factors[:, None, :], solved)
    inverse = tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    inverse += tl.where(index[:, None] == index[None, :], 1.0, 0.0)

    inverse = _join_pairs(inverse, system, BLOCK, IN_PARTS)
    return _join_pairs(inverse, system, 2 * BLOCK, IN_PARTS)


@triton.jit(do_not_specialize=["chunks_ptr", "num_tokens"])  # or a step of another size compiles it again
def _prepare_chunks_kernel(
    qkv_ptr,
    ba_ptr,
    a_log_ptr,
    dt_bias_ptr,
    sequences_ptr,
    chunks_ptr,
    inverse_ptr,
    scores_ptr,
    factors_ptr,
    num_tokens,
    num_channels,
    ba_stride,
    q_scale,
    num_heads: tl.constexpr,  # value heads
    group: tl.constexpr,  # value heads of a key head
    key_dim: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,  # key_dim, rounded up to a power of two
    IN_PARTS: tl.constexpr,  # whether inputs are bfloat16
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    sequence, offset = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    first = (tl.load(sequences_ptr + 3 * sequence) + offset).to(tl.int64)
    count = tl.load(sequences_ptr + 3 * sequence + 1) - offset
    index, key_index = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    is_token = index < count
    tokens = first + index
    in_tile = is_token[:, None] & (key_index < key_dim)[None, :]
    q_ptrs = qkv_ptr + tokens[:, None] * num_channels + (head // group * key_dim + key_index)[None, :]
    q = tl.load(q_ptrs, mask=in_tile, other=0.0)
    k = tl.load(q_ptrs + num_heads // group * key_dim, mask=in_tile, other=0.0)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + L2_EPS) * q_scale
    k_factor = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + L2_EPS)
    g, beta = gates(ba_ptr + tokens * ba_stride, a_log_ptr, dt_bias_ptr, head, num_heads, is_token)
    total_decay, chunk_decay = tl.cumsum(g, axis=0), tl.sum(g, axis=0)

    is_before, is_earlier = index[None, :] <= index[:, None], index[None, :] < index[:, None]
    decay = tl.exp(tl.where(is_before, total_decay[:, None] - total_decay[None, :], 0.0)) * k_factor[None, :]
    precision: tl.constexpr = "tf32x3"  # of no effect on inputs in 16 bits, whose products are exact
    system = tl.dot(k, tl.trans(k), input_precision=precision) * decay * (k_factor * beta)[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * decay * q_factor[:, None]
    inverse = _invert(tl.where(is_earlier, system, 0.0), CHUNK, BLOCK, IN_PARTS) * beta[None, :]
    tile = (tokens * num_heads + head)[:, None] * CHUNK + index[None, :]
    tl.store(inverse_ptr + tile, inverse, mask=is_token[:, None])
    tl.store(scores_ptr + tile, tl.where(is_before, scores, 0.0), mask=is_token[:, None])

    factor_ptrs = factors_ptr + head * num_tokens + tokens
    size = num_heads * num_tokens
    tl.store(factor_ptrs, q_factor * tl.exp(total_decay), mask=is_token)
    tl.store(factor_ptrs + size, k_factor * tl.exp(total_decay), mask=is_token)
    tl.store(factor_ptrs + 2 * size, k_factor * tl.exp(chunk_decay - total_decay), mask=is_token)
    tl.store(factor_ptrs + 3 * size, tl.exp(total_decay), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", *CHANGING])
def _pass_states_kernel(
    qkv_ptr,
    inverse_ptr,
    scores_ptr,
    factors_ptr,
    sequences_ptr,
    rows_ptr,
    matrices_ptr,
    out_ptr,
    num_tokens,
    num_channels,
    num_places,
    rows_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    # Programs that read the same queries, keys and scores follow each other.
    value_block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, length = tl.load(sequences_ptr + 3 * sequence).to(tl.int64), tl.load(sequences_ptr + 3 * sequence + 1)
    place = tl.load(rows_ptr + sequence * rows_stride).to(tl.int64)
    place = tl.where(place < 0, place + num_places, place)
    index, key_index = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    value_index = value_block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_key, is_value = key_index < key_dim, value_index < value_dim
    in_state = is_key[:, None] & is_value[None, :]
    state_ptrs = matrices_ptr + (place * num_heads + head) * key_dim * value_dim
    state_ptrs += key_index[:, None] * value_dim + value_index[None, :]
    state = tl.zeros((KEY_DIM, VALUE_BLOCK), tl.float32)
    if tl.load(sequences_ptr + 3 * sequence + 2) > 0:  # some of its tokens came before
        state = tl.load(state_ptrs, mask=in_state, other=0.0)

    # Pointers to a chunk's first token go through the sequence; what is added to them stays, in few registers.
    key_size: tl.constexpr = num_heads // group * key_dim
    q_ptr = qkv_ptr + first * num_channels + head // group * key_dim
    v_ptr = qkv_ptr + first * num_channels + 2 * key_size + head * value_dim
    inverse_ptr += (first * num_heads + head) * CHUNK
    scores_ptr += (first * num_heads + head) * CHUNK
    factors_ptr += head * num_tokens + first
    out_ptr += (first * num_heads + head) * value_dim
    plane = num_heads * num_tokens
    of_keys = index[:, None] * num_channels + key_index[None, :]
    of_values = index[:, None] * num_channels + value_index[None, :]
    of_tile = index[:, None] * (num_heads * CHUNK) + index[None, :]
    of_out = index[:, None] * (num_heads * value_dim) + value_index[None, :]
    zeros = tl.zeros((CHUNK, VALUE_BLOCK), tl.float32)
    for start in range(0, length, CHUNK):
        is_token = index < length - start
        in_keys, in_values = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
        k = tl.load(q_ptr + key_size + of_keys, mask=in_keys, other=0.0)
        v = tl.load(v_ptr + of_values, mask=in_values, other=0.0)
        inverse = tl.load(inverse_ptr + of_tile, mask=is_token[:, None], other=0.0)
        q = tl.load(q_ptr + of_keys, mask=in_keys, other=0.0)
        scores = tl.load(scores_ptr + of_tile, mask=is_token[:, None], other=0.0)
        q_factor = tl.load(factors_ptr + index, mask=is_token, other=0.0)
        k_factor = tl.load(factors_ptr + plane + index, mask=is_token, other=0.0)
        to_end = tl.load(factors_ptr + 2 * plane + index, mask=is_token, other=0.0)
        chunk_decay = tl.load(factors_ptr + 3 * plane + tl.minimum(CHUNK, length - start) - 1)

        delta = v.to(tl.float32) - _inputs_dot(k, state, zeros) * k_factor[:, None]
        written = _wide_dot(inverse, delta, zeros, IN_PARTS)
        out = _wide_dot(scores, written, _inputs_dot(q, state, zeros) * q_factor[:, None], IN_PARTS)
        tl.store(out_ptr + of_out, out.to(v.dtype), mask=in_values)
        state = _inputs_dot(tl.trans(k), written * to_end[:, None], state * chunk_decay)
        q_ptr += CHUNK * num_channels
        v_ptr += CHUNK * num_channels
        inverse_ptr += CHUNK * num_heads * CHUNK
        scores_ptr += CHUNK * num_heads * CHUNK
        factors_ptr += CHUNK
        out_ptr += CHUNK * num_heads * value_dim
    tl.store(state_ptrs, state, mask=in_state)


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


def gated_delta_step(qkvz, ba, rows, positions, matrices, conv_inputs, weights):
    num_places, num_heads, key_dim, value_dim = matrices.shape
    assert qkvz.stride(1) == 1, f"the rows of qkvz must be contiguous, strides {qkvz.stride()}"
    assert ba.stride(1) == 1, f"the rows of ba must be contiguous, strides {ba.stride()}"
    out = qkvz.new_empty(len(qkvz), num_heads * value_dim)
    if len(qkvz) == 0:
        return out
    _gated_delta_step_kernel[(len(qkvz), num_heads)](
        qkvz,
        ba,
        rows,
        positions,
        matrices,
        conv_inputs,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        out,
        qkvz.stride(0),
        ba.stride(0),
        rows.stride(0),
        num_places,
        len(weights.conv),
        weights.eps,
        key_dim**-0.5,
        **step_options(matrices, conv_inputs),
        **overlap_options(qkvz.device),
    )
    return out


def step_options(matrices, conv_inputs):
    """Return the constants and options of kernels whose programs hold a head's state.

    matrices, conv_inputs: of one layer, or of all.
    """
    num_heads, key_dim, value_dim = matrices.shape[-3:]
    width, num_channels = conv_inputs.shape[-2:]
    padded = next_power_of_2(key_dim), next_power_of_2(value_dim)
    return {
        "num_heads": num_heads,
        "group": num_heads * 2 * key_dim // (num_channels - num_heads * value_dim),
        "key_dim": key_dim,
        "value_dim": value_dim,
        "WIDTH": width,
        "KEY_DIM": padded[0],
        "VALUE_DIM": padded[1],
        # With more threads than a head has dimensions, Triton has each of them load q and k again for its own part.
        "num_warps": max(1, min(8, padded[0] * padded[1] // 4096)),
    }


def gated_delta_prefill(qkvz, ba, rows, query_lens, context_lens, matrices, conv_inputs, weights):
    num_heads, value_dim = matrices.shape[1], matrices.shape[3]
    num_channels, width = weights.conv.shape
    assert qkvz.stride(1) == 1, f"the rows of qkvz must be contiguous, strides {qkvz.stride()}"
    assert ba.stride(1) == 1, f"the rows of ba must be contiguous, strides {ba.stride()}"
    stream = driver.active.get_current_stream(qkvz.get_device()) if qkvz.is_cuda else 0
    sequences, chunks = _tables(query_lens, context_lens, qkvz.device, stream)
    qkv, out = qkvz.new_empty(len(qkvz), num_channels), qkvz.new_empty(len(qkvz), num_heads * value_dim)
    _convolve_kernel[(len(chunks), triton.cdiv(num_channels, CHANNEL_BLOCK))](
        *(qkvz, conv_inputs, weights.conv, rows, sequences, chunks, qkv),
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
    read = _chunked_delta_rule(qkv, ba, weights.a_log, weights.dt_bias, matrices, rows, sequences, chunks)
    num_lines = len(qkvz) * num_heads
    _gated_norm_kernel[(triton.cdiv(num_lines, HEAD_BLOCK),)](
        *(read, qkvz, weights.norm, out, num_lines, num_channels, qkvz.stride(0), weights.eps),
        num_heads=num_heads,
        value_dim=value_dim,
        HEAD_BLOCK=HEAD_BLOCK,
        VALUE_DIM=next_power_of_2(value_dim),
    )
    return out


@lru_cache(maxsize=1)  # all layers of a step ask for the same
def _tables(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    """Return the first token, the number of tokens and the first position of each sequence, (num_sequences, 3) int32.

    And of each of their chunks the sequence and its first token's place there, (num_chunks, 2) int32. stream: the
    handle of the current stream. Another one would have to wait for the copy, so it gets tables of its own.
    """
    sequences = [
        (first, length, context - length)
        for first, length, context in zip(accumulate(query_lens, initial=0), query_lens, context_lens, strict=False)
    ]
    chunks = [(sequence, offset) for sequence, length in enumerate(query_lens) for offset in range(0, length, CHUNK)]
    numbers = [number for line in (*sequences, *chunks) for number in line]
    table = to_device(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device)
    return table[: 3 * len(sequences)].view(-1, 3), table[3 * len(sequences) :].view(-1, 2)


def _chunked_delta_rule(qkv, ba, a_log, dt_bias, matrices, rows, sequences, chunks):
    """Return what the tokens read, (num_tokens, num_value_heads, value_dim), and leave the states as they are then.

    qkv: (num_tokens, conv_size), after the convolution. sequences, chunks: from `_tables`. All are contiguous but ba,
    whose rows are, and rows.
    """
    num_heads, key_dim, value_dim = matrices.shape[1:]
    (num_tokens, num_channels), num_key_heads = qkv.shape, (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    shape = num_tokens, num_heads, CHUNK
    inverse, scores = (qkv.new_empty(shape, dtype=torch.float32) for _ in range(2))
    factors = inverse.new_empty(4, num_heads, num_tokens)
    out = qkv.new_empty(num_tokens, num_heads, value_dim)
    value_block = max(16, min(VALUE_BLOCK, next_power_of_2(value_dim)))
    options = {
        "num_heads": num_heads,
        "group": num_heads // num_key_heads,
        "key_dim": key_dim,
        "CHUNK": CHUNK,
        "KEY_DIM": max(16, next_power_of_2(key_dim)),
        "IN_PARTS": qkv.dtype == torch.bfloat16,
    }
    _prepare_chunks_kernel[(len(chunks), num_heads)](
        *(qkv, ba, a_log, dt_bias, sequences, chunks, inverse, scores, factors),
        *(num_tokens, num_channels, ba.stride(0), key_dim**-0.5),
        **options,
        BLOCK=BLOCK,
        num_warps=4,
    )
    # Loads a step ahead would take more shared memory than GPUs before Hopper have.
    _pass_states_kernel[(triton.cdiv(value_dim, value_block), num_heads, len(sequences))](
        *(qkv, inverse, scores, factors, sequences, rows, matrices, out),
        *(num_tokens, num_channels, len(matrices), rows.stride(0)),
        **options,
        value_dim=value_dim,
        VALUE_BLOCK=value_block,
        num_warps=4,
        num_stages=1,
    )
    return out
