"""Gemma 4: heads of two sizes, norms around each part, experts beside the MLP, inputs for each layer.

Layers with a window have heads of 256, the others of 512 and fewer KV heads, whose values may be their raw keys. In the
E-models the last layers attend to the keys and values of earlier ones, and each layer has an embedding of its own.
"""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from nanoinfer.caches.block_layout import num_local_kv_heads
from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.model_config import LayerConfig, LayerInputs, ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.image_attention import attend_to_whole_images
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.experts import Experts, Routing
from nanoinfer.layers.layernorm import ResidualStream, ResidualSum, WideRMSNorm
from nanoinfer.layers.linear import ColumnParallelLinear, PartialSum, QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.moe import Router
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import ROPE_BY_TYPE_OF_LAYER, read_head_dim, read_num_kv_heads
from nanoinfer.models.decoder import Decoder, DecoderLayer
from nanoinfer.models.decoder_spec import DecoderSetup, DecoderSpec
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.gemma import Gemma3Embedding
from nanoinfer.models.layer_stack import Layer, RunLayer
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul, gelu_tanh_times
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.kv_cache.spec import qkv_norm_rope_store
from nanoinfer.ops.norms.spec import add_rms_norms, rms_norm
from nanoinfer.ops.routing.spec import route

EVERY_RANK = TensorParallel()  # for small products that are not split: each rank computes them whole
LAYER_SHARE = 2**-0.5  # a layer's input is the sum of its two parts, times this

# --- config.json ---


def read_windows(fields: Fields) -> tuple[int | None, ...]:
    """Read how many tokens each token attends to, by layer. The last layer attends to all, whatever its type."""
    num_layers, window = fields.int("num_hidden_layers"), fields.int("sliding_window")
    fields.choice("use_bidirectional_attention", ("vision",), "vision")  # which makes no difference to texts
    is_local = fields.layers(num_layers, {"sliding_attention": True, "full_attention": False})
    if is_local is None:
        is_local = tuple((index + 1) % 6 != 0 for index in range(num_layers))
    return tuple(window if local and index < num_layers - 1 else None for index, local in enumerate(is_local))


def read_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Read what differs between the layers: by their types, or as transformers 5.24 writes it, by their numbers."""
    windows, num_shared = read_windows(fields), fields.int("num_kv_shared_layers", 0, least=0)
    num_kv_heads, head_dim, mlp_size = read_num_kv_heads(fields), read_head_dim(fields), fields.int("intermediate_size")
    has_keys_as_values = fields.flag("attention_k_eq_v")
    owning = windows[: len(windows) - num_shared]
    if not {*windows} <= {*owning}:
        raise fields.error("num_kv_shared_layers", "a layer with each window must come before those that share")
    wide = 2 if fields.flag("use_double_wide_mlp") else 1
    is_by_type = fields.get("per_layer_config") is None  # an empty one says that all layers are alike
    by_number = fields.part("per_layer_config")
    if not all(str(number).isdecimal() for number in by_number.values):
        raise fields.error("per_layer_config", "it must have the numbers of layers as its keys")
    numbers = {int(number): number for number in by_number.values}  # which may begin with zeros
    layers = []
    for index, window in enumerate(windows):
        sizes = {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}
        if index in numbers:
            own = by_number.part(numbers[index])
            sizes = {name: own.int(name, size) for name, size in sizes.items()}
            if others := {*own.values} - {*sizes}:
                raise by_number.error(numbers[index], f"it can have {' and '.join(sizes)} alone, and has {min(others)}")
        elif is_by_type and window is None:
            num_global = fields.optional_int("num_global_key_value_heads") if has_keys_as_values else None
            sizes = {"num_key_value_heads": num_global or num_kv_heads, "head_dim": fields.int("global_head_dim")}
        shares = index >= len(owning)
        layers.append(
            LayerConfig(
                **sizes,
                rotary_dim=sizes["head_dim"],
                intermediate_size=mlp_size * wide if shares else mlp_size,
                has_keys_as_values=has_keys_as_values and window is None,
                shares_cache=shares,
            )
        )
    return tuple(layers)


def read_layer_inputs(fields: Fields) -> LayerInputs | None:
    """Read the sizes of the layers' own embeddings; None where they have none."""
    size = fields.int("hidden_size_per_layer_input", least=0)
    return LayerInputs(fields.int("vocab_size_per_layer_input"), size) if size else None


def read_experts(fields: Fields) -> MoEConfig | None:
    """Read the sizes of the experts; None where there are none."""
    if not fields.flag("enable_moe_block"):
        return None
    num_experts, per_token = fields.int("num_experts"), fields.int("top_k_experts")
    if per_token > num_experts:
        raise ModelError(f"config.json has top_k_experts={per_token}, more than its num_experts={num_experts}")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=fields.int("moe_intermediate_size"),
        norm_topk_prob=True,
        has_experts=(True,) * fields.int("num_hidden_layers"),
        is_beside_mlp=True,
        is_geglu=True,
    )


# --- layers ---


class Gemma4Attention(nn.Module):
    """Computes attention of unscaled scores, from normalised queries to normalised keys and values.

    A layer may have no values, which then are its keys, or neither keys nor values, which then are an earlier layer's.
    setup: with the config of the layer. place, window, rotary_emb: see `DecoderAttention`.
    """

    def __init__(self, setup: DecoderSetup, place: LayerPlace, window: int | None, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        config, tp = setup.config, setup.tp
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        size, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        parts = ("q",) if config.shares_cache else ("q", "k") if config.has_keys_as_values else ("q", "k", "v")
        self.qkv_proj = QKVParallelLinear(size, head_dim, num_heads, num_kv_heads, bias, tp, parts=parts)
        self.o_proj = RowParallelLinear(num_heads * head_dim, size, bias, tp)
        self.q_norm = WideRMSNorm(head_dim, eps)
        self.k_norm = None if config.shares_cache else WideRMSNorm(head_dim, eps)
        spec = AttentionSpec(
            num_heads=tp.shard_size(num_heads, "query heads"),
            num_kv_heads=num_local_kv_heads(config, tp),
            head_dim=head_dim,
            scale=config.attention_scale,
            window=window,
        )
        self.place, self.rotary_emb, self.num_heads = place, rotary_emb, spec.num_heads
        self.has_window = window is not None
        self.backend = setup.backends.for_layer(spec, place)

    @property
    def input_format(self) -> RowFormat | None:
        return self.qkv_proj.input_format

    def project(self, hidden: Activations) -> Tensor:
        return self.qkv_proj(hidden)

    def attend(self, qkv: Tensor, step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, o_proj's input size). qkv: what `project` returns."""
        cache, metadata = step.kv_cache.layer(self.place), step.metadata[self.place.table]
        k_weight = None if self.k_norm is None else self.k_norm.weight
        q, k, v = qkv_norm_rope_store(
            qkv,
            self.num_heads,
            self.q_norm.weight,
            k_weight,
            self.q_norm.eps,
            step.positions,
            self.rotary_emb.cos_sin_cache,
            cache,
            metadata.slot_mapping,
        )
        if isinstance(metadata, PrefillMetadata):
            heads = self.backend.prefill(q, k, v, cache, metadata)
            if step.images is not None and (whole := step.images.whole_in(self.has_window)):
                attend_to_whole_images(heads, q, cache, metadata, self.backend.spec, whole)
            return heads.flatten(1)
        return self.backend.decode(q, cache, metadata).flatten(1)


class RouterNorm(WideRMSNorm):
    """Normalises the router's inputs, by a weight that checkpoints hold times the square root of the size."""

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        param.copy_(full.float() * len(full) ** -0.5)


class Gemma4Router(Router):
    """Scores the experts, and multiplies the weights of each by a scale of its own. norm: of its inputs."""

    def __init__(self, hidden_size: int, moe: MoEConfig, eps: float) -> None:
        super().__init__(hidden_size, moe)
        self.norm = RouterNorm(hidden_size, eps)
        self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        count, normalises, scales = self.num_experts_per_tok, self.norm_topk_prob, self.per_expert_scale
        return Routing(*route(self.terms(hidden), count, normalises, row_mask, expert_scales=scales))


def whole_linear(input_size: int, name: str, output_size: int) -> ColumnParallelLinear:
    """Return a small product that each rank computes all of, and that is not rounded to fewer bits at load."""
    linear = ColumnParallelLinear(input_size, {name: output_size}, bias=False, tp=EVERY_RANK)
    linear.rounds_at_load = False
    return linear


class LayerInputStream(ResidualStream):
    """Carries the layers' own inputs beside the stream: (num_tokens, num_layers, size)."""

    def __init__(self, residual: Tensor, layer_inputs: Tensor) -> None:
        super().__init__(residual)
        self.layer_inputs = layer_inputs


def rounded(rows: Tensor, row_format: RowFormat | None) -> Activations:
    """Return rows in the format that a product wants."""
    return rows if row_format is None else quantize_rows(rows, row_format)


class BranchRows(NamedTuple):
    """Holds the stream as the three parts behind attention read it, each normalised by its own weight."""

    of_mlp: Activations
    of_router: Tensor
    of_experts: Activations


class Gemma4Layer(DecoderLayer):
    """Computes a layer, adds what follows from its own input if it has one, and scales the stream."""

    def __init__(self, setup: DecoderSetup, index: int, window: int | None, rotary_emb: RotaryEmbedding) -> None:
        config, tp = setup.config.of_layer(index), setup.tp
        moe, inputs, size, eps = config.moe, config.layer_inputs, config.hidden_size, config.rms_norm_eps
        super().__init__(replace(setup, config=replace(config, moe=None)), index, window, rotary_emb)
        self.self_attn.has_window = config.windows[index] is not None  # though no sequence may outgrow it
        self.index, self.tp, self.has_experts, self.has_input = index, tp, moe is not None, inputs is not None
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        if moe is not None:
            self.router = Gemma4Router(size, moe, eps)
            self.experts = Experts(size, moe, replace(tp, share_multiple=config.mlp_multiple))
            self.post_feedforward_layernorm_1 = WideRMSNorm(size, eps)
            self.pre_feedforward_layernorm_2 = WideRMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = WideRMSNorm(size, eps)
        if inputs is not None:
            self.sum = ResidualSum(size, eps)
            self.per_layer_input_gate = whole_linear(size, "gate", inputs.size)
            self.per_layer_projection = RowParallelLinear(inputs.size, size, bias=False, tp=EVERY_RANK)
            self.per_layer_projection.rounds_at_load = False
            self.post_per_layer_input_norm = WideRMSNorm(size, eps)

    def normalise_sum(self, stream: ResidualStream) -> None:
        if not self.has_experts:
            super().normalise_sum(stream)
            return
        added = stream.added
        assert added is not None, "the stream is normalised after attention has added to it"
        assert added.sum_weight is not None, "what attention adds is normalised before"
        weights = (
            self.pre_feedforward_layernorm.weight,
            self.router.norm.weight,
            self.pre_feedforward_layernorm_2.weight,
        )
        eps, terms = self.router.norm.eps, added.all_reduced()
        (of_mlp, of_router, of_experts), total = add_rms_norms(terms, stream.residual, weights, eps, added.sum_weight)
        stream.normed = BranchRows(
            rounded(of_mlp, self.mlp.input_format),
            of_router,
            rounded(of_experts, self.experts.gate_up_proj.input_format),
        )
        stream.residual, stream.added = total, None

    def add_mlp(
        self, stream: ResidualStream, row_mask: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> None:
        if self.has_experts:
            stream.add(self._mlp_and_experts(stream.normed, row_mask, routed), self.norms.of_mlp)
        else:
            super().add_mlp(stream)
        if self.has_input:
            self._add_input(cast(LayerInputStream, stream))
        stream.scale(self.layer_scalar)

    def _mlp_and_experts(self, rows: BranchRows, row_mask: Tensor | None, routed: list[Tensor] | None) -> PartialSum:
        """Return what the MLP and the experts make of the stream, each to be normalised before both are added up."""
        routing = self.router(rows.of_router, row_mask)
        if routed is not None:
            routed.append(routing.expert_ids)
        terms = self.mlp(rows.of_mlp).terms
        of_experts = self.experts(rows.of_experts, routing)
        if self.tp.size > 1:
            terms, of_experts = self.tp.all_reduce(torch.stack((terms[0], of_experts.sum(0)))).split(1)
        weights = self.post_feedforward_layernorm_1.weight, self.post_feedforward_layernorm_2.weight
        return PartialSum(terms, other_terms=of_experts, part_weights=weights)

    def _add_input(self, stream: LayerInputStream) -> None:
        """Add the layer's input, gated by the stream."""
        stream.normalise(self.sum)
        gate = self.per_layer_input_gate(stream.residual)
        gated = gelu_tanh_times(gate, stream.layer_inputs[:, self.index])
        stream.add(self.per_layer_projection(gated), self.post_per_layer_input_norm)


class Gemma4Decoder(Decoder):
    """Holds the embeddings of the layers' own inputs, too.

    The last layers may have no keys and values, so nothing reads what they make of a prompt's tokens but its logits.
    They compute the last token of each chunk alone where no other token's hidden state is wanted (as in YOCO, Sun et
    al. 2024).
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        max_positions: int,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__(config, spec, max_positions, backends, tp)
        self.backends, self.sum = backends, ResidualSum(config.hidden_size, config.rms_norm_eps)
        self.num_sharing = sum(layer.shares_cache for layer in config.layers or ())  # the last layers
        inputs = self.layer_inputs = config.layer_inputs
        if inputs is not None:
            size = config.num_hidden_layers * inputs.size
            self.embed_tokens_per_layer = Gemma3Embedding(inputs.vocab_size, size, self.tp, scaled_by=inputs.size)
            self.per_layer_model_projection = whole_linear(config.hidden_size, "input", size)
            self.per_layer_projection_norm = WideRMSNorm(inputs.size, config.rms_norm_eps)

    def start(self, step: ForwardStep) -> ResidualStream:
        embeddings = self.embed(step)
        if self.layer_inputs is None:
            return ResidualStream(embeddings)
        norm, shape = self.per_layer_projection_norm, (-1, self.layer_inputs.size)
        # Images have the padding's, which is the first token.
        ids = step.token_ids if step.images is None else step.token_ids.index_fill(0, step.images.places, 0)
        of_tokens = self.embed_tokens_per_layer(ids).unflatten(1, shape)
        projected = self.per_layer_model_projection(embeddings) * embeddings.shape[1] ** -0.5
        projected = rms_norm(projected.unflatten(1, shape), norm.weight, norm.eps)
        return LayerInputStream(embeddings, (projected + of_tokens) * LAYER_SHARE)

    def forward(self, step: ForwardStep, run_layer: RunLayer = Layer.__call__) -> Tensor:
        attention = step.attention
        has_more = step.adapters is not None or step.images is not None or step.routed is not None  # for each token
        if not isinstance(attention, PrefillMetadata) or step.reads_all or has_more or not self.num_sharing:
            return super().forward(step, run_layer)
        if self.has_experts:
            step = replace(step, row_mask=step.attention.slot_mapping >= 0)
        stream = self.start(step)
        for layer in self.layers[: -self.num_sharing]:
            run_layer(layer, stream, step)
        stream.normalise(self.sum)  # adds what waits to be added
        last = attention.cu_query_lens[1:].long() - 1  # (num_chunks,)
        num_tokens, stream, step = len(step.token_ids), self._rows_of(stream, last), self._step_of(step, last)
        for layer in self.layers[-self.num_sharing :]:
            run_layer(layer, stream, step)
        finished = self.finish(stream)
        return finished.new_zeros(num_tokens, finished.shape[1]).index_copy_(0, last, finished)

    def _rows_of(self, stream: ResidualStream, rows: Tensor) -> ResidualStream:
        """Return some rows of the stream, to which nothing waits to be added."""
        if isinstance(stream, LayerInputStream):
            return LayerInputStream(stream.residual[rows], stream.layer_inputs[rows])
        return ResidualStream(stream.residual[rows])

    def _step_of(self, step: ForwardStep, last: Tensor) -> ForwardStep:
        """Return the step that computes the last token of each chunk alone. last: (num_chunks,), where they are."""
        plans: list[Metadata] = []
        for table, metadata in enumerate(step.metadata):
            assert isinstance(metadata, PrefillMetadata), "a decode step computes all of its tokens"
            plans.append(self.backends.plan(metadata.of_last_tokens(), step.kv_cache, table))
        row_mask = None if step.row_mask is None else step.row_mask[last]
        ids, positions = step.token_ids[last], step.positions[last]
        return replace(step, token_ids=ids, positions=positions, metadata=tuple(plans), row_mask=row_mask)


class Gemma4ForCausalLM(DecoderForCausalLM):
    """Has a window in five of six layers, and soft caps of logits where config.json says so."""

    decoder: ClassVar = Gemma4Decoder
    spec: ClassVar = DecoderSpec(
        qk_norm=True,
        has_post_norms=True,
        attention=Gemma4Attention,
        layer=Gemma4Layer,
        norm=WideRMSNorm,
        embedding=Gemma3Embedding,
        activation=gelu_tanh_and_mul,
    )
    config_defaults: ClassVar = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    }
    config_readers: ClassVar = {
        **ROPE_BY_TYPE_OF_LAYER,
        "attention_scale": lambda _fields: 1.0,
        "windows": read_windows,
        "layers": read_layers,
        "layer_inputs": read_layer_inputs,
        "moe": read_experts,
        "logits_soft_cap": lambda fields: fields.optional_float("final_logit_softcapping"),
    }
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "per_layer_input_gate": ("per_layer_input_gate", "gate"),
        "per_layer_model_projection": ("per_layer_model_projection", "input"),
    }
    renamed_endings: ClassVar = {
        **DecoderForCausalLM.renamed_endings,
        "router.proj.weight": "router.weight",
        "router.scale": "router.norm.weight",
    }

    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        parts = ("k_proj", "v_proj", "k_norm", "v_norm")  # of layers that share a cache, checkpoints may have them
        sharing = [index for index, layer in enumerate(config.layers or ()) if layer.shares_cache]
        self.unused_prefixes = (  # type: ignore[misc]
            *self.unused_prefixes,
            *("model.audio_tower.", "model.embed_audio."),
            *(
                f"{prefix}layers.{index}.self_attn.{part}."
                for prefix in ("model.", "model.language_model.", "language_model.model.", "")
                for index in sharing
                for part in parts
            ),
        )


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Has neither experts nor inputs of layers."""

    config_defaults: ClassVar = {
        **Gemma4ForCausalLM.config_defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }
