"""The expert that computes all tokens of a mixture (Qwen3-Next, GLM-4.5), by products of its own or as one expert more.

In a step of few tokens, products of its own cost four launches. So if it is as wide as the experts that a router
chooses, its weights lie behind theirs in memory, and the grouped products of these compute it too: routing appends it
to the experts of each token. More tokens are faster in dense products. Both ways read the same memory.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.joined_weights import Module, lay_together, tensors_of, with_tensors
from nanoinfer.layers.linear import MergedColumnParallelLinear, RowParallelLinear, wide_rows
from nanoinfer.ops.activations.spec import gated_sum, silu_and_mul
from nanoinfer.ops.common.fp8_format import Activations

# A router with a row for the gate is filled up by rows of zeros to a multiple of this, which tensor cores want.
ROUTER_ROWS = 8


class SharedExpert(nn.Module):
    """Computes all tokens, beside the experts that a router chooses (Qwen3-Next, GLM-4.5): a SwiGLU MLP.

    Its output is left in terms, for the next norm to add up with those of the chosen experts.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, intermediate_size, bias=False, tp=tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=False, tp=tp)

    def forward(self, hidden: Activations) -> Tensor:
        """Return terms to be added up, (num_terms, num_tokens, hidden_size), of this rank."""
        hidden = hidden if self.gate_up_proj.input_format is not None else wide_rows(hidden)
        gated = silu_and_mul(self.gate_up_proj(hidden), self.down_proj.input_format)
        return self.down_proj.quant_method.apply_split(self.down_proj, gated, None)


class SharedExpertGate(nn.Module):
    """Says how much of a token's shared expert counts."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size), requires_grad=False)

    def forward(self, terms: Tensor, hidden: Tensor) -> Tensor:
        """Return the expert's terms times the gates, (1, num_tokens, hidden_size). hidden: the expert's inputs."""
        return gated_sum(terms, hidden, self.weight)


class JoinedExperts(NamedTuple):
    """Holds the experts of a layer with the shared one as the last, and the router that appends it.

    Both are copies of the layer's modules. Their tensors have the same memory, so they are no parameters of the model.
    """

    router: Callable[[Tensor, Tensor | None], Any]
    experts: Experts
    shared: SharedExpert

    @property
    def serve(self) -> bool:
        """Whether they compute what the shared expert does: not if adapters add to its products."""
        layers = zip(_projections(self.experts), _projections(self.shared), strict=True)
        return all(type(own.quant_method) is type(last.quant_method) for own, last in layers)


def join(router: Any, experts: Experts, shared: SharedExpert, gate: SharedExpertGate | None) -> JoinedExperts | None:
    """Lay the weights of a shared expert and of its gate behind those of the experts and of their router.

    They are loaded afterwards. Returns None, and moves nothing, if the shared expert differs from the others in size
    or in how it is held.
    """
    layers = [*zip(_projections(experts), _projections(shared), strict=True)]
    if not router.appends_shared or experts.is_geglu or experts.clamps is not None:
        return None
    if not all(type(own.quant_method) is type(last.quant_method) and _are_alike(own, last) for own, last in layers):
        return None
    joined_experts, joined_router = copy.copy(experts), copy.copy(router)
    projections = [_joined(own, last) for own, last in layers]
    joined_experts._modules = dict(zip(("gate_up_proj", "down_proj"), projections, strict=True))
    joined_router.shared_expert = len(router.weight)
    if gate is not None:
        filling = gate.weight.new_empty(-(len(router.weight) + 1) % ROUTER_ROWS, gate.weight.shape[1])
        rows = lay_together(router.weight, gate.weight, filling)
        filling.zero_()
        joined_router = with_tensors(joined_router, {**tensors_of(router), "weight": rows})
    return JoinedExperts(joined_router, joined_experts, shared)


def _projections(module: Any) -> tuple[Any, Any]:
    return module.gate_up_proj, module.down_proj


def _are_alike(own: nn.Module, last: nn.Module) -> bool:
    """Return whether the tensors of one expert have the shapes and dtypes of each of the others."""
    of_all, of_one = tensors_of(own), tensors_of(last)
    return of_all.keys() == of_one.keys() and all(
        tensor.shape[1:] == of_one[name].shape
        and tensor.dim() > of_one[name].dim()
        and tensor.dtype == of_one[name].dtype
        for name, tensor in of_all.items()
    )


def _joined(own: Module, last: nn.Module) -> Module:
    """Lay the tensors of one expert behind those of the others; return the module with both."""
    of_all, of_one = tensors_of(own), tensors_of(last)
    return with_tensors(own, {name: lay_together(tensor, of_one[name]) for name, tensor in of_all.items()})
