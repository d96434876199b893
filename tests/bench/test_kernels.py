"""The tables of attention and experts call the kernels as these ask to be called. No kernel runs, nothing is timed."""

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanoinfer.bench import kernels
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.kv_cache import LayerCache, num_cache_bytes, tensors_of_cache

pytest.importorskip("triton")

from nanoinfer.layers.attention import triton as triton_backend
from nanoinfer.ops.decode_attention import triton as decode_kernels


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is to be on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[inspect.BoundArguments]]:
    """Collect the calls that are to be timed, the first of each graph; each counts as a millisecond."""
    found = []

    def microseconds(calls: Sequence[partial[Tensor]]) -> float:
        arguments = [inspect.signature(call.func).bind(*call.args, **call.keywords) for call in calls]
        addresses = [
            its.args[1].k.data_ptr() if "cache" in its.arguments else its.args[1].data_ptr() for its in arguments
        ]
        assert len({*addresses}) == len(calls) > 1, "calls of a graph read the same keys"
        found.append(arguments[0])
        return 1000.0

    plan_decode = create_autospec(decode_kernels.plan_decode, return_value=(torch.empty(0), torch.empty(0), 64))
    for module in (decode_kernels, triton_backend):
        monkeypatch.setattr(module, "plan_decode", plan_decode)
    monkeypatch.setattr(kernels, "microseconds", microseconds)
    monkeypatch.setattr(kernels, "randn", lambda *shape: torch.empty(*shape, dtype=torch.float16))
    monkeypatch.setattr(kernels, "random_cache", empty_cache)
    monkeypatch.setattr(kernels, "HEADS", (2, 4))
    monkeypatch.setattr(kernels, "KV_HEADS", 1)
    monkeypatch.setattr(kernels, "HEAD_DIM", 64)
    with OnCpu():
        yield found


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype) -> LayerCache:
    """As much of one as is looked at: memory that is never touched costs nothing."""
    tensors = [torch.empty(sizes, dtype=dtype) for sizes, dtype in tensors_of_cache(shape, dtype)]
    return LayerCache(*tensors)


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]


def test_decode_attention_is_timed_for_eight_loads(
    calls: list[inspect.BoundArguments], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.decode_attention()
    assert [call.arguments["q"].shape[0] for call in calls] == [256, 128, 64, 32, 16, 8, 1, 1] * 2 * 3
    assert [call.arguments["k_scales"] is None for call in calls] == [True] * 16 + [False] * 32
    rows = rows_of(capsys.readouterr().out)
    assert [len(row) for row in rows] == [9] * 7
    assert [row[0] for row in rows[2:5]] == ["4 query heads, bfloat16", "2 query heads, int8", "4 query heads, int8"]
    # 256 x 1,074 tokens in a millisecond, of 2 x 64 values of 2 bytes, or of 1 byte and 4 for the scale of 64
    assert [float(row[1]) for row in rows[1::2]] == pytest.approx([0.0704, 0.0374, 0.0374], abs=0.006)
    assert num_cache_bytes((1, 64), torch.int8) == 2 * (64 + 4)


def test_a_shared_prefix_is_timed_without_groups_and_with_the_largest_in_both_passes(
    calls: list[inspect.BoundArguments], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.shared_prefix()
    for (apart, first_pass, together), size in ((calls[:3], 32), (calls[3:], 16)):
        plans = (call.arguments["metadata"].plans for call in (apart, together))
        assert [plan.groups is not None for by_layer in plans for plan in by_layer.values()] == [False, True]
        assert first_pass.arguments["group_rows"].tolist() == [size, *[0] * (size - 1)] * (256 // size)
        assert together.arguments["metadata"].shared_prefixes.num_shared_blocks.tolist() == [8] * 256
        context_lens = together.arguments["metadata"].context_lens
        assert (context_lens.min(), context_lens.max()) == (2048 + 100, 2048 + 1024)
        tables = together.arguments["metadata"].block_tables
        assert len(tables.unique()) == 8 + 256 * 4
        assert (tables[:, :8] == tables[0, :8]).all()
    floor = [float(row[-1]) for row in rows_of(capsys.readouterr().out)[1:]]
    # 2,048 tokens, and 562 for each of 256 rows; 2 x 64 values of 2 bytes for each, at 4.39 TB/s
    assert floor == pytest.approx([(2048 + 256 * 562) * 256 / 4.39e6] * 2, rel=0.01)


@pytest.mark.parametrize("has_flash_attn", [False, True])
def test_prefill_attention_is_timed_beside_flash_attn_where_there_is_one(
    has_flash_attn: bool,
    calls: list[inspect.BoundArguments],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def varlen_attention(  # as in layers/attention/flash_attn.py, which cannot be imported without flash-attn
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_query_lens: Tensor,
        cu_context_lens: Tensor,
        block_tables: Tensor | None,
        max_query_len: int,
        max_context_len: int,
        spec: AttentionSpec,
    ) -> None: ...

    monkeypatch.setattr(kernels, "find_flash_attn", lambda _: varlen_attention if has_flash_attn else None)
    kernels.prefill_attention()
    _, *rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 3 * 2 * 3
    assert rows[0][:3] == ["16 x 1,024", "2", "64"]
    assert rows[-1][:3] == ["1 x 32,768, window 1,024", "4", "256"]
    assert all((row[5:] == ["-", "-"]) != has_flash_attn for row in rows)
    if has_flash_attn:
        ours, contiguous, paged = (call.arguments for call in calls[:3])
        assert contiguous["k"].shape == (16 * 1024, 1, 64)
        assert paged["k"].shape == (64, 256, 1, 64)
        assert paged["cu_query_lens"].tolist() == list(range(0, 16 * 1024 + 1, 1024))
        assert (paged["max_query_len"], paged["max_context_len"], paged["spec"].group_size) == (1024, 1024, 2)
        assert (contiguous["block_tables"], paged["block_tables"].shape) == (None, (16, 4))
        assert ours["k_cache"].data_ptr() == contiguous["k"].data_ptr() == paged["k"].data_ptr()


def test_experts_are_timed_beside_the_time_that_their_weights_or_their_products_take(
    calls: list[inspect.BoundArguments], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOE_MODELS", {"tiny": (1000, 100, 4, 4)})
    monkeypatch.setattr(kernels, "MOE_TOKENS", (1, 100_000))
    kernels.experts()
    assert [call.arguments["expert_ids"].shape for call in calls] == [(1, 4), (100_000, 4)]
    one, many = calls[0].arguments, rows_of(capsys.readouterr().out)[1]
    assert (one["hidden"].shape, one["gate_up"].shape, one["down"].shape) == ((1, 1000), (4, 200, 1000), (4, 1000, 100))
    assert one["expert_ids"].dtype == torch.int32
    # 4 experts x 300,000 weights of 2 bytes at 4.39 TB/s; 100,000 tokens x 4 experts x 600,000 FLOPs at 790 TFLOP/s
    assert many == ["tiny", "1000.0 / 0.5", "1000.0 / 303.8"]


@pytest.mark.parametrize("window", [None, 1, 3, 5, 9])
def test_pairs_are_those_of_a_causal_mask_with_a_window(window: int | None) -> None:
    pairs = [(query, key) for query in range(5) for key in range(query + 1) if window is None or key > query - window]
    assert kernels.count_pairs(5, window) == len(pairs)


def test_flash_attn_is_left_out_where_it_cannot_serve() -> None:
    assert kernels.find_flash_attn(kernels.attention_spec(16, 512)) is None
