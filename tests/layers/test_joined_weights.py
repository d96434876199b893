"""Weights behind one another in memory, a shared expert's and others: the same sums, the same memory and names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.checkpoint.base_config import LinearAttentionConfig, MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers import gated_delta_net, moe
from nanoinfer.layers.gated_delta_net import GatedDeltaNet
from nanoinfer.layers.moe import Router, SigmoidRouter, SoftmaxGroupRouter, SparseMoE
from nanoinfer.lora.adapter_slots import AdaptedProduct, StepAdapters
from nanoinfer.ops.common.fp8_format import FP8
from nanoinfer.quantization import linear_method
from nanoinfer.quantization.fp8_linear import Fp8Config
from nanoinfer.quantization.method_selection import quantize_layer
from tests.models.test_architectures import GREEDY, checkpoint, draw_prompts  # noqa: F401 (a fixture)

HIDDEN, INNER, EXPERTS, CHOICES = 32, 24, 6, 2
WHOLE, RANK = TensorParallel(), TensorParallel(rank=1, size=2)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(
    tp: TensorParallel = WHOLE, is_gated: bool = True, router: type[Router] = Router, **changes: Any
) -> SparseMoE:
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOICES, "intermediate_size": INNER, "shared_size": INNER}
    config = MoEConfig(**{**sizes, "norm_topk_prob": True, "has_experts": (True,), **changes})
    return SparseMoE(HIDDEN, config, tp, router=router, is_shared_gated=is_gated)


def draw_weights(layer: torch.nn.Module) -> None:
    for index, param in enumerate(layer.parameters()):
        param.copy_(randn(*param.shape, seed=index) / 4)


def sums(layer: SparseMoE, x: Tensor, mask: Tensor | None = None) -> Tensor:
    out = layer(x, mask)
    total = out.terms.sum(0)
    return total if out.other_terms is None else total + out.other_terms.sum(0)


@pytest.mark.parametrize("tp", [WHOLE, RANK], ids=["whole", "rank"])
@pytest.mark.parametrize(
    ("router", "is_gated", "changes"),
    [
        (Router, True, {}),
        (Router, False, {"norm_topk_prob": False}),
        (SigmoidRouter, False, {"scaling_factor": 2.5}),
        (SigmoidRouter, True, {"scaling_factor": 2.5, "num_groups": 3, "num_chosen_groups": 2}),
    ],
)
def test_the_joined_experts_compute_what_both_parts_do(
    router: type[Router],
    is_gated: bool,
    changes: dict[str, Any],
    tp: TensorParallel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)
    layer = build(tp, is_gated, router, **changes)
    x, mask = randn(5, HIDDEN, seed=9), torch.tensor([True, True, False, True, True])
    draw_weights(layer)
    expected, masked = sums(layer, x), sums(layer, x, mask)
    layer.join_shared_expert()
    draw_weights(layer)
    monkeypatch.setattr(moe, "MAX_JOINED_TOKENS", 4)
    torch.testing.assert_close(sums(layer, x), expected)  # by the products of its own
    monkeypatch.setattr(moe, "MAX_JOINED_TOKENS", 5)
    assert layer.joined is not None
    assert (layer(x).terms.shape[0] == CHOICES + 1) == (tp is WHOLE), "the next norm adds up one term more"
    torch.testing.assert_close(sums(layer, x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums(layer, x, mask)[mask], masked[mask], rtol=1e-5, atol=1e-5)
    assert (sums(layer, x, mask)[2] == 0).all(), "a row without a token has no shared expert either"


def test_joining_adds_no_parameters_and_each_weight_has_one_place() -> None:
    layer, alone = build(), build()
    names = [(name, param.shape) for name, param in layer.named_parameters()]
    layer.join_shared_expert()
    assert [(name, param.shape) for name, param in layer.named_parameters()] == names
    assert layer.joined is not None
    assert layer.shared_expert is not None
    draw_weights(layer)
    first, last = layer.joined.experts.gate_up_proj.weight, layer.shared_expert.gate_up_proj.weight
    assert torch.equal(first[EXPERTS], last)
    assert first[EXPERTS].data_ptr() == last.data_ptr()
    assert {each.untyped_storage().data_ptr() for each in (first, layer.experts.gate_up_proj.weight)} == {
        last.untyped_storage().data_ptr()
    }
    draw_weights(alone)
    x = randn(3, HIDDEN)
    torch.testing.assert_close(sums(layer, x), sums(alone, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("join", [False, True])
def test_whoever_asks_for_the_experts_of_tokens_gets_the_chosen_ones(join: bool) -> None:
    layer, routed = build(), list[Tensor]()
    if join:
        layer.join_shared_expert()
    draw_weights(layer)
    layer(randn(3, HIDDEN), None, routed)
    assert routed[0].shape == (3, CHOICES)
    assert (routed[0] < EXPERTS).all()


@pytest.mark.parametrize(
    ("router", "changes"),
    [(Router, {"shared_size": 2 * INNER}), (SoftmaxGroupRouter, {}), (Router, {"is_geglu": True})],
)
def test_what_differs_from_the_experts_is_not_joined(router: type[Router], changes: dict[str, Any]) -> None:
    layer = build(router=router, **changes)
    layer.join_shared_expert()
    assert layer.joined is None


def test_experts_in_8_bits_are_joined_with_their_scales_where_the_shared_one_has_8_too() -> None:
    config = Fp8Config()
    layer = build(is_gated=False)
    quantize_layer(layer, "model.layers.0.mlp", config)
    layer.join_shared_expert()
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.fill_with_random_weights(module, 0.2, torch.Generator().manual_seed(0))
    layer.gate.weight.copy_(randn(EXPERTS, HIDDEN))
    assert layer.joined is not None
    assert layer.joined.experts.down_proj.weight.dtype == FP8
    x = randn(4, HIDDEN)
    joined = sums(layer, x)
    layer.joined = None
    torch.testing.assert_close(joined, sums(layer, x), rtol=1e-5, atol=1e-5)
    other = build(is_gated=False)
    assert other.shared_expert is not None
    quantize_layer(other.experts, "model.layers.0.mlp.experts", config)
    other.join_shared_expert()
    assert other.joined is None, "the shared expert has 32 bits"


def test_a_product_that_adapters_add_to_is_computed_by_itself() -> None:
    layer = build()
    layer.join_shared_expert()
    draw_weights(layer)
    assert layer.shared_expert is not None
    assert layer.joined is not None
    assert layer.joined.serve
    projection: Any = layer.shared_expert.down_proj
    projection.quant_method = AdaptedProduct(projection.quant_method, StepAdapters())
    assert not layer.joined.serve
    assert layer(randn(3, HIDDEN)).other_terms is not None


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        *(
            (name, {"shared_expert_intermediate_size": 24, "linear_num_key_heads": 4, "linear_num_value_heads": 8})
            for name in ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM")
        ),
        ("Glm4MoeForCausalLM", {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
        ("DeepseekV3ForCausalLM", {"n_shared_experts": 1}),
    ],
)
def test_engines_load_update_and_wake_joined_weights(
    checkpoint: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    sizes: dict[str, Any],
) -> None:
    folder, prompts = checkpoint(architecture, 0, **sizes), draw_prompts(0, (19, 4))

    def answers(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 112, "num_kvcache_blocks": 200}
    with LLM(folder, **options) as llm:
        expected = answers(llm)
    monkeypatch.setattr(SparseMoE, "settle_weights", SparseMoE.join_shared_expert)
    monkeypatch.setattr(GatedDeltaNet, "settle_weights", GatedDeltaNet.join_projections)
    with LLM(folder, **options) as llm:
        layers = [part for part in llm.engine.runner.model.modules() if isinstance(part, SparseMoE)]
        assert layers
        assert all(part.joined is not None for part in layers)
        linear = [part for part in llm.engine.runner.model.modules() if isinstance(part, GatedDeltaNet)]
        assert bool(linear) == architecture.startswith("Qwen")
        assert all(part.joined is not None for part in linear)
        assert answers(llm) == expected
        weights = load_file(folder / "model.safetensors")
        llm.update_weights({name: torch.zeros_like(weight) for name, weight in weights.items()})
        llm.update_weights(weights)
        assert answers(llm) == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.update_weights(weights)
            assert answers(llm) == expected


def linear_attention(num_value_heads: int = 8) -> GatedDeltaNet:
    config = LinearAttentionConfig(
        num_key_heads=4,
        num_value_heads=num_value_heads,
        key_head_dim=8,
        value_head_dim=8,
        conv_width=2,
        is_linear=(True,),
    )
    layer = GatedDeltaNet(HIDDEN, 1e-6, config, False, WHOLE)
    draw_weights(layer)
    return layer


def test_both_input_products_of_linear_attention_are_one_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear_attention(), randn(3, HIDDEN)
    expected, names = layer.project(x), [name for name, _ in layer.named_parameters()]
    layer.join_projections()
    assert [name for name, _ in layer.named_parameters()] == names
    draw_weights(layer)  # in the memory of both
    joined = layer.project(x)
    assert joined[0].untyped_storage().data_ptr() == joined[1].untyped_storage().data_ptr(), "one product"
    torch.testing.assert_close(joined, expected)
    monkeypatch.setattr(gated_delta_net, "MAX_SPLIT_K_TOKENS", 2)
    apart = layer.project(x)
    assert apart[0].untyped_storage().data_ptr() != apart[1].untyped_storage().data_ptr()
    torch.testing.assert_close(apart, expected)


def test_input_products_with_adapters_or_of_odd_sizes_stay_apart() -> None:
    layer, x = linear_attention(), randn(3, HIDDEN)
    layer.join_projections()
    projection: Any = layer.in_proj_qkvz
    projection.quant_method = AdaptedProduct(projection.quant_method, StepAdapters())
    qkvz, ba = layer.project(x)
    assert qkvz.untyped_storage().data_ptr() != ba.untyped_storage().data_ptr()
    odd = linear_attention(num_value_heads=4)
    odd.join_projections()
    assert odd.joined is None, "8 numbers of b and a"


def test_the_joined_products_of_few_rows_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, linear = build(), linear_attention()
    experts.join_shared_expert()
    linear.join_projections()
    multiplied: list[Tensor] = []
    for module in (moe, gated_delta_net, linear_method):
        monkeypatch.setattr(module, "few_rows_kernels_serve", lambda num_rows, _: num_rows <= 4)
    for module in (moe, linear_method):
        kernel = module.few_rows_product
        monkeypatch.setattr(
            module,
            "few_rows_product",
            lambda x, weight, *args, kernel=kernel, **rest: (
                multiplied.append(weight) or kernel(x, weight, *args, **rest)
            ),
        )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert experts.compiled_ahead(5) == linear.compiled_ahead(5) == []
    for product in (*experts.compiled_ahead(4), *linear.compiled_ahead(4)):
        product()
    assert experts.joined is not None
    assert linear.joined is not None
    assert [*map(id, multiplied)] == [id(experts.joined.router.weight), id(linear.joined.linear.weight)]
