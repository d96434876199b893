"""What a runner has on its device beside the weights: it sleeps without, and makes it anew when it wakes up."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.engine.batch import Header, PacketSections
from nanoinfer.engine.limits import RunnerLimits
from nanoinfer.layers.attention.block_copies import copy_cached_tokens
from nanoinfer.layers.attention.layer_groups import LayerGroups
from nanoinfer.layers.attention.metadata import KVCache
from nanoinfer.layers.linear_attention.states import StateShape
from nanoinfer.layers.routed_experts import RoutedExperts
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.execution import capture_largest_prefill
from nanoinfer.models.sliced_prefill import PrefillGraphs
from nanoinfer.pooling.dense import DenseLayer
from nanoinfer.pooling.pooler import Pooler
from nanoinfer.runner import memory
from nanoinfer.runner.cuda_graphs import DecodeGraphs
from nanoinfer.runner.step_tables import StepTables
from nanoinfer.sampling.sampler import Sampler


@dataclass(slots=True)
class StepBuffers:
    """What steps need whatever the size of the cache.

    logits: (max_num_seqs, this rank's ids), of all decode graphs and of what runs without. prefill_graphs: by number of
    tokens.
    """

    logits: Tensor
    prefill_graphs: dict[int, PrefillGraphs]

    @classmethod
    def allocate(
        cls, config: EngineConfig, model: DecoderForCausalLM, max_step_tokens: int, uses_graphs: bool
    ) -> "StepBuffers":
        graphs: dict[int, PrefillGraphs] = {}
        # Where rows or lengths limit a step, and not its budget, hardly any has just so many tokens.
        is_usual = max_step_tokens == config.max_num_batched_tokens and not config.enable_return_routed_experts
        if uses_graphs and is_usual:
            graphs = capture_largest_prefill(model.model, max_step_tokens)
        return cls(model.lm_head.weight.new_empty(config.max_num_seqs, model.lm_head.vocab.size), graphs)


@dataclass(slots=True)
class DeviceState:
    """The buffers of steps, the cache, and what is remembered of its rows.

    routed_experts: None unless they are asked for. graphs: of decode steps; None without CUDA graphs, and until they
    are captured.
    """

    buffers: StepBuffers
    kv_cache: KVCache
    tables: StepTables
    sampler: Sampler
    pooler: Pooler
    routed_experts: RoutedExperts | None
    graphs: DecodeGraphs | None = field(default=None)

    @classmethod
    def allocate(
        cls,
        buffers: StepBuffers,
        limits: RunnerLimits,
        config: EngineConfig,
        model_config: ModelConfig,
        groups: LayerGroups,
        kv_dtype: torch.dtype,
        model: DecoderForCausalLM,
        dense: list[DenseLayer],
    ) -> "DeviceState":
        """Allocate what `limits` says. dense: the layers after pooling."""
        tp, device, block_size = model.model.tp, model.lm_head.weight.device, config.kvcache_block_size
        shape = memory.cache_shape(model_config, groups.layers_per_page, limits.num_blocks, block_size, tp)
        kv_cache = memory.allocate_kv_cache(shape, kv_dtype, device)
        state_shape = StateShape.of(model_config, model.lm_head.weight.dtype, tp)
        recurrent = state_shape.allocate(limits.max_num_seqs + limits.num_snapshots, device) if state_shape else None
        tables = StepTables(limits.max_num_seqs, limits.max_model_len, kv_cache, recurrent, groups.num_groups)
        vocab_size, mode = model_config.vocab_size, config.logprobs_mode
        sampler = Sampler(tables.token_ids, tables.context_lens, vocab_size, tp, mode)
        assert model_config.pooling is not None, "the folder was read, and with it how the model pools"
        pooler = Pooler(model, model_config.pooling, dense)
        routed_experts = None
        if config.enable_return_routed_experts and model_config.moe is not None:
            routed_experts = RoutedExperts(model_config.moe, limits.num_blocks, block_size, device)
        return cls(buffers, kv_cache, tables, sampler, pooler, routed_experts)

    def enter(self, header: Header, on_host: PacketSections, on_device: PacketSections) -> None:
        """Enter what is new of rows and blocks, and make the copies that a step begins with."""
        self.tables.update(header, on_device)
        self.sampler.admit(header, on_host, on_device)
        self.pooler.admit(header, on_host)
        if header.num_block_copies:
            copy_cached_tokens(self.kv_cache, on_device.block_copies)
            if self.routed_experts is not None:
                self.routed_experts.copy_blocks(on_device.block_copies)
        if header.num_kept_states or header.num_restored_states:
            self.tables.copy_states(on_host)
