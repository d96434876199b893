"""Small prefill steps in padded pieces, on a CPU, where a stand-in computes the pieces in place of their graphs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.gated_delta_net import GatedDeltaNet
from nanoinfer.layers.linear import MergedColumnParallelLinear
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.models import execution, prefill_graphs
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.layer_stack import Way
from nanoinfer.models.native_config import read_native_config
from nanoinfer.models.prefill_graphs import (
    STEPS_BEFORE_CAPTURE,
    Buffers,
    DecoderPrefillGraphs,
    num_weights_of_a_token,
    padded_sizes,
)
from nanoinfer.models.qwen3_next import Qwen3NextForCausalLM
from nanoinfer.quantization.int4.formats import Int4Config
from nanoinfer.quantization.int4.int4_linear import Int4LinearMethod
from tests.models.test_architectures import ARCHITECTURES, HYBRIDS, LATENT, checkpoint, draw_prompts, generate  # noqa: F401 (a fixture)

NOT_PLAIN = (
    *("Cohere2ForCausalLM", "Exaone4ForCausalLM", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    *("GraniteForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"),
)
WITHOUT_GRAPHS = (*LATENT, *NOT_PLAIN)
OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 20, "kvcache_block_size": 16, "max_model_len": 112}
LENGTHS = (61, 1, 29, 40, 7, 16, 22, 5, 3)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The padded sizes of the steps of at most 24 tokens, and whether graphs would have computed them."""
    found: list[tuple[int, bool]] = []
    of_decoders: dict[int, Any] = {}
    forward = execution.forward

    def graphs_of(self: DecoderPrefillGraphs, sizes: list[int], pool: Any) -> dict[int, Any]:
        assert (pool is None) == (not self._graphs)
        assert self._graphs or sizes[0] == 24, "the largest comes first, so that the others fit into its memory"

        def replay(size: int) -> Any:
            found[-1] = size, True
            return self._pieces(size)

        return {size: SimpleNamespace(pool="pool", replay=partial(replay, size)) for size in sizes}

    def small_steps(decoder: Decoder, step: ForwardStep) -> Tensor:
        if id(decoder) not in of_decoders:
            of_decoders[id(decoder)] = execution.small_prefill_graphs(decoder, 24, only_pools=False)
        small, num_tokens = of_decoders[id(decoder)], len(step.token_ids)
        if small is None or not step.attention.is_prefill or num_tokens > 24:
            return forward(decoder, step)
        for buffer in small.buffers.tensors:
            buffer[num_tokens:] = torch.nan  # what is padding reaches no token
        found.append((min(size for size in small.sizes if size >= num_tokens), False))
        return small(step)

    monkeypatch.setattr(DecoderPrefillGraphs, "graphs_of", graphs_of)
    monkeypatch.setattr(prefill_graphs, "padded_sizes", lambda _layers, only_pools: [8, 16, 24, 32])
    monkeypatch.setattr(execution, "forward", small_steps)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_pieces_give_the_tokens_of_whole_steps(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],  # noqa: F811
    architecture: str,
) -> None:
    """Prompts are cut into chunks, so that small steps also attend to what is in the cache."""
    folder, prompts = checkpoint(architecture, 0), draw_prompts(0, LENGTHS)
    expected = generate(folder, prompts, **OPTIONS)
    sizes = request.getfixturevalue("sizes")
    assert generate(folder, prompts, **OPTIONS) == expected
    if architecture in WITHOUT_GRAPHS:
        assert not sizes
        return
    assert {size for size, _ in sizes} >= {8, 16, 24}
    for size in (8, 16, 24):
        ways = [in_graph for other, in_graph in sizes if other == size]
        assert size == 24 or not any(ways[:STEPS_BEFORE_CAPTURE])
        assert all(ways[STEPS_BEFORE_CAPTURE:])
    assert any(in_graph for _, in_graph in sizes)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_padded_pieces_read_joined_products_as_whole_steps_do(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
) -> None:
    monkeypatch.setattr(SparseMoE, "settle_weights", SparseMoE.join_shared_expert)
    monkeypatch.setattr(GatedDeltaNet, "settle_weights", GatedDeltaNet.join_projections)
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    folder, prompts = checkpoint(architecture, 0, **heads, shared_expert_intermediate_size=24), draw_prompts(0, LENGTHS)
    expected = generate(folder, prompts, **OPTIONS)
    sizes = request.getfixturevalue("sizes")
    assert generate(folder, prompts, **OPTIONS) == expected
    assert any(in_graph for _, in_graph in sizes)


def hybrid_of_80b() -> Decoder:
    """Four layers of Qwen3-Next, without memory."""
    raw = {"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 1024, "num_hidden_layers": 4, "hidden_size": 2048}
    config = read_native_config({**raw, "num_attention_heads": 16})
    backends = AttentionBackends("auto", torch.device("cpu"), torch.float32, block_size=16, places=[LayerPlace()])
    with torch.device("meta"):
        return Decoder(config, Qwen3NextForCausalLM.spec, 16, backends, TensorParallel())


def test_layers_of_one_kind_share_their_buffers() -> None:
    rows, (first, second, third, attention) = Buffers.of(hybrid_of_80b(), num_tokens=8)
    assert rows.shape == (8, 2048)
    assert first is second is third
    assert [buffer.shape for buffer in first] == [(8, 2 * 16 * 128 + 2 * 32 * 128), (8, 2 * 32), (8, 32 * 128)]
    assert [buffer.shape for buffer in attention] == [(8, 2 * 16 * 256 + 2 * 2 * 256), (8, 16 * 256)]


def layers_of(weights_of_a_layer: int) -> Any:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(weights_of_a_layer, device="meta"), requires_grad=False)
    return [layer]


def test_sizes_end_where_a_gpu_computes_for_longer_than_the_host_launches() -> None:
    of_0_6b, of_8b, of_32b = (
        padded_sizes(layers_of(number), only_pools=False) for number in (15_700_000, 193_000_000, 485_000_000)
    )
    assert of_0_6b == [
        *(64, 128, 192, 256),
        *(384, 512, 640, 768, 896, 1024),
        *(1280, 1536, 1792, 2048),
    ]
    assert of_8b == [64, 128, 192, 256]
    assert of_32b == [64]
    assert padded_sizes(layers_of(2_000_000_000), only_pools=False) == []


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    moe = MoEConfig(
        num_experts=128, num_experts_per_tok=8, intermediate_size=768, norm_topk_prob=True, has_experts=(True,)
    )
    with torch.device("meta"):
        experts = Experts(2048, moe, TensorParallel())
    [attention] = layers_of(18_900_000)
    attention.experts = experts
    assert num_weights_of_a_token(attention) == 18_900_000 + 8 * 3 * 768 * 2048
    assert padded_sizes([attention], only_pools=False)[-1] == 1024


def test_in_4_bits_values_count_and_not_the_integers_that_hold_them() -> None:
    layer = torch.nn.Module()
    with torch.device("meta"):
        layer.product = MergedColumnParallelLinear(4096, 193_000_000 // 4096 // 2, bias=False, tp=TensorParallel())
        layer.product.quant_method = Int4LinearMethod(Int4Config(), layer.product)
    assert padded_sizes([layer], only_pools=False) == [64, 128, 192, 256], "as in 16 bits"


def test_an_expert_of_all_tokens_counts_once() -> None:
    layers = hybrid_of_80b().layers
    of_mlp = (10 + 1) * 3 * 512 * 2048 + (512 + 1) * 2048  # and the router with the gate
    of_linear_attention = (12288 + 64 + 4096) * 2048
    counted = num_weights_of_a_token(layers[0])
    assert counted == pytest.approx(of_mlp + of_linear_attention, rel=1e-3)  # norms and convolution
    layers[0].mlp.join_shared_expert()
    layers[0].linear_attn.join_projections()
    assert num_weights_of_a_token(layers[0]) == counted
    assert padded_sizes(layers, only_pools=False)[-1] == 768


def test_models_that_only_pool_have_larger_sizes() -> None:
    of_0_6b, of_8b = (padded_sizes(layers_of(number), only_pools=True) for number in (15_700_000, 193_000_000))
    assert of_0_6b[:4] == [64, 128, 192, 256]
    assert [size for size in of_0_6b if size > 1792] == [2048, 2560, 3072, 3584, 4096, *range(5120, 19000, 1024)]
    assert of_8b[-2:] == [1280, 1536]


def test_graphs_of_large_sizes_are_for_short_texts() -> None:
    small = DecoderPrefillGraphs.__new__(DecoderPrefillGraphs)
    small.sizes, small.always_served, small._has_failed = [256, 1024, 2048, 4096, 16384], 256, False
    served = [(256, 1), (257, 3), (2048, 16), (12800, 100), (16384, 128)]
    others = [(257, 2), (2048, 15), (12801, 100), (16384, 127), (16385, 512)]
    assert [small.serves(*step) for step in served + others] == [True] * 5 + [False] * 5
    small._has_failed = True
    assert [small.serves(*step) for step in served] == [True, False, False, False, False]


@pytest.mark.parametrize(("only_pools", "largest"), [(False, "in slices"), (True, None)])
def test_models_that_only_pool_have_no_graphs_of_slices(
    monkeypatch: pytest.MonkeyPatch, only_pools: bool, largest: str | None
) -> None:
    monkeypatch.setattr(execution, "suits_slices", lambda *_: True)
    monkeypatch.setattr(execution, "SlicedPrefillGraphs", lambda *_: "in slices")
    monkeypatch.setattr(execution, "small_prefill_graphs", lambda *_: None)
    decoder: Any = None
    assert execution.PrefillGraphs.of(decoder, 16384, only_pools, captures_largest=True).largest == largest


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [64, 128, 150]),
        ({"max_step_tokens": 100}, [64, 100]),
        ({"max_step_tokens": 63}, [63]),
        ({"size": 2}, None),
        ({"ways": {Way.FEW_ROWS, Way.SLICES}}, None),
    ],
)
def test_one_gpu_has_graphs_of_small_steps_of_plain_layers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sizes: list[int] | None
) -> None:
    given = SimpleNamespace(**{"max_step_tokens": 150, "size": 1, "ways": {Way.GRAPHS}, **changes})
    layers = [SimpleNamespace(ways={*Way}), SimpleNamespace(ways=given.ways)]
    decoder: Any = SimpleNamespace(tp=given, layers=layers)
    monkeypatch.setattr(prefill_graphs, "padded_sizes", lambda _layers, only_pools: [64, 128, 192])
    monkeypatch.setattr(
        execution, "DecoderPrefillGraphs", lambda _decoder, sizes, _always_served: SimpleNamespace(sizes=sizes)
    )
    small: Any = execution.small_prefill_graphs(decoder, given.max_step_tokens, only_pools=False)
    assert (small and small.sizes) == sizes


def test_a_step_is_found_its_graphs_by_its_tokens() -> None:
    small: Any = SimpleNamespace(serves=lambda num_tokens, num_chunks: num_tokens <= 128 * num_chunks)
    largest: Any = SimpleNamespace(num_tokens=16384)
    graphs = execution.PrefillGraphs(small, largest)
    assert [graphs.choose(number, 1) for number in (1, 128, 129, 16383, 16384)] == [small, small, None, None, largest]
    assert execution.PrefillGraphs().choose(1, 1) is None


def test_where_a_capture_fails_steps_go_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(10, 4)
    decoder: Any = SimpleNamespace(
        has_experts=False,
        embed_tokens=SimpleNamespace(weight=weight),
        embed=lambda step: weight[step.token_ids],
        layers=[SimpleNamespace(attention_sizes=(12, 4), attend=lambda qkv, _step: qkv[:, :4])],
    )
    captured = []

    def fail(*_: object) -> None:
        captured.append(1)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(prefill_graphs, "PieceGraphs", fail)
    monkeypatch.setattr(prefill_graphs, "plain_pieces", lambda *_: iter([None, None]))
    small = DecoderPrefillGraphs(decoder, [8, 16], always_served=16)
    for _ in range(2 * STEPS_BEFORE_CAPTURE):
        step: Any = SimpleNamespace(token_ids=torch.arange(5))
        assert small(step).shape == (5, 4)
    assert captured == [1]
    assert "go on without CUDA graphs: that of 8 tokens failed: out of memory" in caplog.text
