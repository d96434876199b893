"""Attention by flash-attn 2 (Dao 2023).

Its extension module is called directly: the Python package above it registers custom operators, which takes seconds to
import, for autograd and torch.compile, which nothing here uses.
"""

import re
from collections.abc import Callable
from typing import Any

import flash_attn_2_cuda
from torch import Tensor

from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, LayerCache, PrefillMetadata


def _function(name: str, num_arguments: int) -> Callable[..., Any]:
    """A function of the extension. Raises ImportError if its arguments are not those of flash-attn 2.7 and 2.8."""
    function: Callable[..., Any] | None = getattr(flash_attn_2_cuda, name, None)
    # pybind11 writes the signature in the docstring: "varlen_fwd(arg0: torch.Tensor, arg1: ...) -> ...".
    found = len(re.findall(r"\barg\d+: ", (function and function.__doc__) or ""))
    if function is None or found != num_arguments:
        raise ImportError(
            f"flash_attn_2_cuda.{name} takes {found} arguments, not the {num_arguments} of flash-attn 2.7 and 2.8; "
            "install one of these"
        )
    return function


_varlen_fwd = _function("varlen_fwd", num_arguments=21)
_fwd_kvcache = _function("fwd_kvcache", num_arguments=20)

# Arguments are given by position, because the extension does not name them.
NO_WINDOW = (-1, -1)  # tokens to the left and to the right
NO_SOFTCAP = NO_DROPOUT = 0.0


class FlashAttentionBackend(AttentionBackend):
    """flash-attn reads our head-major cache through a transposed view: it asks only for unit stride in head_dim."""

    name = "flash_attn"
    needs_host = False

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        block_tables = None
        if metadata.reads_cache:
            k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)  # (num_blocks, block_size, num_kv_heads, head_dim)
            block_tables = metadata.block_tables
        out: Tensor = _varlen_fwd(
            q,
            k,
            v,
            None,  # out: allocated by flash-attn
            metadata.cu_query_lens,
            metadata.cu_context_lens,
            None,  # seqused_k
            None,  # leftpad_k
            block_tables,
            None,  # alibi_slopes
            max(metadata.query_lens),
            max(metadata.context_lens),
            NO_DROPOUT,
            q.shape[-1] ** -0.5,  # softmax_scale
            False,  # zero_tensors
            True,  # causal
            *NO_WINDOW,
            NO_SOFTCAP,
            False,  # return_softmax
            None,  # generator, for dropout
        )[0]
        return out

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        out: Tensor = _fwd_kvcache(
            q.unsqueeze(1),  # (num_rows, 1, num_heads, head_dim)
            cache.k.transpose(1, 2),
            cache.v.transpose(1, 2),
            None,  # k to append: it is in the cache already
            None,  # v
            metadata.context_lens,
            None,  # rotary_cos
            None,  # rotary_sin
            None,  # cache_batch_idx
            None,  # cache_leftpad
            metadata.block_tables,
            None,  # alibi_slopes
            None,  # out: allocated by flash-attn
            q.shape[-1] ** -0.5,  # softmax_scale
            True,  # causal
            *NO_WINDOW,
            NO_SOFTCAP,
            True,  # rotary_interleaved, without rotary tables
            0,  # num_splits: flash-attn decides
        )[0]
        return out.squeeze(1)
