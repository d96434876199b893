"""The path of decoder layers for steps of few rows, on a CPU by their specifications: same tokens, same cache."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.layernorm import CohereLayerNorm, GemmaRMSNorm, RMSNorm
from nanoinfer.layers.linear import ShardedLinear
from nanoinfer.models import execution, few_rows_layer
from nanoinfer.models.decoder import Decoder, DecoderAttention, DecoderLayer
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.layer_stack import Way
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul
from nanoinfer.ops.few_rows import spec as few_rows
from nanoinfer.quantization import linear_method
from nanoinfer.quantization.linear_method import ProductKind
from tests.models.test_architectures import ARCHITECTURES, checkpoint, draw_prompts, generate  # noqa: F401 (a fixture)

COMMON = ("Llama", "Ministral3", "Mistral", "Phi3", "Qwen2", "Qwen3", "SeedOss", "SmolLM3")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the path's functions as they are called; the path is on, whatever device and dtype there are."""
    names: list[str] = []

    def note(module: ModuleType, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: names.append(name) or function(*args, **kwargs))

    note(few_rows_layer, "few_rows_product")
    monkeypatch.setattr(execution, "few_rows_kernels_serve", lambda num_rows, _: 0 < num_rows <= few_rows.MAX_FEW_ROWS)
    return names


@pytest.mark.parametrize("max_few_rows", [2, 4])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("MistralForCausalLM", {"sliding_window": 7}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Phi3ForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}),  # the other layers have experts
    ],
)
def test_few_rows_give_the_tokens_of_the_common_path(
    calls: list[str],
    checkpoint: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    overrides: dict[str, Any],
    max_few_rows: int,
) -> None:
    """Batches of three rows and of fewer, so that a request's steps go through both paths."""
    folder, prompts = checkpoint(architecture, 0, **overrides), draw_prompts(0, (29, 1, 40, 20))
    options = {"max_num_seqs": 3, "kvcache_block_size": 16, "max_model_len": 112}
    monkeypatch.setattr(few_rows, "MAX_FEW_ROWS", 0)
    expected = generate(folder, prompts, **options)
    assert not calls
    monkeypatch.setattr(few_rows, "MAX_FEW_ROWS", max_few_rows)
    assert generate(folder, prompts, **options) == expected
    assert "few_rows_product" in calls


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_same_tokens_with_few_rows(
    calls: list[str],
    checkpoint: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
) -> None:
    """By the fast way where its layers are as that computes them, else by the common one."""
    folder, prompts = checkpoint(architecture, 1), draw_prompts(0, (29, 1))
    options = {"max_num_seqs": 2, "kvcache_block_size": 16, "max_model_len": 112}
    monkeypatch.setattr(few_rows, "MAX_FEW_ROWS", 0)
    expected = generate(folder, prompts, **options)
    monkeypatch.setattr(few_rows, "MAX_FEW_ROWS", 2)
    assert generate(folder, prompts, **options) == expected
    if architecture not in ("GraniteForCausalLM", "Qwen3MoeForCausalLM"):  # which may be drawn as common ones
        assert bool(calls) == (architecture.removesuffix("ForCausalLM") in COMMON)


PIECES = {Way.GRAPHS, Way.SLICES}
ALL_BUT_FEW_ROWS = {*Way} - {Way.FEW_ROWS}


def layer_of(spec: DecoderSpec, **traits: bool) -> Any:
    layer: Any = DecoderLayer.__new__(DecoderLayer)
    torch.nn.Module.__init__(layer)
    layer.spec = spec
    for name in ("has_multipliers", "is_linear", "has_experts"):
        setattr(layer, name, traits.get(name, False))
    return layer


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, {*Way}),
        ({"qk_norm": True, "has_sinks": True, "interleaves_rotary": True}, {*Way}),
        ({"has_post_norms": True}, PIECES),
        ({"norm": GemmaRMSNorm}, ALL_BUT_FEW_ROWS),
        ({"activation": gelu_tanh_and_mul}, ALL_BUT_FEW_ROWS),
        ({"norm": CohereLayerNorm}, set()),
        ({"norm": type("ANewNorm", (RMSNorm,), {})}, set()),
        ({"has_pre_norms": False, "has_post_norms": True}, set()),
        ({"has_parallel_block": True}, set()),
        ({"has_gates": True}, {Way.GRAPHS}),
        ({"has_gates": True, "norm": GemmaRMSNorm}, {Way.GRAPHS}),
        ({"has_gates": True, "has_parallel_block": True}, set()),
        ({"attention": type("ANewAttention", (DecoderAttention,), {})}, set()),
    ],
)
def test_layers_that_the_fast_ways_do_not_know_stay_off_them(changes: dict[str, Any], ways: set[Way]) -> None:
    assert layer_of(DecoderSpec(**changes)).ways == ways


def test_layers_have_the_attention_that_their_architecture_names() -> None:
    new = type("ANewAttention", (DecoderAttention,), {})
    raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config = read_native_config({**raw, "num_hidden_layers": 2, "num_attention_heads": 2})
    places = [LayerPlace(0, 0), LayerPlace(0, 1)]
    backends = AttentionBackends("auto", torch.device("cpu"), torch.float32, block_size=16, places=places)
    for spec, attention in ((DecoderSpec(attention=new), new), (DecoderSpec(), DecoderAttention)):
        decoder = Decoder(config, spec, 16, backends, TensorParallel())
        assert [type(layer.mixer) for layer in decoder.layers] == [attention] * 2


@pytest.mark.parametrize("norm", [CohereLayerNorm, type("ANewNorm", (RMSNorm,), {})])
def test_only_norms_that_scale_leave_the_all_reduce_to_their_kernel(norm: type[RMSNorm]) -> None:
    assert not DecoderSpec().needs_whole_sums
    assert not DecoderSpec(norm=GemmaRMSNorm).needs_whole_sums
    assert DecoderSpec(norm=norm).needs_whole_sums


@pytest.mark.parametrize("norm", [RMSNorm, CohereLayerNorm])
def test_no_part_of_a_layer_leaves_its_sums_to_a_norm_that_cannot_reduce_them(norm: type[RMSNorm]) -> None:
    raw = {"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 128, "hidden_size": 16, "intermediate_size": 16}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    raw |= {"num_experts_per_tok": 1}
    raw |= {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [1]}
    config, memory = read_native_config(raw), object()
    backends = AttentionBackends("auto", torch.device("cpu"), torch.float32, block_size=16, places=[LayerPlace()])
    tp: Any = TensorParallel(0, 2, symmetric_memory=memory)  # type: ignore[arg-type]
    decoder = Decoder(config, DecoderSpec(norm=norm), 16, backends, tp)
    assert [(layer.is_linear, layer.has_experts) for layer in decoder.layers] == [(True, True), (False, False)]
    of_parts = {part.tp.symmetric_memory for part in decoder.layers.modules() if hasattr(part, "tp")}
    assert of_parts == ({memory} if norm is RMSNorm else {None})


@pytest.mark.parametrize(
    ("traits", "products", "ways"),
    [
        ({"has_experts": True}, [ProductKind.PLAIN], PIECES),
        ({"has_multipliers": True}, [ProductKind.PLAIN], set()),
        ({"is_linear": True}, [ProductKind.PLAIN], {Way.GRAPHS}),
        ({}, [ProductKind.PLAIN, ProductKind.PLAIN], {*Way}),
        ({}, [ProductKind.PLAIN, ProductKind.ROUNDED], PIECES),
        ({}, [ProductKind.PLAIN, ProductKind.WIDENED], {Way.FEW_CALLS}),
        ({"has_experts": True}, [ProductKind.PLAIN, ProductKind.NARROW], {Way.GRAPHS}),
        ({"has_experts": True}, [ProductKind.PLAIN, ProductKind.WIDENED], set()),
    ],
)
def test_experts_multipliers_and_products_keep_a_layer_off_the_ways_that_do_not_know_them(
    traits: dict[str, bool], products: list[ProductKind], ways: set[Way]
) -> None:
    layer = layer_of(DecoderSpec(), **traits)
    for index, kind in enumerate(products):
        part: Any = torch.nn.Module()
        part.quant_method = SimpleNamespace(kind=kind)
        layer.add_module(str(index), part)
    assert layer.ways == ways


def test_experts_gelu_parallel_layers_and_weights_in_8_bits_take_the_common_path(
    calls: list[str],
    checkpoint: Callable[..., Path],  # noqa: F811
    random_checkpoint: Callable[..., Path],
) -> None:
    for architecture in ("MixtralForCausalLM", "Gemma3ForCausalLM", "Cohere2ForCausalLM"):
        generate(checkpoint(architecture, 0), [[1, 2, 3]], max_model_len=64)
    generate(random_checkpoint(), [[1, 2, 3]], max_model_len=64, quantization="fp8")
    assert not calls


@pytest.mark.parametrize(
    ("architecture", "overrides", "num_products"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 4),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}, 4),  # the first layer has experts
        ("MixtralForCausalLM", {}, 0),
    ],
)
def test_the_products_of_each_size_are_compiled_ahead(
    calls: list[str],
    checkpoint: Callable[..., Path],  # noqa: F811
    architecture: str,
    overrides: dict[str, Any],
    num_products: int,
) -> None:
    with LLM(checkpoint(architecture, 0, **overrides), device="cpu", max_model_len=64) as llm:
        decoder = llm.engine.runner.model.model
    with execution.compiling_few_rows(decoder, [1, 2, few_rows.MAX_FEW_ROWS + 1, 100]):
        pass
    assert calls == ["few_rows_product"] * 2 * num_products


def test_a_kernel_that_does_not_compile_is_an_error(
    calls: list[str],
    checkpoint: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler")

    with LLM(checkpoint("LlamaForCausalLM", 0), device="cpu", max_model_len=64) as llm:
        decoder = llm.engine.runner.model.model
    monkeypatch.setattr(few_rows_layer, "few_rows_product", fail)
    with pytest.raises(RuntimeError, match="no compiler"), execution.compiling_few_rows(decoder, [1]):
        pass


@pytest.mark.parametrize("kind", [ProductKind.PLAIN, ProductKind.WIDENED])
@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_plain_products_of_few_rows_are_computed_by_that_kernel_in_other_layers_too(
    num_rows: int, kind: ProductKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ShardedLinear((6, 16), (6, 16), bias=True)
    weight = torch.randn(6, 16)
    layer.weight.copy_(weight)
    layer.bias.fill_(0.5)
    monkeypatch.setattr(layer.quant_method, "kind", kind)
    monkeypatch.setattr(linear_method, "few_rows_kernels_serve", lambda num_rows, weight: num_rows <= 4)
    monkeypatch.setattr(linear_method, "few_rows_product", lambda x, *_: names.append("few") or x.new_zeros(len(x), 6))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    names: list[str] = []
    x = torch.ones(num_rows, 16)
    products = [layer.quant_method.apply(layer, x, layer.bias), layer.quant_method.apply_split(layer, x, layer.bias)]
    monkeypatch.undo()
    is_few = num_rows <= 4 and kind is ProductKind.PLAIN
    assert names == (["few"] * 2 if is_few else [])
    assert [each.shape for each in products] == [(num_rows, 6), (1, num_rows, 6)]
    if not is_few:
        torch.testing.assert_close(products[0], weight.sum(1).expand(num_rows, 6) + 0.5)


def test_a_cpu_has_no_such_path() -> None:
    assert few_rows.MAX_FEW_ROWS > 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert not few_rows.few_rows_kernels_serve(1, torch.zeros(9, 8, dtype=dtype))


def test_wide_models_have_fewer_of_these_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "overlap_options", lambda device: {"OVERLAP": True})
    monkeypatch.setattr(few_rows, "import_error", lambda name: None)

    def numbers_of_rows(hidden_size: int, dtype: torch.dtype = torch.bfloat16) -> list[int]:
        embeddings = torch.zeros(4096, hidden_size, dtype=dtype)
        return [rows for rows in range(9) if few_rows.few_rows_kernels_serve(rows, embeddings)]

    assert numbers_of_rows(2048) == [1, 2, 3, 4]
    assert numbers_of_rows(4096) == [1, 2]
    assert numbers_of_rows(2048, torch.float16) == numbers_of_rows(2048, torch.float32) == []
    monkeypatch.setattr(few_rows, "MAX_FEW_ROWS", 0)
    assert numbers_of_rows(4096) == []
