"""One step of the gated delta rule for each row, with the convolution before it and the gated norm after it.

Twin: `gated_delta_step` in `layers/linear_attention/delta_rule.py`. A step is bound by reading and writing the states,
so one program holds the whole state of one head of a row in registers, and what is around it comes for nothing. Sums
over a head run in float32, in an order that depends on the size of the head alone.

The value heads of a key head all read its query and key, and the first of them keeps their inputs for later tokens.
That is no race: the inputs of a position go to a place that a step at this position does not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.gated_delta_math import L2_EPS, gated_norm, gates, silu
from nanoinfer.ops.common.device_properties import next_power_of_2


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
):
    line, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // group
    place = tl.load(rows_ptr + line * rows_stride).to(tl.int64)
    place = tl.where(place < 0, place + num_places, place)
    position = tl.load(positions_ptr + line)
    key_index, value_index = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    is_key, is_value = key_index < key_dim, value_index < value_dim

    # Asked for first of all, so that it comes while the rest of the inputs is computed.
    matrix_ptrs = matrices_ptr + (place * num_heads + head) * key_dim * value_dim
    matrix_ptrs += key_index[:, None] * value_dim + value_index[None, :]
    in_matrix = is_key[:, None] & is_value[None, :]
    matrix = tl.load(matrix_ptrs, mask=in_matrix, other=0.0)

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


def gated_delta_step(
    qkvz: Tensor,
    ba: Tensor,
    rows: Tensor,
    positions: Tensor,
    matrices: Tensor,
    conv_inputs: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Compute one token of each row, and leave the states as they are after it.

    qkvz: (num_rows, conv_size + value_size), rows contiguous. ba: (num_rows, 2 * num_value_heads), likewise. rows:
    (num_rows,) int32; -1 is the last place. positions: (num_rows,) int64, contiguous. matrices: (num_places,
    num_value_heads, key_head_dim, value_head_dim) float32. conv_inputs: (num_places, conv_width, conv_size).
    conv_weight: (conv_size, conv_width). a_log, dt_bias: (num_value_heads,) float32. norm_weight: (value_head_dim,).
    These are contiguous. Returns (num_rows, value_size).
    """
    num_places, num_heads, key_dim, value_dim = matrices.shape
    num_channels, width = conv_weight.shape
    assert qkvz.stride(1) == 1, f"the rows of qkvz must be contiguous, strides {qkvz.stride()}"
    assert ba.stride(1) == 1, f"the rows of ba must be contiguous, strides {ba.stride()}"
    out = qkvz.new_empty(len(qkvz), num_heads * value_dim)
    if len(qkvz) == 0:
        return out
    padded = next_power_of_2(key_dim), next_power_of_2(value_dim)
    _gated_delta_step_kernel[(len(qkvz), num_heads)](
        qkvz,
        ba,
        rows,
        positions,
        matrices,
        conv_inputs,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        out,
        qkvz.stride(0),
        ba.stride(0),
        rows.stride(0),
        num_places,
        num_channels,
        eps,
        key_dim**-0.5,
        num_heads=num_heads,
        group=num_heads * 2 * key_dim // (num_channels - num_heads * value_dim),
        key_dim=key_dim,
        value_dim=value_dim,
        WIDTH=width,
        KEY_DIM=padded[0],
        VALUE_DIM=padded[1],
        # With more threads than a head has dimensions, Triton has each of them load q and k again for its own part.
        num_warps=max(1, min(8, padded[0] * padded[1] // 4096)),
    )
    return out
