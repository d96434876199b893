"""The tables call backends, layers and kernels as these ask to be called. No kernel runs, and nothing is timed."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.__main__ import main
from nanoinfer.bench import kernels
from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.linear import RowParallelLinear
from nanoinfer.layers.moe import Experts
from nanoinfer.ops.common.fp8_format import QuantizedRows
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.quantization import method_selection

pytest.importorskip("triton")

from nanoinfer.layers.attention import triton as triton_backend
from nanoinfer.ops.decode_attention import triton as decode_kernels


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[inspect.BoundArguments]:
    """Collect the calls that are to be timed, the first of each graph; each counts as a millisecond."""
    found = []

    def microseconds(calls: Sequence[partial[Tensor]]) -> float:
        arguments = [inspect.signature(call.func).bind(*call.args, **call.keywords) for call in calls]
        keys = [its.arguments["cache"].k if "cache" in its.arguments else its.args[1] for its in arguments]
        assert len({key.data_ptr() for key in keys}) == len(calls) > 1, "calls of a graph read the same keys"
        found.append(arguments[0])
        return 1000.0

    plan_decode = create_autospec(decode_kernels.plan_decode, return_value=(torch.empty(0), torch.empty(0), 64))
    monkeypatch.setattr(triton_backend, "plan_decode", plan_decode)
    monkeypatch.setattr(kernels, "microseconds", microseconds)
    monkeypatch.setattr(kernels, "randn", lambda *shape: torch.empty(*shape, dtype=torch.float16))
    monkeypatch.setattr(kernels, "random_caches", empty_caches)
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernels, "HEADS", (2, 4))
    monkeypatch.setattr(kernels, "KV_HEADS", 1)
    monkeypatch.setattr(kernels, "HEAD_DIM", 64)
    return found


def empty_caches(
    num_layers: int, num_blocks: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> list[LayerCache]:
    """As much of one as is looked at: memory that is never touched costs nothing."""
    tensors = BlockLayout.of_kv(kernels.KV_HEADS, head_dim).tensors(kernels.BLOCK_SIZE, dtype)
    return [
        LayerCache(*(torch.empty(num_blocks, *shape, dtype=dtype) for shape, dtype in tensors))
        for _ in range(num_layers)
    ]


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]


def test_decode_attention_is_timed_for_eight_loads(
    calls: list[inspect.BoundArguments], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.decode_attention()
    assert [call.arguments["q"].shape[0] for call in calls] == [256, 128, 64, 32, 16, 8, 1, 1] * 2 * 3
    assert [call.arguments["cache"].k_scales is None for call in calls] == [True] * 16 + [False] * 32
    rows = rows_of(capsys.readouterr().out)
    assert [len(row) for row in rows] == [9] * 7
    assert [row[0] for row in rows[2:5]] == ["4 query heads, bfloat16", "2 query heads, int8", "4 query heads, int8"]
    # 256 x 1,074 tokens in a millisecond, of 2 x 64 values of 2 bytes, or of 1 byte and 4 for the scale of 64
    assert [float(row[1]) for row in rows[1::2]] == pytest.approx([0.0704, 0.0374, 0.0374], abs=0.006)
    assert kernels.bytes_of_token(torch.int8) == 2 * (64 + 4)


def test_rows_of_several_tokens_are_timed_for_three_batches(
    calls: list[inspect.BoundArguments], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.several_tokens()
    steps = [call.arguments["metadata"] for call in calls]
    batches = [(len(step.context_lens), step.num_tokens) for step in steps]
    assert batches == [(rows, k) for rows in (256, 16, 1) for k in (1, 4, 8)] * 4
    assert [len(call.arguments["q"]) for call in calls] == [rows * k for rows, k in batches]
    assert [step.num_row_tokens is None for step in steps] == [k == 1 for _, k in batches]
    assert all(int(step.context_lens.max()) + 8 <= 2048 for step in steps)
    rows = rows_of(capsys.readouterr().out)
    assert [len(row) for row in rows] == [10] * 5
    assert rows[0][1:4] == ["256 x 1", "256 x 4", "256 x 8"]


def test_a_shared_prefix_is_timed_without_groups_and_with_the_largest_in_both_passes(
    calls: list[inspect.BoundArguments], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.shared_prefix()
    for (apart, first_pass, together), size in ((calls[:3], 32), (calls[3:], 16)):
        plans = (call.arguments["metadata"].plans for call in (apart, together))
        assert [plan.prefixes is not None for by_layer in plans for plan in by_layer.values()] == [False, True]
        assert first_pass.arguments["num_sharers"].tolist() == [size, *[0] * (size - 1)] * (256 // size)
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
        assert ours["cache"].k.data_ptr() == contiguous["k"].data_ptr() == paged["k"].data_ptr()


@pytest.fixture
def layers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[partial[Any]]:
    """Compute the first call of each graph by the specifications, and collect it; each counts as a millisecond."""
    found = []

    def microseconds(calls: Sequence[Callable[[], object]]) -> float:
        assert len(calls) > 1
        calls[0]()
        found.append(calls[0])
        return 1000.0

    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernels, "microseconds", microseconds)
    monkeypatch.setattr(kernels, "MODELS", {"small": (128, 256, 2, 2)})
    monkeypatch.setattr(kernels, "MOE_MODELS", {"small": (128, 128, 4, 2)})
    monkeypatch.setattr(kernels, "MOE_TOKENS", (1, 3))
    monkeypatch.setattr(kernels, "KV_HEADS", 1)
    monkeypatch.setattr(kernels, "VOCAB_SIZE", 512)
    return found  # type: ignore[return-value]


TABLES = {"16 bits": kernels.FORMATS[None][0], "int4": kernels.FORMATS["int4"][0]}
TABLES |= {f"FP8{weights.name}": weights for weights in kernels.FORMATS["fp8"]}


@pytest.mark.usefixtures("layers_on_cpu")
@pytest.mark.parametrize("name", TABLES)
def test_products_have_a_row_for_each_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    columns, cell = {
        "16 bits": (["qkv", "o (split-K)", "gate, up", "down (split-K)", "lm_head"], "1000.0 (1000.0) / 0.0"),
        "int4": (["qkv", "o", "gate, up", "down"], "1000.0 / 1000.0 / 0.0"),
    }.get(name, (["qkv", "o (split-K)", "gate, up", "down (split-K)"], "1000.0 / 0.0"))
    with torch.inference_mode():
        kernels.products(TABLES[name]._replace(rows=(1, 3)))
    header, *rows = rows_of(capsys.readouterr().out)
    assert header[1:] == ["rows", *columns]
    assert [row[:2] for row in rows] == [["small", "1"], ["small", "3"]]
    assert [len(row) for row in rows] == [2 + len(columns)] * 2
    assert all(row[3] == cell for row in rows)


@pytest.mark.parametrize("name", ["16 bits", "FP8 of channels", "FP8 of blocks"])
def test_experts_are_timed_beside_the_time_that_their_weights_or_their_products_take(
    name: str,
    layers_on_cpu: list[partial[Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "MOE_MODELS", {"tiny": (1024, 128, 4, 4)})
    monkeypatch.setattr(kernels, "MOE_TOKENS", (1, 100_000))
    monkeypatch.setattr(Experts, "forward", lambda self, hidden, routing: None)
    with torch.inference_mode():
        kernels.experts(TABLES[name])
    [one, _] = layers_on_cpu
    x, routing = one.args
    assert isinstance(x, QuantizedRows) == (name != "16 bits")
    assert (routing.expert_ids.shape, routing.expert_ids.dtype) == ((1, 4), torch.int32)
    assert isinstance(one.func, nn.Module)
    assert one.func.gate_up_proj.weight.shape == (4, 256, 1024)
    # 4 experts x 393,216 weights of 2 bytes at 4.39 TB/s; 100,000 tokens x 4 experts x 786,432 FLOPs at 790 TFLOP/s
    floors = ("0.7", "398.2") if name == "16 bits" else ("0.4", "224.7")  # half the bytes, and 1,400 TFLOP/s
    assert rows_of(capsys.readouterr().out)[1] == ["tiny", *(f"1000.0 / {floor}" for floor in floors)]


@pytest.mark.usefixtures("layers_on_cpu")
def test_experts_run_in_each_format() -> None:
    with torch.inference_mode():
        for name in ("16 bits", "FP8 of channels", "FP8 of blocks"):
            kernels.experts(TABLES[name])


@pytest.mark.usefixtures("layers_on_cpu")
def test_inputs_are_rounded_before_products_are_timed() -> None:
    weights = TABLES["FP8 of channels"]
    [layer] = kernels.random_layers(lambda: RowParallelLinear(128, 64, False, TensorParallel()), 1, weights.configs[0])
    assert isinstance(weights.round_input(torch.randn(2, 128), layer), QuantizedRows)


def test_a_gpu_without_fp8_products_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "check_gpus", lambda count: None)
    monkeypatch.setattr(kernels, "has_fp8_products", lambda device: False)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "kernels", "--quantization", "fp8"])
    assert "--quantization fp8 times FP8 products, which this machine has not; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("window", [None, 1, 3, 5, 9])
def test_pairs_are_those_of_a_causal_mask_with_a_window(window: int | None) -> None:
    pairs = [(query, key) for query in range(5) for key in range(query + 1) if window is None or key > query - window]
    assert kernels.count_pairs(5, window) == len(pairs)


def test_flash_attn_is_left_out_where_it_cannot_serve() -> None:
    assert kernels.find_flash_attn(kernels.attention_spec(16, 512)) is None
