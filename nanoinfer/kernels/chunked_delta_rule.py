"""The gated delta rule over the chunks of a prefill step: a part of `gated_delta_prefill.py`.

Two kernels. The first prepares the chunks, all at once: it inverts the triangular system of each chunk, and computes
how much each token reads of what earlier ones of the chunk write. The second goes through the chunks of a sequence in
turn, with a part of the state of one head in registers.

Queries and keys stay in the model's dtype, as the convolution leaves them. They are normalised by factors for the rows
and columns of products, so a product of bfloat16 inputs is exact. A float32 operand is split into two bfloat16 parts,
which keep 16 bits: that takes two tensor-core products if the other operand is an input, and three if it is not. With
inputs of other dtypes, a product is made of three in TF32, which keeps about the precision of float32. Sums run over a
chunk and over a head's dimensions, in an order that depends on a sequence's own length alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.gated_delta_math import L2_EPS, gates
from nanoinfer.ops.common.device_properties import next_power_of_2

CHUNK = 64  # tokens
BLOCK = 16  # lines of a system that are solved one by one
VALUE_BLOCK = 64  # value dimensions of a program


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


@triton.jit(do_not_specialize=["num_tokens"])
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


def chunked_delta_rule(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    matrices: Tensor,
    rows: Tensor,
    sequences: Tensor,
    chunks: Tensor,
) -> Tensor:
    """Return what the tokens read, (num_tokens, num_value_heads, value_dim), and leave the states as they are then.

    qkv: (num_tokens, conv_size), after the convolution. sequences, chunks: see `gated_delta_prefill`. All are
    contiguous but ba, whose rows are, and rows.
    """
    num_heads, key_dim, value_dim = matrices.shape[1:]
    (num_tokens, num_channels), num_key_heads = qkv.shape, (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    shape = num_tokens, num_heads, CHUNK
    inverse, scores = (torch.empty(shape, dtype=torch.float32, device=qkv.device) for _ in range(2))
    factors = torch.empty(4, num_heads, num_tokens, dtype=torch.float32, device=qkv.device)
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
