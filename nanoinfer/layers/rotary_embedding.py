"""Rotary position embedding (RoPE, Su et al. 2021), and the scaling methods by which checkpoints reach longer contexts.

The rotation is fused with the q/k norms and the KV-cache write: see `norm_rope_store` in
`ops/kv_cache/spec.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.errors import ModelError

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


class RotaryTable(Protocol):
    """Holds cosines and sines by position, (num_positions, rotary_dim) float32. is_interleaved: see `rotate`."""

    @property
    def cos_sin_cache(self) -> Tensor: ...
    @property
    def is_interleaved(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class StepRotary:
    """Holds the cosines and sines of a step's tokens, (num_tokens, rotary_dim) float32; see `RotaryTable`.

    places: (num_tokens,) int64, where in the table each token has its own: 0, 1, 2, ...
    """

    cos_sin_cache: Tensor
    is_interleaved: bool
    places: Tensor


class RotaryEmbedding(nn.Module):
    """Holds the cosines and sines of all positions, computed once: (max_positions, rotary_dim) float32.

    rotates: False for layers that know no positions; their angles are 0, and rotating by them changes nothing.
    is_interleaved: see `rotate`. query_scales: (max_positions, 1), by which queries are multiplied before; None: by 1.
    """

    cos_sin_cache: Tensor
    query_scales: Tensor | None

    def __init__(
        self, config: ModelConfig, max_positions: int, rotates: bool = True, is_interleaved: bool = False
    ) -> None:
        super().__init__()
        self.is_interleaved = is_interleaved
        inv_freq, scale = rope_frequencies(config, max_positions)
        if not rotates:
            inv_freq, scale = torch.zeros_like(inv_freq), 1.0
        angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inv_freq
        cache = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
        self.register_buffer("cos_sin_cache", cache, persistent=False)
        self.register_buffer("query_scales", query_scales(config, max_positions), persistent=False)

    def of_three_positions(self, positions: Tensor, axes: Tensor) -> StepRotary:
        """Return the rotations of tokens with positions of time, height and width (M-RoPE, Qwen2-VL).

        positions: (3, num_tokens) int64. axes: (rotary_dim / 2,) int64, by which of the three each pair of dimensions
        is rotated.
        """
        by_axis = self.cos_sin_cache[positions]  # (3, num_tokens, rotary_dim)
        index = axes.repeat(2).expand(1, positions.shape[1], -1)  # cosines, then sines
        places = torch.arange(positions.shape[1], device=positions.device)
        return StepRotary(by_axis.gather(0, index)[0], self.is_interleaved, places)


def position_axes(sections: Sequence[int], is_interleaved: bool) -> list[int]:
    """Return for each pair of dimensions whether time (0), height (1) or width (2) rotates it.

    sections: how many pairs each of them rotates. is_interleaved: whether they take turns, as in Qwen3-VL, until height
    and width have theirs; else each has neighbouring pairs.
    """
    if not is_interleaved:
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]


def rotary_embeddings(config: ModelConfig, max_positions: int, is_interleaved: bool) -> list[RotaryEmbedding]:
    """Return the rotary embedding of each layer. Layers with equal ones share a module."""
    modules: dict[tuple[bool, bool, int], RotaryEmbedding] = {}
    embeddings = []
    for index, (is_unrotated, window) in enumerate(zip(config.unrotated, config.windows, strict=True)):
        layer = config.of_layer(index)
        # Which RoPE a layer has does not depend on whether a sequence can outgrow its window.
        if is_local := bool(window) and not is_unrotated and config.local_rope is not None:
            layer = replace(layer, rope=config.local_rope)
        kind = is_unrotated, is_local, layer.rotary_dim
        if kind not in modules:
            modules[kind] = RotaryEmbedding(layer, max_positions, not is_unrotated, is_interleaved)
        embeddings.append(modules[kind])
    return embeddings


def query_scales(config: ModelConfig, max_positions: int) -> Tensor | None:
    """Return the factor of the queries at each position, (max_positions, 1) float32; None: all are 1.

    It is 1 + beta log(1 + floor(position / original length)), so that attention over many keys stays sharp (Llama 4,
    Ministral 3).
    """
    beta, original = config.query_scaling_beta, config.rope.parameters.get("original_max_position_embeddings")
    if beta is None or original is None or max_positions <= original:
        return None
    lengths = torch.arange(max_positions, dtype=torch.float32).div(original, rounding_mode="floor")
    return (1 + beta * torch.log1p(lengths)).unsqueeze(1)


def rope_frequencies(config: ModelConfig, max_positions: int) -> tuple[Tensor, float]:
    """Return the frequency of each pair of dimensions, (rotary_dim / 2,) float32, and a factor for cosines and sines.

    A frequency is the angle in radians per position. max_positions: how many positions there may be, by which longrope
    chooses its factors. Raises ModelError for an unknown rope_type or a missing parameter.
    """
    rope = config.rope
    if rope.rope_type not in ROPE_TYPES:
        raise ModelError(f"rope_type={rope.rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    try:
        if rope.rope_type == "linear":
            return inv_freq / rope.parameters["factor"], 1.0
        if rope.rope_type == "dynamic":
            _check_dynamic(config, max_positions, rope.parameters["factor"])
            return inv_freq, 1.0
        if rope.rope_type == "proportional":
            return _proportional(inv_freq, config), 1.0
        if rope.rope_type == "llama3":
            return _llama3(inv_freq, config), 1.0
        if rope.rope_type == "longrope":
            return _longrope(inv_freq, config, max_positions)
        return _yarn(inv_freq, config) if rope.rope_type == "yarn" else (inv_freq, 1.0)
    except KeyError as error:
        raise ModelError(f"rope_type={rope.rope_type!r} needs the parameter {error} in config.json") from None
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"the RoPE parameters of config.json go beyond what can be computed ({error})") from None


def _check_dynamic(config: ModelConfig, max_positions: int, factor: float) -> None:
    """Refuse positions for which dynamic NTK is not plain RoPE: there the base depends on the current length."""
    if max_positions > (limit := config.max_position_embeddings):
        raise ModelError(
            f"rope_type='dynamic' with factor={factor} changes all positions of a sequence that outgrows {limit}, and "
            f"the keys in the KV cache would stay; use max_model_len={limit} at most"
        )


def _proportional(inv_freq: Tensor, config: ModelConfig) -> Tensor:
    """Leave the last pairs of dimensions unrotated, the rest as they are where all are rotated (Gemma 4)."""
    p, num_pairs = config.rope.parameters, len(inv_freq)
    num_rotated = int(p.get("partial_rotary_factor", 1.0) * num_pairs)
    return torch.where(torch.arange(num_pairs) < num_rotated, inv_freq / p.get("factor", 1.0), 0.0)


def _llama3(inv_freq: Tensor, config: ModelConfig) -> Tensor:
    """Scale as Llama 3.1 does: divide low frequencies by `factor`, keep high ones, and blend those in between."""
    p = config.rope.parameters
    original, low, high = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / p["factor"] * (1 - keep)


def _longrope(inv_freq: Tensor, config: ModelConfig, max_positions: int) -> tuple[Tensor, float]:
    """Scale by LongRoPE (Ding et al. 2024): divide each frequency by a factor of its own.

    There is a list of factors for sequences within the original context, and one for longer ones. All sequences take
    the same, because keys of both kinds cannot stand in one cache.
    """
    p = config.rope.parameters
    original = p["original_max_position_embeddings"]
    name = "long_factor" if max_positions > original else "short_factor"
    if len(p[name]) != len(inv_freq):
        raise ModelError(f"{name} of config.json has {len(p[name])} factors, and {len(inv_freq)} pairs are rotated")
    scale = p.get("attention_factor")
    if scale is None:
        factor = p.get("factor") or config.max_position_embeddings / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inv_freq / torch.tensor(p[name], dtype=torch.float32), scale


def _yarn(inv_freq: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Scale by YaRN (Peng et al. 2023): blend along a ramp over the dimensions, and adjust attention's temperature."""
    p, dim, base = config.rope.parameters, config.rotary_dim, config.rope.theta
    factor = p["factor"]
    original = p.get("original_max_position_embeddings") or config.max_position_embeddings

    def dimension_of(turns: float) -> float:
        """Return the (fractional) index of the pair of dimensions that turns so often within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(p.get("beta_fast") or 32.0), dimension_of(p.get("beta_slow") or 1.0)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    stretched = inv_freq / factor * interpolate + inv_freq * (1 - interpolate)

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = mscale(1.0)
        if p.get("mscale") and p.get("mscale_all_dim"):
            attention_factor = mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return stretched, attention_factor
