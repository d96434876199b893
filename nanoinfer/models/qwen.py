"""Qwen2, Qwen2.5 and Qwen3: the common decoder with biases or norms of queries and keys; with experts.

Those with linear attention: `qwen3_next.py`.
"""

from dataclasses import replace
from functools import partial
from typing import ClassVar

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.experts import Experts, TransposedExperts
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_windows
from nanoinfer.models.decoder_spec import DecoderSpec

SWITCH = "use_sliding_window"


def all_but_the_first(fields: Fields) -> tuple[bool, ...]:
    """Return True for all layers but the first `max_window_layers`."""
    first = fields.int("max_window_layers", least=0)
    return tuple(index >= first for index in range(fields.int("num_hidden_layers")))


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Has biases on queries, keys and values."""

    spec: ClassVar = DecoderSpec(qkv_bias=True)
    config_defaults: ClassVar = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    config_readers: ClassVar = {"windows": partial(read_windows, local_layers=all_but_the_first, switch=SWITCH)}


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Normalises queries and keys."""

    spec: ClassVar = DecoderSpec(qk_norm=True)
    config_defaults: ClassVar = {**Qwen2ForCausalLM.config_defaults, "head_dim": 128}


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Has experts in most layers."""

    spec: ClassVar = DecoderSpec(qk_norm=True)
    config_defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    config_readers: ClassVar = {"windows": partial(read_windows, switch=SWITCH), "moe": read_experts}


class Qwen3VLExperts(Experts):
    """Holds experts that are packed in checkpoints, inputs before outputs."""

    projection: ClassVar = TransposedExperts


def read_normalised_experts(fields: Fields) -> MoEConfig:
    """Read the sizes of experts whose weights add up to 1, whatever norm_topk_prob says."""
    return replace(read_experts(fields), norm_topk_prob=True)


class Qwen3VLMoeForCausalLM(Qwen3MoeForCausalLM):
    """Is the text part of Qwen3-VL with experts."""

    spec: ClassVar = DecoderSpec(qk_norm=True, experts=partial(SparseMoE, experts=Qwen3VLExperts))
    config_defaults: ClassVar = {
        **Qwen3MoeForCausalLM.config_defaults,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
    }
    config_readers: ClassVar = {**Qwen3MoeForCausalLM.config_readers, "moe": read_normalised_experts}
