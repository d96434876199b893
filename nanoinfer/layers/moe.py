"""The mixture-of-experts MLP (Shazeer et al. 2017): a router sends each token to a few of many SwiGLU experts.

Under tensor parallelism every rank holds a share of the inner size of every expert, so all ranks do equal work however
the tokens are spread over the experts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.experts import Experts, Routing
from nanoinfer.layers.linear import PartialSum, sum_buffers, wide_rows
from nanoinfer.layers.shared_expert import JoinedExperts, SharedExpert, SharedExpertGate, join
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve, few_rows_product
from nanoinfer.ops.routing.spec import route, route_by_sigmoid, route_in_groups, route_in_groups_by_softmax
from nanoinfer.quantization.linear_method import MAX_SPLIT_K_TOKENS, split_k_product

# At most so many partial sums of a router's product, each of so many inputs at least. For 128 experts of 2048 inputs,
# 16 of them take 2.5 us, and one takes 4.8.
MAX_SPLITS, MIN_SPLIT_SIZE = 16, 128
# For more tokens the shared expert has dense products of its own: these are faster, and four launches cost little.
MAX_JOINED_TOKENS = 96


class Router(nn.Module):
    """Scores the experts for each token. All ranks hold all of it, and route alike: their tokens have equal bits.

    shared_expert: see `route`. appends_shared: whether routers of this class can append a shared expert.
    """

    bias: nn.Parameter | None
    shared_expert: int | None = None
    appends_shared: ClassVar[bool] = True

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = moe.num_experts_per_tok
        self.norm_topk_prob = moe.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        terms, count, normalises = self.terms(hidden), self.num_experts_per_tok, self.norm_topk_prob
        return Routing(*route(terms, count, normalises, row_mask, self.bias, self.shared_expert))

    def terms(self, hidden: Tensor) -> Tensor:
        """Return the logits as terms to be added up, (num_terms, num_tokens, num_experts).

        So few columns are too few tiles to fill a GPU. So a small step is computed by split-K, and one of few rows by
        `few_rows_product`.
        """
        if hidden.is_cuda and few_rows_kernels_serve(len(hidden), self.weight):
            return few_rows_product(hidden, self.weight, out_dtype=torch.float32).unsqueeze(0)
        num_splits = self._num_splits(hidden)
        if num_splits == 1:
            return self.logits(hidden).unsqueeze(0)
        return split_k_product(hidden, self.weight, num_splits, out_dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits by one product, (num_tokens, num_experts)."""
        return F.linear(hidden, self.weight)

    def _num_splits(self, hidden: Tensor) -> int:
        """Return how far to split K: each part is a multiple of 8 inputs, as the tensor cores read them."""
        if not hidden.is_cuda or len(hidden) > MAX_SPLIT_K_TOKENS or hidden.dtype == torch.float32:
            return 1
        size = hidden.shape[1]
        most = min(MAX_SPLITS, size // MIN_SPLIT_SIZE)
        return next((count for count in range(most, 1, -1) if size % (8 * count) == 0), 1)


class BiasedRouter(Router):
    """Scores the experts with a bias for each (gpt-oss)."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe)
        self.bias = torch.nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)


class WideRouter(Router):
    """Computes its logits in float32, as some models are trained."""

    def logits(self, hidden: Tensor) -> Tensor:
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Products of 16 bits are exact in float32, in which the tensor cores add them up.
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), self.weight.float())


class SigmoidRouter(WideRouter):
    """Scores each expert by itself, and corrects the choice by a bias (DeepSeek-V3, GLM-4.5, MiniMax-M2)."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe)
        self.moe = moe
        bias = torch.empty(moe.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        terms, bias, moe = self.terms(hidden), self.e_score_correction_bias, self.moe
        count, normalises, factor = moe.num_experts_per_tok, moe.norm_topk_prob, moe.scaling_factor
        if moe.num_groups == 1:
            return Routing(*route_by_sigmoid(terms, bias, count, normalises, factor, row_mask, self.shared_expert))
        groups = moe.num_groups, moe.num_chosen_groups
        return Routing(*route_in_groups(terms, bias, count, normalises, factor, *groups, row_mask, self.shared_expert))


class SoftmaxGroupRouter(WideRouter):
    """Scores the experts by a softmax, in groups if there are any. Weights are scaled, not normalised (DeepSeek-V2)."""

    appends_shared = False

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe)
        self.moe = moe

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        terms, moe, count, factor = self.terms(hidden), self.moe, self.num_experts_per_tok, self.moe.scaling_factor
        if moe.num_groups > 1:
            num_groups, num_chosen = moe.num_groups, moe.num_chosen_groups
            return Routing(*route_in_groups_by_softmax(terms, count, factor, num_groups, num_chosen, row_mask))
        expert_ids, weights = route(terms, count, False, row_mask)
        return Routing(expert_ids, weights if factor == 1 else weights * factor)


class SparseMoE(nn.Module):
    """Computes the MLP of a layer with experts.

    The terms of a token's experts are left to the next norm to add up: it reads them anyway, so no kernel is needed in
    between. Several ranks add up their own first, to exchange one sum for each token.
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        tp: TensorParallel,
        router: Callable[[int, MoEConfig], nn.Module] = Router,
        experts: type[Experts] = Experts,
        is_shared_gated: bool = True,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.gate = router(hidden_size, moe)
        self.experts = experts(hidden_size, moe, tp)
        self.shared_expert: SharedExpert | None = None
        self.joined: JoinedExperts | None = None
        if moe.shared_size is not None:
            self.shared_expert = SharedExpert(hidden_size, moe.shared_size, tp)
            self.shared_expert_gate = SharedExpertGate(hidden_size) if is_shared_gated else None

    @property
    def input_format(self) -> RowFormat | None:
        """How the layer wants its inputs: if the experts have 8 bits, in 8 bits for these and wide for the router."""
        experts = self.experts.gate_up_proj.input_format
        return experts and replace(experts, keeps_wide=True)

    def settle_weights(self) -> None:
        """Join a shared expert where that pays: not on a CPU, which launches nothing."""
        if not self.gate.weight.is_cpu:
            self.join_shared_expert()

    def join_shared_expert(self) -> None:
        """Lay the shared expert's weights behind the others', if they fit, so that few tokens need fewer launches."""
        if self.shared_expert is not None:
            self.joined = join(self.gate, self.experts, self.shared_expert, self.shared_expert_gate)

    def forward(
        self, hidden: Activations, row_mask: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> PartialSum:
        """Return the experts' outputs (num_tokens, hidden_size), to be added up by the next norm.

        row_mask: (num_tokens,) bool, False for rows without a token, such as the padding of a CUDA graph. No expert is
        read for them, and their sums are zero. None: all rows have tokens. routed: is given the tokens' experts.
        """
        if self._computes_jointly(len(hidden), routed):
            assert self.joined is not None, "only joined experts compute jointly"
            terms, shared = self.joined.experts(hidden, self.joined.router(wide_rows(hidden), row_mask)), None
        else:
            terms, shared = self._compute_apart(hidden, row_mask, routed)
        if self.tp.size == 1:
            return PartialSum(terms, other_terms=shared)
        if shared is not None:
            terms = torch.cat((terms, shared.to(terms.dtype)))
        buffers = sum_buffers(self.tp, len(hidden))
        if buffers is not None:
            return PartialSum(terms, buffers)
        return PartialSum(terms.sum(0, keepdim=True), tp=self.tp)

    def compiled_ahead(self, num_rows: int) -> list[Callable[[], Tensor]]:
        """Return functions to run while the engine loads, which compile the router's kernel for few rows."""
        joined = self.joined
        router: Any = joined.router if joined is not None and joined.serve else self.gate
        if not few_rows_kernels_serve(num_rows, router.weight):
            return []
        return [partial(router.terms, router.weight.new_zeros(num_rows, router.weight.shape[1]))]

    def _computes_jointly(self, num_tokens: int, routed: list[Tensor] | None) -> bool:
        """Return whether the grouped products compute the shared expert, too. `routed` must not get its id."""
        return self.joined is not None and num_tokens <= MAX_JOINED_TOKENS and routed is None and self.joined.serve

    def _compute_apart(
        self, hidden: Activations, row_mask: Tensor | None, routed: list[Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the terms of the chosen experts, and those of the shared one if there is one."""
        routing = self.gate(wide_rows(hidden), row_mask)
        if routed is not None:
            routed.append(routing.expert_ids)
        terms = self.experts(hidden, routing)
        if self.shared_expert is None:
            return terms, None
        shared = self.shared_expert(hidden)
        return terms, shared if self.shared_expert_gate is None else self.shared_expert_gate(shared, wide_rows(hidden))
