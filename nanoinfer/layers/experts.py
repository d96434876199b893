"""The weights of a mixture's experts, and their MLPs; those of gpt-oss have biases and a SwiGLU that is clamped."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import ShardedLinear, wide_rows
from nanoinfer.ops.common.fp8_format import Activations
from nanoinfer.quantization.linear_method import MATRIX, ParamSpec, ProductKind

# Pairs of a token and one of its experts that are computed together: 16,384 tokens of 10 experts each. Each pair has a
# vector of its own until they are added up, two thirds of a gigabyte in all for a hidden size of 2048.
MAX_PAIRS = 10 * 2**14
# Pairs of an expert, on average, in steps that are compiled ahead: more than in decode, and fewer than in the longest
# prefill, both of which an engine runs while it loads. Their tiles have other sizes, or are planned in another way, so
# their kernels differ.
PAIRS_BETWEEN = 16, 32, 48


class Routing(NamedTuple):
    """Says which experts compute each token. Both are (num_tokens, num_experts_per_tok)."""

    expert_ids: Tensor  # int32; a token without experts has the id num_experts
    weights: Tensor  # float32: what each expert's result is multiplied by


class PackedExperts(ShardedLinear):
    """Holds this rank's share of one or two projections of all experts, packed in one weight.

    parts: the names of the projections. A shard is named by expert and part, such as "7.gate".
    full_shape: the shape of one projection of one expert. split_dim: the dimension of it that the ranks split.
    """

    has_bias = False

    def __init__(
        self, num_experts: int, parts: tuple[str, ...], full_shape: tuple[int, int], split_dim: int, tp: TensorParallel
    ) -> None:
        shape = list(full_shape)
        shape[split_dim] = tp.shard_size(full_shape[split_dim], "inner size of an expert")
        super().__init__((num_experts, len(parts) * shape[0], shape[1]), full_shape, self.has_bias)
        self.tp, self.parts, self.is_row_parallel = tp, parts, split_dim == 1

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(f"{expert}.{part}" for expert in range(len(self.weight)) for part in self.parts)

    def unpack(self, full: Tensor, param: Tensor | None) -> dict[str, Tensor]:
        """Cut a tensor of all experts, (num_experts, parts x outputs, inputs), into shards; or one of their scales."""
        spec = MATRIX if param is None or param is self.weight else ParamSpec.of(param)
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

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        expert, _, part = shard.partition(".")
        for place, tensor in self.quant_method.prepare(self, param, full, shard):
            spec = ParamSpec.of(place)
            assert spec.output_dim is not None, "what has no outputs is not packed"
            dim, values_per_entry = spec.split(self.is_row_parallel)
            share = tensor if dim is None else self.tp.shard(tensor, dim, values_per_entry)
            size = share.shape[spec.output_dim]
            share = self.quant_method.pack_share(place, share)
            place[int(expert)].narrow(spec.output_dim, self.parts.index(part) * size, size).copy_(share)


class TransposedExperts(PackedExperts):
    """Holds projections whose inputs come before their outputs in checkpoints, and not in transformers' memory.

    Both have the same names, so the shape decides. Where it is the same in both orders, the checkpoint's is taken.
    """

    def unpack(self, full: Tensor, param: Tensor | None) -> dict[str, Tensor]:
        num_outputs, num_inputs = self.full_shape
        if full.shape[1:] == (num_inputs, len(self.parts) * num_outputs):
            full = full.transpose(1, 2)
        return super().unpack(full, param)


class BiasedExperts(PackedExperts):
    """Holds projections with a bias for each output, (num_experts, outputs).

    In checkpoints inputs come before outputs, gate and up in turn.
    """

    rounds_at_load = False
    has_bias = True

    def unpack(self, full: Tensor, param: Tensor | None) -> dict[str, Tensor]:
        """Cut a tensor of all experts, (num_experts, [inputs,] outputs of all parts in turn), into shards."""
        inputs: tuple[int, ...] = ()  # of a bias
        if param is not self.bias:  # a group of inputs may have one entry, as in scales; the shards are checked
            inputs = (full.shape[1] if full.dim() == 3 else self.full_shape[1],)
        check_shape(full, (len(self.weight), *inputs, len(self.parts) * self.full_shape[0]))
        full = full.movedim(-1, 1)
        return {
            f"{expert}.{part}": full[expert, index :: len(self.parts)]
            for expert in range(len(full))
            for index, part in enumerate(self.parts)
        }

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        super().weight_loader(param, full, shard)
        if param is self.bias and self.is_row_parallel and self.tp.rank > 0:
            param[int(shard.partition(".")[0])].zero_()  # sums of all ranks have it once


class Experts(nn.Module):
    """Holds the experts' weights, under the names that checkpoints give them.

    num_weights_of_a_token: how many a token is multiplied by: of gate, up and down of its experts, on this rank.
    """

    projection: ClassVar[type[PackedExperts]] = PackedExperts
    clamps: tuple[float, float] | None = None  # of gate and up: limit and alpha of `clamped_swiglu`

    def __init__(self, hidden_size: int, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__()
        # (num_experts, 2 * local inner size, hidden_size) and (num_experts, hidden_size, local inner size)
        inner_size, self.is_geglu = moe.intermediate_size, moe.is_geglu
        self.hidden_size, self.num_experts_per_tok = hidden_size, moe.num_experts_per_tok
        self.num_weights_of_a_token = 3 * moe.num_experts_per_tok * inner_size * hidden_size // tp.size
        self.dtype = torch.get_default_dtype()  # of hidden states; weights may be quantized
        self.gate_up_proj = self.projection(moe.num_experts, ("gate", "up"), (inner_size, hidden_size), 0, tp)
        self.down_proj = self.projection(moe.num_experts, ("down",), (hidden_size, inner_size), 1, tp)

    def forward(self, hidden: Activations, routing: Routing) -> Tensor:
        """Return terms to be added up, (num_terms, num_tokens, hidden_size): one or more of each choice, or a sum."""
        max_tokens = max(1, MAX_PAIRS // routing.expert_ids.shape[1])
        if len(hidden) <= max_tokens:
            return self._mlp(hidden, *routing)
        total = torch.empty_like(wide_rows(hidden))
        for start in range(0, len(hidden), max_tokens):
            rows = slice(start, start + max_tokens)
            torch.sum(self._mlp(hidden[rows], routing.expert_ids[rows], routing.weights[rows]), 0, out=total[rows])
        return total.unsqueeze(0)

    def compiled_ahead(self, num_rows: int) -> list[Callable[[], Tensor]]:
        """Return functions to run while the engine loads, which compile what short prefill runs: for one row alone.

        There are none where weights of fewer bits may be widened: the largest step runs at the same time, and needs
        the memory that this takes.
        """
        if num_rows != 1 or self.gate_up_proj.quant_method.kind in (ProductKind.WIDENED, ProductKind.NARROW):
            return []
        return [partial(self._compute_zeros, pairs) for pairs in PAIRS_BETWEEN]

    def _compute_zeros(self, pairs: int) -> Tensor:
        """Compute a step with this many pairs of an expert, on average. No token has an expert: no weight is read."""
        weight, num_choices = self.gate_up_proj.weight, self.num_experts_per_tok
        num_experts = len(weight)
        num_tokens = pairs * num_experts // num_choices
        hidden = torch.zeros(num_tokens, self.hidden_size, dtype=self.dtype, device=weight.device)
        ids = torch.full((num_tokens, num_choices), num_experts, dtype=torch.int32, device=weight.device)
        return self._mlp(hidden, ids, torch.zeros_like(ids, dtype=torch.float32))

    def _mlp(self, hidden: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        gate_up = self.gate_up_proj
        hidden = hidden if gate_up.input_format is not None else wide_rows(hidden)
        return gate_up.quant_method.expert_mlp(self, hidden, expert_ids, weights)


class ClampedExperts(Experts):
    """Computes experts with biases and `clamped_swiglu`."""

    projection: ClassVar = BiasedExperts

    def __init__(self, hidden_size: int, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__(hidden_size, moe, tp)
        assert moe.swiglu_limit is not None, "experts that are clamped have a limit"
        self.clamps = moe.swiglu_limit, moe.swiglu_alpha
