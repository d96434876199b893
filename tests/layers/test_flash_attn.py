"""How flash-attn's extension is called, with a stand-in for it; tests/gpu compares the results."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from nanoinfer.layers.attention.metadata import DecodeMetadata, LayerCache, PrefillMetadata

NAME = "nanoinfer.layers.attention.flash_attn"
CACHE = LayerCache(*torch.zeros(2, 3, 2, 256, 64))  # (num_blocks, num_kv_heads, block_size, head_dim) each
INT_1, INT_01 = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)


def with_signature(function: Callable[..., Any], num_arguments: int) -> Callable[..., Any]:
    """As pybind11 documents a function."""
    function.__doc__ = "f(" + ", ".join(f"arg{i}: torch.Tensor" for i in range(num_arguments)) + ") -> list\n\nForward"
    return function


@pytest.fixture
def import_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import the backend over an extension whose functions take so many arguments, and return their arguments."""

    def import_with(varlen_fwd: int = 21, fwd_kvcache: int = 20) -> ModuleType:
        extension = ModuleType("flash_attn_2_cuda")
        extension.calls = []  # type: ignore[attr-defined]

        def called(*args: Any) -> list[Any]:
            extension.calls.append(args)  # type: ignore[attr-defined]
            return [args[0], None]

        extension.varlen_fwd = with_signature(lambda *args: called(*args), varlen_fwd)  # type: ignore[attr-defined]
        extension.fwd_kvcache = with_signature(lambda *args: called(*args), fwd_kvcache)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", extension)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        module = importlib.import_module(NAME)
        monkeypatch.delitem(sys.modules, NAME)
        return module

    return import_with


def test_an_extension_with_other_arguments_is_refused(import_with: Callable[..., ModuleType]) -> None:
    with pytest.raises(ImportError, match=r"flash_attn_2_cuda.varlen_fwd takes 19 arguments, not the 21 of flash-attn"):
        import_with(varlen_fwd=19)
    with pytest.raises(ImportError, match=r"flash_attn_2_cuda.fwd_kvcache takes 21 arguments, not the 20"):
        import_with(fwd_kvcache=21)


@pytest.mark.parametrize(("context_len", "reads_cache"), [(1, False), (5, True)])
def test_prefill_gives_all_arguments_and_reads_the_cache_only_for_prefixes(
    context_len: int, reads_cache: bool, import_with: Callable[..., ModuleType]
) -> None:
    module = import_with()
    q, k = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    metadata = PrefillMetadata((1,), (context_len,), INT_01, INT_01 * context_len, torch.tensor([0]), tables)
    assert module.FlashAttentionBackend().prefill(q, k, k, CACHE, metadata).shape == q.shape
    [args] = sys.modules["flash_attn_2_cuda"].calls
    assert len(args) == 21
    assert args[1].shape == ((3, 256, 2, 64) if reads_cache else k.shape)
    assert args[8] is (tables if reads_cache else None)
    assert args[10:] == (1, context_len, 0.0, 0.125, False, True, -1, -1, 0.0, False, None)


def test_decode_gives_all_arguments(import_with: Callable[..., ModuleType]) -> None:
    module = import_with()
    q, tables = torch.zeros(1, 4, 64), torch.zeros(1, 1, dtype=torch.int32)
    assert (
        module.FlashAttentionBackend().decode(q, CACHE, DecodeMetadata(torch.tensor([0]), INT_1, tables)).shape
        == q.shape
    )
    [args] = sys.modules["flash_attn_2_cuda"].calls
    assert len(args) == 20
    assert args[0].shape == (1, 1, 4, 64)
    assert (args[5] is INT_1, args[10] is tables) == (True, True)
    assert args[13:] == (0.125, True, -1, -1, 0.0, True, 0)
