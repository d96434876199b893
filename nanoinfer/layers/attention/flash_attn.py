"""Attention by flash-attn 2 (Dao 2023).

Its extension module is called directly: the Python package above it registers custom operators, which takes seconds to
import, for autograd and torch.compile, which nothing here uses.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flash_attn_2_cuda
from torch import Tensor

from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.metadata import DecodeMetadata, MetadataT, PrefillMetadata
from nanoinfer.ops.kv_cache.spec import LayerCache


def _function(name: str, num_arguments: int) -> Callable[..., Any]:
    """Return a function of the extension. Raises ImportError if its arguments are not as in flash-attn 2.7 and 2.8."""
    function: Callable[..., Any] | None = getattr(flash_attn_2_cuda, name, None)
    # pybind11 writes the signature in the docstring: "varlen_fwd(arg0: torch.Tensor, arg1: ...) -> ...".
    num_found = len(re.findall(r"\barg\d+: ", (function and function.__doc__) or ""))
    if function is None or num_found != num_arguments:
        raise ImportError(
            f"flash_attn_2_cuda.{name} takes {num_found} arguments, not the {num_arguments} of flash-attn 2.7 and 2.8; "
            "install one of these"
        )
    return function


_varlen_fwd = _function("varlen_fwd", num_arguments=21)
_fwd_kvcache = _function("fwd_kvcache", num_arguments=20)

# Arguments are given by position, because the extension does not name them.
NO_SOFTCAP = NO_DROPOUT = 0.0


class FlashAttentionBackend(AttentionBackend):
    """Has flash-attn read our head-major cache through a transposed view: it asks only for unit stride in head_dim."""

    name = "flash_attn"
    needs_host = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        """Give each token of a decode step a row of its own.

        Of several tokens a row, flash-attn would have padding attend to keys that do not exist. These may be NaN.
        """
        if isinstance(metadata, PrefillMetadata) or metadata.num_tokens == 1:
            return metadata
        return replace(metadata, plans={**metadata.plans, self.spec: metadata.with_a_row_for_each_token()})

    def prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        metadata: PrefillMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        block_tables = None
        if k is None or v is None or metadata.reads_cache:
            k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)  # (num_blocks, block_size, num_kv_heads, head_dim)
            block_tables = metadata.block_tables
        return varlen_attention(
            q,
            k,
            v,
            metadata.cu_query_lens,
            metadata.cu_context_lens,
            block_tables,
            max(metadata.query_lens),
            max(metadata.context_lens),
            self.spec,
        )

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        metadata = metadata.plans.get(self.spec, metadata)
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
            self.spec.scale,
            True,  # causal
            *_window(self.spec),
            NO_SOFTCAP,
            True,  # rotary_interleaved, without rotary tables
            0,  # num_splits: flash-attn decides
        )[0]
        return out.squeeze(1)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_query_lens: Tensor,
    cu_context_lens: Tensor,
    block_tables: Tensor | None,
    max_query_len: int,
    max_context_len: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attend from chunks laid end to end; k and v are laid end to end as well, or blocks if there are block tables.

    Raises RuntimeError if flash-attn was built without what `spec` needs.
    """
    out: Tensor = _varlen_fwd(
        q,
        k,
        v,
        None,  # out: allocated by flash-attn
        cu_query_lens,
        cu_context_lens,
        None,  # seqused_k
        None,  # leftpad_k
        block_tables,
        None,  # alibi_slopes
        max_query_len,
        max_context_len,
        NO_DROPOUT,
        spec.scale,
        False,  # zero_tensors
        spec.causal,
        *_window(spec),
        NO_SOFTCAP,
        False,  # return_softmax
        None,  # generator, for dropout
    )[0]
    return out


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return how many tokens before and after its own each token attends to; -1 for all."""
    if spec.window is None:
        return -1, -1
    return spec.window - 1, 0 if spec.causal else spec.window - 1
