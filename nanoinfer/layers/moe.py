"""The mixture-of-experts MLP (Shazeer et al. 2017): a router sends each token to a few of many SwiGLU experts.

Under tensor parallelism every rank holds a share of the inner size of every expert, so all ranks do equal work however
the tokens are spread over the experts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import PartialSum, sum_buffers, wide_rows
from nanoinfer.layers.shared_expert import SharedExpert, SharedExpertGate
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.experts.spec import expert_mlp
from nanoinfer.ops.routing.spec import route
from nanoinfer.quantization.linear_method import MAX_SPLIT_K_TOKENS, WEIGHT, LinearMethod, ParamSpec

# Pairs of a token and one of its experts that are computed together: 16,384 tokens of 8 experts each. Each pair has a
# vector of its own until they are added up, half a gigabyte in all for a hidden size of 2048.
MAX_PAIRS = 2**17
# Of the router's sums, at most, and inputs of each, at least; for 128 experts of 2048 inputs 16 take 2.5 us, one 4.8.
MAX_SPLITS, MIN_SPLIT_SIZE = 16, 128


class Routing(NamedTuple):
    """Says which experts compute each token. Both are (num_tokens, num_experts_per_tok)."""

    expert_ids: Tensor  # int32; a token without experts has the id num_experts
    weights: Tensor  # float32: what each expert's result is multiplied by


class Router(nn.Module):
    """Scores the experts for each token. All ranks hold all of it, and route alike: their tokens have equal bits."""

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = moe.num_experts_per_tok
        self.norm_topk_prob = moe.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        return Routing(*route(self.terms(hidden), self.num_experts_per_tok, self.norm_topk_prob, row_mask, self.bias))

    def terms(self, hidden: Tensor) -> Tensor:
        """Return the logits as terms to be added up, (num_terms, num_tokens, num_experts).

        So few columns are too few tiles to fill a GPU, so a small step is computed by split-K.
        """
        num_splits = self._num_splits(hidden)
        if num_splits == 1:
            return self.logits(hidden).unsqueeze(0)
        hidden = hidden.unflatten(1, (num_splits, -1)).transpose(0, 1)
        weight = self.weight.unflatten(1, (num_splits, -1)).permute(1, 2, 0)
        return torch.bmm(hidden, weight, out_dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all of them in one product, (num_tokens, num_experts)."""
        return F.linear(hidden, self.weight)

    def _num_splits(self, hidden: Tensor) -> int:
        """Return how far to split K: each part is a multiple of 8 inputs, as the tensor cores read them."""
        if not hidden.is_cuda or len(hidden) > MAX_SPLIT_K_TOKENS or hidden.dtype == torch.float32:
            return 1
        size = hidden.shape[1]
        most = min(MAX_SPLITS, size // MIN_SPLIT_SIZE)
        return next((count for count in range(most, 1, -1) if size % (8 * count) == 0), 1)


class PackedExperts(nn.Module):
    """Holds this rank's share of one or two projections of all experts, packed in one weight.

    parts: the names of the projections. A shard is named by expert and part, such as "7.gate".
    full_shape: the shape of one projection of one expert. split_dim: the dimension of it that the ranks split.
    """

    weight: nn.Parameter
    rounds_at_load = True

    def __init__(
        self, num_experts: int, parts: tuple[str, ...], full_shape: tuple[int, int], split_dim: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.parts = parts
        self.full_shape = full_shape
        self.is_row_parallel = split_dim == 1
        shape = list(full_shape)
        shape[split_dim] = tp.shard_size(full_shape[split_dim], "inner size of an expert")
        self.quant_method = LinearMethod()
        self.quant_method.create_weights(self, num_experts, len(parts) * shape[0], shape[1])

    @property
    def input_format(self) -> RowFormat | None:
        return self.quant_method.input_format

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(f"{expert}.{part}" for expert in range(len(self.weight)) for part in self.parts)

    def unpack(self, full: Tensor, param: Tensor | None) -> dict[str, Tensor]:
        """Cut a tensor of all experts, (num_experts, parts x outputs, inputs), into shards; or one of their scales."""
        spec = WEIGHT if param is None or param is self.weight else ParamSpec.of(param)
        num_experts, num_parts, sizes = len(self.weight), len(self.parts), spec.shape(*self.full_shape)
        if not sizes:  # an expert's scale for all inputs
            check_shape(full, (num_experts,))
            full = full.view(-1, 1).expand(num_experts, num_parts)
            sizes = (1,)
        elif full.shape[1:] == (num_parts, 1):  # a scale for each projection
            sizes = (1, 1)
        check_shape(full, (num_experts, num_parts * sizes[0], *sizes[1:]))
        shards = [part for expert in full for part in expert.split(sizes[0])]
        return dict(zip(self.shards, shards, strict=True))

    def num_outputs(self, _shard: str) -> int:
        return self.full_shape[0]

    def check_weight(self, param: Tensor, full: Tensor, _shard: str) -> None:
        self.quant_method.check(self, param, full, ParamSpec.of(param).shape(*self.full_shape))

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        self.check_weight(param, full, shard)
        expert, _, part = shard.partition(".")
        for place, tensor in self.quant_method.prepare(self, param, full, shard):
            spec = ParamSpec.of(place)
            assert spec.output_dim is not None, "what has no outputs is not packed"
            dim, values_per_entry = spec.split(self.is_row_parallel)
            share = tensor if dim is None else self.tp.shard(tensor, dim, values_per_entry)
            size = share.shape[spec.output_dim]
            share = self.quant_method.pack_share(place, share)
            place[int(expert)].narrow(spec.output_dim, self.parts.index(part) * size, size).copy_(share)


class Experts(nn.Module):
    """The experts' weights, under the names that checkpoints give them."""

    projection: ClassVar[type[PackedExperts]] = PackedExperts

    def __init__(self, hidden_size: int, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__()
        # (num_experts, 2 * local inner size, hidden_size) and (num_experts, hidden_size, local inner size)
        inner_size = moe.intermediate_size
        self.gate_up_proj = self.projection(moe.num_experts, ("gate", "up"), (inner_size, hidden_size), 0, tp)
        self.down_proj = self.projection(moe.num_experts, ("down",), (hidden_size, inner_size), 1, tp)

    def forward(self, hidden: Activations, routing: Routing) -> Tensor:
        """Return terms to be added up, (num_terms, num_tokens, hidden_size): one for each choice, or their sum."""
        max_tokens = max(1, MAX_PAIRS // routing.expert_ids.shape[1])
        if len(hidden) <= max_tokens:
            return self._mlp(hidden, *routing)
        total = torch.empty_like(wide_rows(hidden))
        for start in range(0, len(hidden), max_tokens):
            rows = slice(start, start + max_tokens)
            torch.sum(self._mlp(hidden[rows], routing.expert_ids[rows], routing.weights[rows]), 0, out=total[rows])
        return total.unsqueeze(0)

    def _mlp(self, hidden: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        terms = gate_up.quant_method.expert_mlp(gate_up, down, hidden, expert_ids, weights)
        if terms is not None:
            return terms
        wide_weights = gate_up.quant_method.wide_weight(gate_up), down.quant_method.wide_weight(down)
        return expert_mlp(wide_rows(hidden), *wide_weights, expert_ids, weights)


class SparseMoE(nn.Module):
    """The MLP of a layer with experts.

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
        if moe.shared_size is not None:
            self.shared_expert = SharedExpert(hidden_size, moe.shared_size, tp)
            self.shared_expert_gate = SharedExpertGate(hidden_size) if is_shared_gated else None

    @property
    def input_format(self) -> RowFormat | None:
        """How the layer wants its inputs: if the experts have 8 bits, in 8 bits for these and wide for the router."""
        experts = self.experts.gate_up_proj.input_format
        return experts and replace(experts, keeps_wide=True)

    def forward(
        self, hidden: Activations, row_mask: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> PartialSum:
        """(num_tokens, hidden_size) -> the same, to be added up by the next norm.

        row_mask: (num_tokens,) bool, False for rows without a token, such as the padding of a CUDA graph. No expert is
        read for them, and their sums are zero. None: all rows have tokens. routed: is given the tokens' experts.
        """
        routing = self.gate(wide_rows(hidden), row_mask)
        if routed is not None:
            routed.append(routing.expert_ids)
        terms, shared = self.experts(hidden, routing), None
        if self.shared_expert is not None:
            shared = self.shared_expert(hidden)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(shared, wide_rows(hidden))
        if self.tp.size == 1:
            return PartialSum(terms, other_terms=shared)
        if shared is not None:
            terms = torch.cat((terms, shared.to(terms.dtype)))
        buffers = sum_buffers(self.tp, len(hidden))
        if buffers is not None:
            return PartialSum(terms, buffers)
        return PartialSum(terms.sum(0, keepdim=True), tp=self.tp)
