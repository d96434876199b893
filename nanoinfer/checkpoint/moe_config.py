"""The experts of a config.json: how many there are, which layers have them, and how they are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.checkpoint.config_fields import read_flag, read_number
from nanoinfer.errors import ModelError


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Describes the mixture-of-experts MLPs of a model.

    norm_topk_prob: whether the weights of a token's experts are made to sum to 1. has_experts: whether a layer has
    experts, by layer; the others have a dense MLP. shared_size: the inner size of the expert that computes all tokens;
    None: there is none. num_groups, num_chosen_groups: experts are in groups, and a token's come from a few of these.
    scaling_factor: what the weights of a token's experts are multiplied by. swiglu_limit, swiglu_alpha: where gate and
    up are clamped, and the slope of the gate's sigmoid, see `clamped_swiglu` of ops/experts; None: plain SwiGLU.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of an expert
    norm_topk_prob: bool
    has_experts: tuple[bool, ...]
    shared_size: int | None = None
    num_groups: int = 1
    num_chosen_groups: int = 1
    scaling_factor: float = 1.0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0


def read_moe(raw: Mapping[str, Any], special: Mapping[str, Any], num_layers: int) -> MoEConfig:
    """Read the sizes of the experts, and which layers have any."""
    names = ("n_routed_experts", "num_local_experts")  # GLM's and Mixtral's
    name = next((name for name in names if raw.get(name) is not None), "num_experts")
    num_experts = read_number(raw, name, int, special["num_experts"])
    per_token = read_number(raw, "num_experts_per_tok", int)
    if per_token > num_experts:
        raise ModelError(f"config.json has num_experts_per_tok={per_token}, more than its num_experts={num_experts}")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise ModelError(f"config.json has mlp_only_layers={dense!r:.200}; it must be a list of layers")
    step = read_number(raw, "decoder_sparse_step", int, 1)
    num_dense = raw.get("first_k_dense_replace", 0) if "first_k_dense_replace" in special else 0
    if isinstance(num_dense, bool) or not isinstance(num_dense, int) or num_dense < 0:
        raise ModelError(f"config.json has first_k_dense_replace={num_dense!r}; it must be a whole number")
    num_groups, num_chosen = (
        read_number(raw, name, int, 1) if name in special else 1 for name in ("n_group", "topk_group")
    )
    if num_experts % num_groups or num_chosen > num_groups or per_token > num_chosen * (num_experts // num_groups):
        raise ModelError(
            f"config.json has n_group={num_groups} and topk_group={num_chosen}, which {num_experts} experts, "
            f"{per_token} for each token, cannot have"
        )
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=read_number(raw, "moe_intermediate_size", int, raw.get("intermediate_size")),
        norm_topk_prob=read_flag(raw, "norm_topk_prob", False),
        has_experts=tuple(
            index not in dense and index >= num_dense and (index + 1) % step == 0 for index in range(num_layers)
        ),
        shared_size=_read_shared_size(raw, special),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        scaling_factor=read_number(raw, scale, float, 1.0) if (scale := "routed_scaling_factor") in special else 1.0,
        swiglu_limit=read_number(raw, "swiglu_limit", float) if "swiglu_limit" in special else None,
        swiglu_alpha=read_number(raw, "swiglu_alpha", float) if "swiglu_limit" in special else 1.0,
    )


def _read_shared_size(raw: Mapping[str, Any], special: Mapping[str, Any]) -> int | None:
    """Read the inner size of the expert that computes all tokens; several count as one, with the sum of their sizes."""
    if "shared_expert_intermediate_size" in special:
        return read_number(raw, "shared_expert_intermediate_size", int)
    if "n_shared_experts" not in special or raw.get("n_shared_experts") in (0, None):
        return None
    size: int = read_number(raw, "n_shared_experts", int) * read_number(raw, "moe_intermediate_size", int)
    return size
