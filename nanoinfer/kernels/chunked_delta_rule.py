"""The gated delta rule over chunks of a prefill step. Twin: `chunked_delta_rule` in `linear_attention/delta_rule.py`.

Two kernels: the first solves the triangular system of each chunk, for all chunks at once; the second goes through the
chunks of a sequence in turn, with a part of the state of one head in registers. A chunk's system is inverted by forward
substitution in float32: powers of its matrix would cancel each other where keys repeat. Products are made of three of
tensor cores each (TF32 x 3), which keeps about the precision of float32. Sums run over a chunk and over a head's
dimensions, in an order that depends on a sequence's own length alone.
"""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.device import to_device
from nanoinfer.kernels.device_properties import next_power_of_2

CHUNK = 64
VALUE_BLOCK = 32  # value dimensions of a program
PRECISION = "tf32x3"


@triton.jit
def _load_tile(ptr, lines, is_token, index, size):
    """Load rows of `size` values: (CHUNK, len(index)), zero beyond."""
    mask = is_token[:, None] & (index < size)[None, :]
    return tl.load(ptr + lines[:, None] * size + index[None, :], mask=mask, other=0.0)


@triton.jit
def _solve_chunks_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    chunks_ptr,
    written_ptr,
    read_keys_ptr,
    num_heads,
    key_dim,
    value_dim,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,  # key_dim, rounded up to a power of two
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks_ptr + 2 * chunk).to(tl.int64), tl.load(chunks_ptr + 2 * chunk + 1)
    index, key_index = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    is_token = index < count
    lines = (first + index) * num_heads + head
    total_decay = tl.cumsum(tl.load(g_ptr + lines, mask=is_token, other=0.0), axis=0)
    beta = tl.load(beta_ptr + lines, mask=is_token, other=0.0)
    k = _load_tile(k_ptr, lines, is_token, key_index, key_dim)
    k_beta = k * beta[:, None]

    is_earlier = index[None, :] < index[:, None]
    decay = tl.exp(tl.where(is_earlier, total_decay[:, None] - total_decay[None, :], 0.0))
    system = tl.dot(k_beta, tl.trans(k), input_precision=PRECISION) * decay
    inverse = tl.where(is_earlier, -system, 0.0)
    for row in range(1, CHUNK):
        is_row = (index == row)[:, None]
        factors = tl.sum(tl.where(is_row, inverse, 0.0), axis=0)
        solved = factors + tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(is_row, solved[None, :], inverse)
    inverse += tl.where(index[:, None] == index[None, :], 1.0, 0.0)

    read_keys = tl.dot(inverse, k_beta * tl.exp(total_decay)[:, None], input_precision=PRECISION)
    read_ptrs = read_keys_ptr + lines[:, None] * key_dim + key_index[None, :]
    tl.store(read_ptrs, read_keys, mask=is_token[:, None] & (key_index < key_dim)[None, :])
    for start in range(0, value_dim, VALUE_BLOCK):
        value_index = start + tl.arange(0, VALUE_BLOCK)
        v = _load_tile(v_ptr, lines, is_token, value_index, value_dim) * beta[:, None]
        written = tl.dot(inverse, v, input_precision=PRECISION)
        written_ptrs = written_ptr + lines[:, None] * value_dim + value_index[None, :]
        tl.store(written_ptrs, written, mask=is_token[:, None] & (value_index < value_dim)[None, :])


@triton.jit
def _pass_states_kernel(
    q_ptr,
    k_ptr,
    written_ptr,
    read_keys_ptr,
    g_ptr,
    initial_ptr,
    sequences_ptr,
    out_ptr,
    final_ptr,
    num_heads,
    key_dim,
    value_dim,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    first, length = tl.load(sequences_ptr + 2 * sequence).to(tl.int64), tl.load(sequences_ptr + 2 * sequence + 1)
    index, key_index = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    value_index = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_value = (value_index < value_dim)[None, :]
    is_before = index[None, :] <= index[:, None]
    in_state = (key_index < key_dim)[:, None] & is_value
    state_index = (sequence * num_heads + head) * key_dim * value_dim
    state_index += key_index[:, None] * value_dim + value_index[None, :]
    state = tl.load(initial_ptr + state_index, mask=in_state, other=0.0)

    for start in range(0, length, CHUNK):
        is_token = start + index < length
        lines = (first + start + index) * num_heads + head
        g = tl.load(g_ptr + lines, mask=is_token, other=0.0)
        total_decay, chunk_decay = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        read_keys = _load_tile(read_keys_ptr, lines, is_token, key_index, key_dim)
        written = _load_tile(written_ptr, lines, is_token, value_index, value_dim)
        new_values = written - tl.dot(read_keys, state, input_precision=PRECISION)
        q = _load_tile(q_ptr, lines, is_token, key_index, key_dim)
        k = _load_tile(k_ptr, lines, is_token, key_index, key_dim)
        decay = tl.exp(tl.where(is_before, total_decay[:, None] - total_decay[None, :], 0.0))
        scores = tl.where(is_before, tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay, 0.0)
        out = tl.dot(q * tl.exp(total_decay)[:, None], state, input_precision=PRECISION)
        out += tl.dot(scores, new_values, input_precision=PRECISION)
        out_ptrs = out_ptr + lines[:, None] * value_dim + value_index[None, :]
        tl.store(out_ptrs, out, mask=is_token[:, None] & is_value)
        k *= tl.exp(chunk_decay - total_decay)[:, None]
        state = state * tl.exp(chunk_decay) + tl.dot(tl.trans(k), new_values, input_precision=PRECISION)
    tl.store(final_ptr + state_index, state, mask=in_state)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, lens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return what the tokens read, (num_tokens, heads, value_dim), and the states after the last one of each sequence.

    q, k: (num_tokens, heads, key_dim); v: (num_tokens, heads, value_dim); g, beta: (num_tokens, heads); all float32.
    initial: (num_sequences, heads, key_dim, value_dim), the states before the first tokens. lens: of the sequences, end
    to end.
    """
    num_heads, key_dim, value_dim = v.shape[1], k.shape[2], v.shape[2]
    q, k, v, g, beta, initial = (x.contiguous() for x in (q, k, v, g, beta, initial))
    sequences = list(zip(accumulate(lens, initial=0), lens, strict=False))
    chunks = [
        (first + start, min(CHUNK, length - start)) for first, length in sequences for start in range(0, length, CHUNK)
    ]
    tables = to_device(torch.tensor(sequences + chunks, dtype=torch.int32), q.device)
    written, read_keys, out, final = (torch.empty_like(x) for x in (v, k, v, initial))
    sizes = num_heads, key_dim, value_dim
    options = {
        "CHUNK": CHUNK,
        "KEY_DIM": max(16, next_power_of_2(key_dim)),
        "VALUE_BLOCK": max(16, min(VALUE_BLOCK, next_power_of_2(value_dim))),
        "PRECISION": PRECISION,
    }
    _solve_chunks_kernel[(len(chunks), num_heads)](
        *(k, v, g, beta, tables[len(sequences) :], written, read_keys, *sizes), **options, num_warps=4
    )
    # Loads a step ahead would take more shared memory than GPUs before Hopper have.
    num_value_blocks = triton.cdiv(value_dim, options["VALUE_BLOCK"])
    _pass_states_kernel[(len(sequences) * num_heads, num_value_blocks)](
        *(q, k, written, read_keys, g, initial, tables, out, final, *sizes), **options, num_warps=4, num_stages=1
    )
    return out, final
