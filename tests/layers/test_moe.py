"""The mixture-of-experts MLP in plain PyTorch: against transformers, cut over two ranks, masked, with NaN.

Its kernels: tests/kernels/test_moe.py.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers import experts, moe
from nanoinfer.layers.experts import Routing
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.routing.spec import route

HIDDEN, INNER, EXPERTS, CHOICES = 32, 24, 10, 4
RANKS = [TensorParallel(rank, size=2) for rank in range(2)]
WHOLE = TensorParallel()
NAN = float("nan")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def checkpoint(num_experts: int = EXPERTS) -> dict[str, Tensor]:
    """The full weights: the router's and, for each shard of the layer's names, one expert's projection."""
    weights = {"gate": randn(num_experts, HIDDEN) * 0.2}
    for expert in range(num_experts):
        gate, up = randn(2, INNER, HIDDEN, seed=expert) * 0.2
        weights |= {f"{expert}.gate": gate, f"{expert}.up": up, f"{expert}.down": randn(HIDDEN, INNER, seed=~expert)}
    return weights


def build(tp: TensorParallel, weights: dict[str, Tensor], num_choices: int = CHOICES, norm: bool = True) -> SparseMoE:
    layer = SparseMoE(HIDDEN, MoEConfig(len(weights["gate"]), num_choices, INNER, norm, has_experts=(True,)), tp)
    layer.gate.weight.copy_(weights["gate"])
    for module in (layer.experts.gate_up_proj, layer.experts.down_proj):
        module.weight.fill_(NAN)
        for shard in reversed(module.shards):  # the order of loading does not matter
            module.weight_loader(module.weight, weights[shard], shard)
    return layer


def plain(x: Tensor, weights: dict[str, Tensor], num_choices: int, norm: bool) -> Tensor:
    """Every row on its own, as one would write it down."""
    rows = []
    for row in x:
        probs, experts = torch.topk(torch.softmax(weights["gate"] @ row, dim=0), num_choices)
        if norm:
            probs /= probs.sum()
        total = torch.zeros(HIDDEN)
        for prob, expert in zip(probs, experts.tolist(), strict=True):
            gated = torch.nn.functional.silu(weights[f"{expert}.gate"] @ row) * (weights[f"{expert}.up"] @ row)
            total += prob * (weights[f"{expert}.down"] @ gated)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("num_choices", [1, 2, EXPERTS])
def test_a_row_is_the_weighted_sum_of_its_experts(num_choices: int, norm: bool) -> None:
    x, weights = randn(7, HIDDEN, seed=3), checkpoint()
    out = build(WHOLE, weights, num_choices, norm)(x)
    assert out.buffers is None
    assert out.terms.shape == (num_choices, 7, HIDDEN), "the next norm adds up a row's experts"
    torch.testing.assert_close(out.terms.sum(0), plain(x, weights, num_choices, norm), rtol=1e-5, atol=1e-5)


# --- against transformers ---


def transformers_block(architecture: str, norm: bool) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOICES}
    block: nn.Module
    if architecture == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

        block = MixtralSparseMoeBlock(MixtralConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **sizes))
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(moe_intermediate_size=INNER, num_experts=EXPERTS, norm_topk_prob=norm, **sizes)
        )
    return block.eval().requires_grad_(False)


@pytest.mark.parametrize(("architecture", "norm"), [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)])
def test_the_layer_computes_what_transformers_does(architecture: str, norm: bool) -> None:
    x, weights = randn(9, HIDDEN, seed=3), checkpoint()
    block: Any = transformers_block(architecture, norm)
    block.gate.weight.copy_(weights["gate"])
    for expert in range(EXPERTS):
        gate_up = torch.cat([weights[f"{expert}.gate"], weights[f"{expert}.up"]])
        block.experts.gate_up_proj[expert].copy_(gate_up)
        block.experts.down_proj[expert].copy_(weights[f"{expert}.down"])
    expected = block(x.unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(build(WHOLE, weights, norm=norm)(x).terms.sum(0), expected, rtol=1e-5, atol=1e-5)


# --- routing ---


def test_the_likeliest_experts_come_first_and_equal_ones_by_their_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    ids, weights = route(logits[None], 3, False)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    torch.testing.assert_close(weights[1], torch.full((3,), 0.25))
    torch.testing.assert_close(route(logits[None], 3, True)[1].sum(1), torch.ones(2))


def test_weights_are_computed_in_float32_for_logits_in_16_bits() -> None:
    logits = randn(3, 8).bfloat16()
    _, weights = route(logits[None], 2, False)
    assert torch.equal(weights, torch.softmax(logits.float(), dim=1).topk(2).values)


def test_a_row_with_nan_stays_alone_with_it() -> None:
    x, weights = randn(4, HIDDEN), checkpoint()
    layer = build(WHOLE, weights)
    expected = layer(x).terms.sum(0)
    x[2, 5] = NAN
    ids, _ = layer.gate(x, None)
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    out = layer(x).terms.sum(0)
    assert out[2].isnan().all()
    torch.testing.assert_close(out[[0, 1, 3]], expected[[0, 1, 3]])


def test_masked_rows_have_no_experts_and_add_zeros() -> None:
    x, weights = randn(5, HIDDEN), checkpoint()
    layer = build(WHOLE, weights)
    mask = torch.tensor([True, False, True, True, False])
    ids, pair_weights = layer.gate(x, mask)
    assert (ids[~mask] == EXPERTS).all()
    assert (pair_weights[~mask] == 0).all()
    out, expected = layer(x, mask).terms, layer(x).terms
    torch.testing.assert_close(out[:, mask], expected[:, mask])
    assert (out[:, ~mask] == 0).all()
    x[~mask] = NAN
    assert (layer(x, mask).terms[:, ~mask] == 0).all()
    assert (layer(x, torch.zeros(5, dtype=torch.bool)).terms == 0).all()


def test_experts_without_tokens_are_not_read() -> None:
    x, weights = randn(6, HIDDEN), checkpoint(num_experts=3)
    gate_up, down = (
        torch.stack([torch.cat([weights[f"{e}.{part}"] for part in parts]) for e in range(3)])
        for parts in (("gate", "up"), ("down",))
    )
    routing = Routing(torch.full((6, 1), 1, dtype=torch.int32), torch.ones(6, 1))
    both = ExpertWeights(gate_up), ExpertWeights(down)
    expected = expert_mlp(x, *both, *routing)
    gate_up[[0, 2]] = down[[0, 2]] = NAN
    assert torch.equal(expert_mlp(x, *both, *routing), expected)


@pytest.mark.parametrize("num_rows", [4, 5])
def test_few_rows_have_their_logits_in_one_term_by_the_kernel_for_few_rows(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    layer, x = build(WHOLE, checkpoint()), randn(num_rows, HIDDEN)
    expected = layer.gate.terms(x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(moe, "few_rows_kernels_serve", lambda num_rows, weight: num_rows <= 4)
    kernel = moe.few_rows_product
    monkeypatch.setattr(
        moe, "few_rows_product", lambda *args, **options: names.append("few") or kernel(*args, **options)
    )
    terms = layer.gate.terms(x)
    assert names == (["few"] if num_rows <= 4 else [])
    torch.testing.assert_close(terms, expected)


# --- a shared expert ---


def with_shared_expert(tp: TensorParallel, weights: dict[str, Tensor], is_gated: bool) -> SparseMoE:
    """The layer with a shared expert, which has the weights of the first of the others."""
    config = MoEConfig(EXPERTS, CHOICES, INNER, True, has_experts=(True,), shared_size=INNER)
    layer = SparseMoE(HIDDEN, config, tp, is_shared_gated=is_gated)
    layer.gate.weight.copy_(weights["gate"])
    for module in (layer.experts.gate_up_proj, layer.experts.down_proj):
        for shard in module.shards:
            module.weight_loader(module.weight, weights[shard], shard)
    assert layer.shared_expert is not None
    gate_up, down = layer.shared_expert.gate_up_proj, layer.shared_expert.down_proj
    for part in ("gate", "up"):
        gate_up.weight_loader(gate_up.weight, weights[f"0.{part}"], part)
    down.weight_loader(down.weight, weights["0.down"])
    if layer.shared_expert_gate is not None:
        layer.shared_expert_gate.weight.copy_(weights["gate"][:1])
    return layer


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_shared_expert_adds_terms_of_its_own_times_its_gate(is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = randn(5, HIDDEN, seed=3), checkpoint()
    chosen, close = plain(x, weights, CHOICES, True), partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    gated = torch.nn.functional.silu(x @ weights["0.gate"].t()) * (x @ weights["0.up"].t())
    shared = gated @ weights["0.down"].t() * (torch.sigmoid(x @ weights["gate"][:1].t()) if is_gated else 1.0)
    out = with_shared_expert(WHOLE, weights, is_gated)(x)
    assert out.other_terms is not None
    close(out.terms.sum(0), chosen)
    close(out.other_terms.sum(0), shared)
    norm, residual = RMSNorm(HIDDEN, 1e-5), randn(5, HIDDEN, seed=4)
    norm.weight.fill_(1)
    close(norm(out, residual)[1], chosen + shared + residual)
    close(norm(out.times(2.0), residual)[1], 2 * (chosen + shared) + residual)
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)  # the test adds them up
    parts = [with_shared_expert(tp, weights, is_gated)(x) for tp in RANKS]
    close(parts[0].terms[0] + parts[1].terms[0], chosen + shared)


# --- many tokens, several ranks, the checkpoint ---


def test_more_pairs_than_fit_are_computed_in_slices_and_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = randn(7, HIDDEN), build(WHOLE, checkpoint())
    mask = torch.arange(7) != 3
    expected = layer(x, mask).terms
    assert len(expected) == CHOICES
    monkeypatch.setattr(experts, "MAX_PAIRS", 3 * CHOICES)
    torch.testing.assert_close(layer(x, mask).terms, expected.sum(0, keepdim=True))


def test_the_results_of_two_ranks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)  # the test adds them up
    x, weights = randn(5, HIDDEN), checkpoint()
    layers = [build(tp, weights) for tp in RANKS]
    assert layers[1].experts.gate_up_proj.weight.shape == (EXPERTS, INNER, HIDDEN)
    assert layers[1].experts.down_proj.weight.shape == (EXPERTS, HIDDEN, INNER // 2)
    parts = [layer(x) for layer in layers]
    assert all(part.terms.shape == (1, 5, HIDDEN) for part in parts)
    expected = build(WHOLE, weights)(x).terms.sum(0)
    torch.testing.assert_close(parts[0].terms[0] + parts[1].terms[0], expected, rtol=1e-5, atol=1e-5)


def test_sums_of_few_tokens_go_to_the_symmetric_memory() -> None:
    x, weights = randn(3, HIDDEN), checkpoint()
    parts = []
    for tp in RANKS:
        buffers = object()
        memory: Any = SimpleNamespace(serves=lambda _: True, next_buffers=lambda _, buffers=buffers: buffers)
        out = build(replace(tp, symmetric_memory=memory), weights)(x)
        assert out.buffers is buffers
        parts.append(out.terms.sum(0))
    torch.testing.assert_close(parts[0] + parts[1], build(WHOLE, weights)(x).terms.sum(0), rtol=1e-5, atol=1e-5)


def test_shards_are_named_by_expert_and_part_and_their_shapes_are_checked() -> None:
    layer = SparseMoE(HIDDEN, MoEConfig(2, 1, INNER, norm_topk_prob=True, has_experts=(True,)), RANKS[0])
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    assert gate_up.shards == ("0.gate", "0.up", "1.gate", "1.up")
    assert down.shards == ("0.down", "1.down")
    assert [name for name, _ in layer.named_parameters()] == [
        "gate.weight",
        "experts.gate_up_proj.weight",
        "experts.down_proj.weight",
    ]
    with pytest.raises(ModelError, match=r"has shape \(32, 24\), config.json implies \(24, 32\)"):
        gate_up.check_weight(gate_up.weight, randn(HIDDEN, INNER), "1.up")
    with pytest.raises(ModelError, match=r"has shape \(32, 12\), config.json implies \(32, 24\)"):
        down.check_weight(down.weight, randn(HIDDEN, INNER // 2), "1.down")


def test_no_tokens_give_no_rows() -> None:
    assert build(WHOLE, checkpoint())(randn(0, HIDDEN)).terms.shape == (CHOICES, 0, HIDDEN)
