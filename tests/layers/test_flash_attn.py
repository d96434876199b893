"""How flash-attn's extension is called, with a stand-in for it; tests/gpu compares the results."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from nanoinfer.layers.attention import backend_selection
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata
from nanoinfer.ops.kv_cache.spec import LayerCache

NAME = "nanoinfer.layers.attention.flash_attn"
CACHE = LayerCache(*torch.zeros(2, 3, 2, 256, 64))  # (num_blocks, num_kv_heads, block_size, head_dim) each
FULL = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.25)
WINDOWED = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.25, window=7)
WINDOWS = [(FULL, (-1, -1)), (WINDOWED, (6, 0))]  # before and after a token's own; flash-attn's -1 is all
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
@pytest.mark.parametrize(("spec", "window"), WINDOWS)
def test_prefill_gives_all_arguments_and_reads_the_cache_only_for_prefixes(
    spec: AttentionSpec,
    window: tuple[int, int],
    context_len: int,
    reads_cache: bool,
    import_with: Callable[..., ModuleType],
) -> None:
    module = import_with()
    q, k = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    metadata = PrefillMetadata((1,), (context_len,), INT_01, INT_01 * context_len, torch.tensor([0]), tables)
    assert module.FlashAttentionBackend(spec).prefill(q, k, k, CACHE, metadata).shape == q.shape
    [args] = sys.modules["flash_attn_2_cuda"].calls
    assert len(args) == 21
    assert args[1].shape == ((3, 256, 2, 64) if reads_cache else k.shape)
    assert args[8] is (tables if reads_cache else None)
    assert args[10:] == (1, context_len, 0.0, 0.25, False, True, *window, 0.0, False, None)


@pytest.mark.parametrize(("spec", "window"), WINDOWS)
def test_decode_gives_all_arguments(
    spec: AttentionSpec, window: tuple[int, int], import_with: Callable[..., ModuleType]
) -> None:
    module = import_with()
    q, tables = torch.zeros(1, 4, 64), torch.zeros(1, 1, dtype=torch.int32)
    metadata = DecodeMetadata(torch.tensor([0]), INT_1, tables)
    assert module.FlashAttentionBackend(spec).decode(q, CACHE, metadata).shape == q.shape
    [args] = sys.modules["flash_attn_2_cuda"].calls
    assert len(args) == 20
    assert args[0].shape == (1, 1, 4, 64)
    assert (args[5] is INT_1, args[10] is tables) == (True, True)
    assert args[13:] == (0.25, True, *window, 0.0, True, 0)


def test_each_token_of_a_decode_step_of_several_is_a_row_of_its_own(import_with: Callable[..., ModuleType]) -> None:
    """The second row has one token and two lines of padding."""
    module = import_with()
    lens, tables = torch.tensor([5, 9], dtype=torch.int32), torch.tensor([[2], [1]], dtype=torch.int32)
    row_tokens = torch.tensor([3, 1], dtype=torch.int32)
    metadata = DecodeMetadata(torch.zeros(6), lens, tables, num_tokens=3, num_row_tokens=row_tokens)
    backend, q = module.FlashAttentionBackend(FULL), torch.zeros(6, 4, 64)
    assert backend.decode(q, CACHE, backend.plan(metadata, CACHE)).shape == q.shape
    [args] = sys.modules["flash_attn_2_cuda"].calls
    assert args[0].shape == (6, 1, 4, 64)
    assert args[5].tolist() == [5, 6, 7, 9, 9, 9]
    assert args[5].dtype == args[10].dtype == torch.int32
    assert args[10].tolist() == [[2], [2], [2], [1], [1], [1]]


def test_a_build_without_windows_says_so_in_its_own_words(
    import_with: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_windows(*args: Any) -> list[Any]:
        if args[16:18] != (-1, -1):
            raise RuntimeError("This flash attention build does not support local attention.")
        return [args[0], None]

    module = import_with()
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(module, "_varlen_fwd", without_windows)
    cpu = torch.device("cpu")
    assert backend_selection._flash_attn_lacks(FULL, cpu, torch.bfloat16) is None
    reason = backend_selection._flash_attn_lacks(WINDOWED, cpu, torch.bfloat16)
    assert reason == "This flash attention build does not support local attention."
