"""The gated delta rule over decode rows of several tokens.

As in a step of one token, a program holds the state of one head of a row in registers.

The value heads of a key head share the inputs of its query and its key, and the first of these heads keeps them. That
is no race, because the ring has places for all that a step reads and all that it writes. Keys, deltas and decays are
kept for each value head, so a program reads the pending ones and then overwrites them by those of its own lines.

Sums over a head run in float32, in an order that depends on the size of the head alone.
"""

import triton
import triton.language as tl

from nanoinfer.ops.delta_rule.triton import L2_EPS, gated_norm, gates, silu, step_options


@triton.jit
def _convolved(
    x_ptr,
    x_stride,
    pending_inputs_ptr,
    conv_inputs_ptr,
    weight_ptr,
    q_channel,
    k_channel,
    v_channel,
    is_key,
    is_value,
    line,
    position,
    is_pending,
    num_channels,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
):
    """Return the inputs of a line's query, key and value, and silu of their convolution in float32.

    x_ptr: to the line. Inputs of tokens before the row's first line come from one of two rings: the pending ones if
    there are any.
    """
    q, k = tl.zeros(q_channel.shape, tl.float32), tl.zeros(q_channel.shape, tl.float32)
    v = tl.zeros(v_channel.shape, tl.float32)
    for age in tl.static_range(WIDTH - 1, -1, -1):
        earlier = tl.maximum(position - age, 0)
        pending_ptr = pending_inputs_ptr + earlier % RING * num_channels
        earlier_ptr = tl.where(is_pending, pending_ptr, conv_inputs_ptr + earlier % WIDTH * num_channels)
        inputs_ptr = tl.where(line >= age, x_ptr - age * x_stride, earlier_ptr)
        column_ptr = weight_ptr + WIDTH - 1 - age
        q_inputs = tl.load(inputs_ptr + q_channel, mask=is_key, other=0.0)
        k_inputs = tl.load(inputs_ptr + k_channel, mask=is_key, other=0.0)
        v_inputs = tl.load(inputs_ptr + v_channel, mask=is_value, other=0.0)
        q_weight = tl.load(column_ptr + q_channel * WIDTH, mask=is_key, other=0.0)
        k_weight = tl.load(column_ptr + k_channel * WIDTH, mask=is_key, other=0.0)
        v_weight = tl.load(column_ptr + v_channel * WIDTH, mask=is_value, other=0.0)
        is_any = position >= age
        q += tl.where(is_any, q_inputs.to(tl.float32) * q_weight.to(tl.float32), 0.0)
        k += tl.where(is_any, k_inputs.to(tl.float32) * k_weight.to(tl.float32), 0.0)
        v += tl.where(is_any, v_inputs.to(tl.float32) * v_weight.to(tl.float32), 0.0)
    q, k, v = silu(q, q_inputs.dtype), silu(k, q_inputs.dtype), silu(v, q_inputs.dtype)
    return q_inputs, k_inputs, v_inputs, q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)


@triton.jit
def _copy_inputs(source_ptr, target_ptr, q_channel, k_channel, v_channel, q_mask, v_mask):
    """Copy the inputs of a token's channels."""
    tl.store(target_ptr + q_channel, tl.load(source_ptr + q_channel, mask=q_mask), mask=q_mask)
    tl.store(target_ptr + k_channel, tl.load(source_ptr + k_channel, mask=q_mask), mask=q_mask)
    tl.store(target_ptr + v_channel, tl.load(source_ptr + v_channel, mask=v_mask), mask=v_mask)


@triton.jit
def _with_pending(
    matrix,
    keys_ptr,
    deltas_ptr,
    decays_ptr,
    count,
    key_index,
    value_index,
    num_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
):
    """Return a head's state after `count` pending tokens; the pointers lead to the first one's values.

    Values are loaded a token ahead, so that they come while the one before is added.
    """
    is_key, is_value = key_index < key_dim, value_index < value_dim
    key = tl.load(keys_ptr + key_index, mask=is_key, other=0.0)
    delta = tl.load(deltas_ptr + value_index, mask=is_value, other=0.0)
    decay = tl.load(decays_ptr)
    for index in range(1, count + 1):
        next_head = tl.minimum(index, count - 1) * num_heads
        next_key = tl.load(keys_ptr + next_head * key_dim + key_index, mask=is_key, other=0.0)
        next_delta = tl.load(deltas_ptr + next_head * value_dim + value_index, mask=is_value, other=0.0)
        next_decay = tl.load(decays_ptr + next_head)
        matrix = matrix * decay + key.to(tl.float32)[:, None] * delta[None, :]
        key, delta, decay = next_key, next_delta, next_decay
    return matrix


@triton.jit(do_not_specialize=["num_lines"])  # or each number of lines would be compiled by itself
def _gated_delta_lines_kernel(
    qkvz_ptr,
    ba_ptr,
    rows_ptr,
    positions_ptr,
    num_row_tokens_ptr,
    matrices_ptr,
    conv_inputs_ptr,
    num_counted_ptr,
    first_positions_ptr,
    pending_inputs_ptr,
    keys_ptr,
    deltas_ptr,
    decays_ptr,
    conv_weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    out_ptr,
    qkvz_stride,
    ba_stride,
    rows_stride,
    num_lines,
    num_places,
    num_rows,  # of the tables, with the spare one
    num_channels,
    eps,
    q_scale,
    num_heads: tl.constexpr,  # value heads
    group: tl.constexpr,  # value heads of a key head
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    WIDTH: tl.constexpr,  # of the convolution
    MAX_LINES: tl.constexpr,
    RING: tl.constexpr,  # places for inputs of the convolution
    KEY_DIM: tl.constexpr,  # the dimensions, rounded up to powers of two
    VALUE_DIM: tl.constexpr,
):
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + index * rows_stride).to(tl.int64)
    place = tl.where(row < 0, row + num_places, row)
    row = tl.where(row < 0, row + num_rows, row)
    first = tl.load(positions_ptr + index * num_lines).to(tl.int32)
    count = tl.minimum(tl.load(num_counted_ptr + row), first)  # a padding row's may be any
    key_index, value_index = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    is_key, is_value = key_index < key_dim, value_index < value_dim

    # Asked for first of all, so that it comes while the rest of the inputs is computed.
    matrix_ptrs = matrices_ptr + (place * num_heads + head) * key_dim * value_dim
    matrix_ptrs += key_index[:, None] * value_dim + value_index[None, :]
    in_matrix = is_key[:, None] & is_value[None, :]
    matrix = tl.load(matrix_ptrs, mask=in_matrix, other=0.0)

    pending_head = row * MAX_LINES * num_heads + head
    keys_ptr += pending_head * key_dim
    deltas_ptr += pending_head * value_dim
    decays_ptr += pending_head
    matrix = tl.where(first > count, matrix, 0.0)
    matrix = _with_pending(
        matrix, keys_ptr, deltas_ptr, decays_ptr, count, key_index, value_index, num_heads, key_dim, value_dim
    )
    if count > 0:
        tl.store(matrix_ptrs, matrix, mask=in_matrix)

    key_size: tl.constexpr = num_heads // group * key_dim
    q_channel = head // group * key_dim + key_index
    k_channel = key_size + q_channel
    v_channel = 2 * key_size + head * value_dim + value_index
    keeps_key = key_index < tl.where(head % group == 0, key_dim, 0)
    pending_inputs_ptr += row * RING * num_channels
    conv_inputs_ptr += place * WIDTH * num_channels
    if count == 0:
        for age in tl.static_range(1, WIDTH):
            if age <= first:
                source_ptr = conv_inputs_ptr + (first - age) % WIDTH * num_channels
                target_ptr = pending_inputs_ptr + (first - age) % RING * num_channels
                _copy_inputs(source_ptr, target_ptr, q_channel, k_channel, v_channel, keeps_key, is_value)

    x_ptr = qkvz_ptr + index * num_lines * qkvz_stride
    ba_ptr += index * num_lines * ba_stride
    out_ptrs = out_ptr + (index * num_lines * num_heads + head) * value_dim + value_index
    norm_weight = tl.load(norm_weight_ptr + value_index, mask=is_value, other=0.0).to(tl.float32)
    num_row_tokens = tl.load(num_row_tokens_ptr + index)
    if head == 0:
        tl.store(first_positions_ptr + row, first.to(tl.int64))
    tl.debug_barrier()  # other threads may still read the pending tokens, which are overwritten from here on
    for line in range(num_row_tokens):
        position = first + line
        z = tl.load(x_ptr + num_channels + head * value_dim + value_index, mask=is_value, other=0.0).to(tl.float32)
        g, beta = gates(ba_ptr, a_log_ptr, dt_bias_ptr, head, num_heads, True)
        q_inputs, k_inputs, v_inputs, q, k, v = _convolved(
            x_ptr,
            qkvz_stride,
            pending_inputs_ptr,
            conv_inputs_ptr,
            conv_weight_ptr,
            q_channel,
            k_channel,
            v_channel,
            is_key,
            is_value,
            line,
            position,
            count > 0,
            num_channels,
            WIDTH,
            RING,
        )
        newest_ptr = pending_inputs_ptr + position % RING * num_channels
        tl.store(newest_ptr + q_channel, q_inputs, mask=keeps_key)
        tl.store(newest_ptr + k_channel, k_inputs, mask=keeps_key)
        tl.store(newest_ptr + v_channel, v_inputs, mask=is_value)

        q_factor = tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * q_scale
        k_factor = tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
        decay = tl.exp(g)
        matrix *= decay
        delta = (v - tl.sum(matrix * k[:, None], axis=0) * k_factor) * (beta * k_factor)
        matrix += k[:, None] * delta[None, :]
        tl.store(keys_ptr + key_index, k.to(keys_ptr.dtype.element_ty), mask=is_key)
        tl.store(deltas_ptr + value_index, delta, mask=is_value)
        tl.store(decays_ptr, decay)

        out = tl.sum(matrix * q[:, None], axis=0) * q_factor
        tl.store(out_ptrs, gated_norm(out, z, norm_weight, eps, value_dim, v_inputs.dtype), mask=is_value)
        x_ptr += qkvz_stride
        ba_ptr += ba_stride
        out_ptrs += num_heads * value_dim
        keys_ptr += num_heads * key_dim
        deltas_ptr += num_heads * value_dim
        decays_ptr += num_heads
    for _ in range(num_row_tokens, num_lines):
        tl.store(out_ptrs, tl.zeros_like(norm_weight).to(out_ptr.dtype.element_ty), mask=is_value)
        out_ptrs += num_heads * value_dim


@triton.jit
def _flush_pending_kernel(
    matrices_ptr,
    conv_inputs_ptr,
    rows_ptr,
    num_counted_ptr,
    first_positions_ptr,
    pending_inputs_ptr,
    keys_ptr,
    deltas_ptr,
    decays_ptr,
    rows_stride,
    num_places,
    num_rows,  # of the tables, with the spare one
    num_channels,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_LINES: tl.constexpr,
    RING: tl.constexpr,  # places for inputs of the convolution
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + tl.program_id(0) * rows_stride).to(tl.int64)
    place = tl.where(row < 0, row + num_places, row) + layer * num_places
    row = tl.where(row < 0, row + num_rows, row)
    count, first = tl.load(num_counted_ptr + row), tl.load(first_positions_ptr + row).to(tl.int32)
    if count == 0:
        return
    row += layer * num_rows
    key_index, value_index = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    is_key, is_value = key_index < key_dim, value_index < value_dim
    matrix_ptrs = matrices_ptr + (place * num_heads + head) * key_dim * value_dim
    matrix_ptrs += key_index[:, None] * value_dim + value_index[None, :]
    in_matrix = is_key[:, None] & is_value[None, :]
    matrix = tl.load(matrix_ptrs, mask=in_matrix, other=0.0)
    pending_head = row * MAX_LINES * num_heads + head
    keys_ptr += pending_head * key_dim
    deltas_ptr += pending_head * value_dim
    decays_ptr += pending_head
    matrix = tl.where(first > 0, matrix, 0.0)
    matrix = _with_pending(
        matrix, keys_ptr, deltas_ptr, decays_ptr, count, key_index, value_index, num_heads, key_dim, value_dim
    )
    tl.store(matrix_ptrs, matrix, mask=in_matrix)

    key_size: tl.constexpr = num_heads // group * key_dim
    q_channel = head // group * key_dim + key_index
    v_channel = 2 * key_size + head * value_dim + value_index
    keeps_key = key_index < tl.where(head % group == 0, key_dim, 0)
    last = first + count - 1
    for age in tl.static_range(WIDTH):
        if age <= last:
            source_ptr = pending_inputs_ptr + (row * RING + (last - age) % RING) * num_channels
            target_ptr = conv_inputs_ptr + (place * WIDTH + (last - age) % WIDTH) * num_channels
            _copy_inputs(source_ptr, target_ptr, q_channel, key_size + q_channel, v_channel, keeps_key, is_value)


def gated_delta_lines(qkvz, ba, rows, positions, num_row_tokens, pending, matrices, conv_inputs, weights):
    num_heads, value_dim = matrices.shape[1], matrices.shape[3]
    assert qkvz.stride(1) == 1, f"the rows of qkvz must be contiguous, strides {qkvz.stride()}"
    assert ba.stride(1) == 1, f"the rows of ba must be contiguous, strides {ba.stride()}"
    out = qkvz.new_empty(len(qkvz), num_heads * value_dim)
    if len(rows) == 0:
        return out
    _gated_delta_lines_kernel[(len(rows), num_heads)](
        *(qkvz, ba, rows, positions, num_row_tokens, matrices, conv_inputs, *pending),
        *(*weights[:4], out, qkvz.stride(0), ba.stride(0), rows.stride(0)),
        *(len(qkvz) // len(rows), len(matrices), len(pending.num_counted), len(weights.conv)),
        *(weights.eps, matrices.shape[2] ** -0.5),
        **_options(matrices, conv_inputs, pending),
    )
    return out


def flush_pending(matrices, conv_inputs, rows, pending):
    num_layers, num_places, num_heads = matrices.shape[:3]
    if len(rows) == 0:
        return
    _flush_pending_kernel[(len(rows), num_heads, num_layers)](
        *(matrices, conv_inputs, rows, *pending),
        *(rows.stride(0), num_places, len(pending.num_counted), conv_inputs.shape[-1]),
        **_options(matrices, conv_inputs, pending),
    )
    pending.num_counted[rows.long()] = 0


def _options(matrices, conv_inputs, pending):
    lines = {"MAX_LINES": pending.decays.shape[-2], "RING": pending.conv_inputs.shape[-2]}
    return {**step_options(matrices, conv_inputs), **lines}
