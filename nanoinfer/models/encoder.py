"""The encoder that BERT, RoBERTa and ModernBERT are: attention to all of a text, and an MLP.

BERT normalises what each of the two adds to (post-norm), ModernBERT what each of them reads (pre-norm). Keys and values
are written to blocks of the cache that are a sequence's for one step, where the attention kernels find them. All layers
use the same ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.checkpoint.model_config import EncoderConfig, ModelConfig, RopeConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.attention_layer import Attention
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.embed_head import NoHead, ScoreHead, VocabParallelEmbedding
from nanoinfer.layers.layernorm import LayerNorm, ResidualStream
from nanoinfer.layers.linear import ColumnParallelLinear, PartialSum, QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.models.config_fields import Reader, read_head_dim
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.layer_stack import Layer, LayerStack, Way
from nanoinfer.models.native_model import NativeModel
from nanoinfer.ops.activations.spec import gelu_and_mul

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
HEAD_ACTIVATIONS = {**ACTIVATIONS, "tanh": torch.tanh}
# Encoders have bases of RoPE of their own, or none.
COMMON_READERS: Mapping[str, Reader] = {
    "rope": lambda fields: RopeConfig("default", 10000.0, {}),
    "rotary_dim": read_head_dim,
}


def encoder_config(config: ModelConfig) -> EncoderConfig:
    assert config.encoder is not None, "an encoder's config.json was read as one"
    return config.encoder


def whole(sum_of_ranks: PartialSum) -> Tensor:
    """Return the output of a row-parallel product, (num_tokens, hidden_size), added up on every rank."""
    assert sum_of_ranks.other_terms is None, "an encoder has no experts"
    terms = sum_of_ranks.all_reduced()
    return terms[0] if len(terms) == 1 else terms.sum(0)


class EncoderAttention(nn.Module):
    """Attends from all tokens of a text to all others, or to the others within a window to either side."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        rotary_emb: RotaryEmbedding,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        num_heads, head_dim, bias = config.num_attention_heads, config.head_dim, config.attention_bias
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_dim, num_heads, num_heads, bias=bias, tp=tp)
        self.o_proj = RowParallelLinear(num_heads * head_dim, config.hidden_size, bias, tp)
        heads = tp.shard_size(num_heads, "attention heads")
        spec = AttentionSpec(heads, heads, head_dim, config.attention_scale, window, causal=False)
        self.attn = Attention(rotary_emb, config.rms_norm_eps, backends.for_layer(spec, LayerPlace()))

    def attend(self, qkv: Tensor, step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, o_proj's input size). qkv: what qkv_proj returns."""
        return self.attn(qkv, None, step.positions, step.kv_cache.layer(LayerPlace()), step.attention).flatten(1)


class EncoderMLP(nn.Module):
    """Computes act(x W1) W2; with a gate, (act(x W1) * (x W3)) W2."""

    def __init__(self, config: ModelConfig, is_gated: bool, tp: TensorParallel) -> None:
        super().__init__()
        size, self.is_gated = config.intermediate_size, is_gated
        sizes = {"gate": size, "up": size} if is_gated else {"up": size}
        self.activation = ACTIVATIONS[encoder_config(config).activation]
        self.up_proj = ColumnParallelLinear(config.hidden_size, sizes, bias=config.mlp_bias, tp=tp)
        self.down_proj = RowParallelLinear(size, config.hidden_size, config.mlp_bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        return whole(self.down_proj(self._activated(self.up_proj(hidden))))

    def _activated(self, inner: Tensor) -> Any:
        if not self.is_gated:
            return self.activation(inner)
        if self.activation is F.gelu:
            return gelu_and_mul(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.activation(gate) * up


class EncoderLayer(Layer):
    """Computes a layer. ModernBERT's first has no norm before its attention, since the embedding has one."""

    ways: ClassVar[frozenset[Way]] = frozenset({Way.GRAPHS})

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotary_emb: RotaryEmbedding,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        encoder = encoder_config(config)
        self.is_pre_norm = encoder.first_position is None
        is_local = bool(encoder.local_layers) and encoder.local_layers[index]
        self.self_attn = EncoderAttention(config, encoder.window if is_local else None, rotary_emb, backends, tp)
        self.mlp = EncoderMLP(config, self.is_pre_norm, tp)
        norm = partial(LayerNorm, config.hidden_size, config.rms_norm_eps, encoder.norm_bias)
        self.attn_norm: Any = nn.Identity() if self.is_pre_norm and index == 0 else norm()
        self.mlp_norm = norm()

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """See `DecoderLayer`."""
        sizes = self.self_attn.qkv_proj.local_sizes
        return sum(sizes.values()), sizes["q"]

    def normalise_input(self, stream: ResidualStream) -> None:
        stream.normed = self.attn_norm(stream.residual) if self.is_pre_norm else stream.residual

    def project(self, stream: ResidualStream) -> Tensor:
        return self.self_attn.qkv_proj(stream.normed)

    def attend(self, projected: Tensor, step: ForwardStep) -> Tensor:
        return self.self_attn.attend(projected, step)

    def add_attention(self, stream: ResidualStream, heads: Tensor) -> None:
        stream.add(self.self_attn.o_proj(heads), None)

    def normalise_sum(self, stream: ResidualStream) -> None:
        assert stream.added is not None, "attention has added to the stream"
        total, stream.added = whole(stream.added), None
        if self.is_pre_norm:
            stream.normed = self.mlp_norm.of_sum(total, stream.residual, total)
            stream.residual = total
        else:
            stream.normed = stream.residual = self.attn_norm.of_sum(total, stream.residual)

    def add_mlp(self, stream: ResidualStream, _row_mask: Any = None, _routed: Any = None) -> None:
        out = self.mlp(stream.normed)
        stream.residual = stream.residual + out if self.is_pre_norm else self.mlp_norm.of_sum(out, stream.residual)


class Encoder(LayerStack):
    """Holds embeddings, layers, and ModernBERT's last norm."""

    layers: Sequence[EncoderLayer]

    def __init__(
        self, config: ModelConfig, max_positions: int, backends: AttentionBackends, tp: TensorParallel
    ) -> None:
        super().__init__()
        encoder = encoder_config(config)
        self.tp, size, one_rank = tp, config.hidden_size, TensorParallel()  # each rank holds small tables whole
        tp = replace(tp, symmetric_memory=None)  # its norms do no all-reduces
        self.first_position = encoder.first_position
        norm = partial(LayerNorm, size, config.rms_norm_eps, encoder.norm_bias)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, tp)
        self.position_embeddings, self.token_type_embeddings = None, None
        if encoder.first_position is not None:
            num_positions = encoder.first_position + config.max_position_embeddings
            self.position_embeddings = VocabParallelEmbedding(num_positions, size, one_rank)
        if encoder.type_vocab_size:
            self.token_type_embeddings = VocabParallelEmbedding(encoder.type_vocab_size, size, one_rank)
        self.has_second_types = encoder.type_vocab_size > 1
        self.embedding_norm = norm()
        rotations = [
            RotaryEmbedding(
                replace(config, rope=RopeConfig("default", theta, {})),
                max_positions,
                rotates=encoder.first_position is None,
            )
            for theta in encoder.rope_thetas
        ]
        local = encoder.local_layers or (False,) * config.num_hidden_layers
        layers = [
            EncoderLayer(config, index, rotations[is_local], backends, tp) for index, is_local in enumerate(local)
        ]
        self.layers = cast(Sequence[EncoderLayer], nn.ModuleList(layers))
        self.final_norm = nn.Identity() if self.position_embeddings is not None else norm()

    def embed(self, step: ForwardStep) -> Tensor:
        hidden = self.embed_tokens(step.token_ids)
        if self.token_type_embeddings is not None:
            types = torch.zeros_like(step.token_ids) if step.token_types is None else step.token_types
            hidden = hidden + self.token_type_embeddings(types)
        if self.position_embeddings is not None and self.first_position is not None:
            hidden = hidden + self.position_embeddings(step.positions + self.first_position)
        return self.embedding_norm(hidden)

    def finish(self, stream: ResidualStream) -> Tensor:
        return self.final_norm(stream.residual)


class EncoderScore(nn.Module):
    """Scores texts: a dense layer, perhaps with a norm after it, and a linear one; in float32.

    kind: the kind of head. A head that scores tokens has no dense layer, except in ModernBERT.
    """

    def __init__(self, config: ModelConfig, kind: str, num_labels: int) -> None:
        super().__init__()
        encoder, size = encoder_config(config), config.hidden_size
        is_modern = encoder.first_position is None
        self.activation = HEAD_ACTIVATIONS[encoder.head_activation]
        has_dense = kind == "sequence" or is_modern
        self.dense = ScoreHead(size, size, encoder.head_bias) if has_dense else None
        self.norm = LayerNorm(size, config.rms_norm_eps, encoder.norm_bias) if is_modern else None
        self.out = ScoreHead(size, num_labels, has_bias=True)

    def forward(self, states: Tensor) -> Tensor:
        """Return logits (num_states, num_labels) float32 of (num_states, hidden_size)."""
        if self.dense is not None:
            states = self.activation(self.dense(states))
        if self.norm is not None:
            bias = None if self.norm.bias is None else self.norm.bias.float()
            states = F.layer_norm(states, states.shape[-1:], self.norm.weight.float(), bias, self.norm.eps)
        return self.out(states)


class EncoderModel(NativeModel):
    """Holds an encoder, and the head of a classifier.

    An architecture is a subclass that reads its config.json, and says how a checkpoint calls the weights.
    """

    unsupported_unless: ClassVar[Mapping[str, Any]] = {"position_embedding_type": "absolute", "is_decoder": False}
    # How names begin in checkpoints of whole models; checkpoints of the encoder alone lack these prefixes.
    prefixes: ClassVar[tuple[str, ...]] = ()
    # Parts of a checkpoint's names -> what replaces them here, one replacement after the other.
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    is_tied: ClassVar[bool] = False
    unneeded: ClassVar[tuple[str, ...]] = ("cls.", "lm_head.", "decoder.")  # of the model that fills in masked words

    def __init__(
        self, config: ModelConfig, max_positions: int, backends: AttentionBackends, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.generates = False
        self.model: Any = Encoder(config, max_positions, backends, tp)  # it has what the runner asks of a Decoder
        self.lm_head = NoHead(config.vocab_size, config.hidden_size, tp)
        head = config.head
        assert head is not None, "an encoder has no language-model head"
        self.score = EncoderScore(config, head.kind, len(head.labels)) if head.is_classifier else None
        self.ignored_weights = tuple(f"{prefix}embeddings.position_ids" for prefix in ("", *self.prefixes))
        pooler = () if self.score is not None and self.score.dense is not None else ("pooler.",)
        heads = () if self.score is not None else ("classifier.", "head.")
        self.unused_prefixes = tuple(
            prefix + name for prefix in ("", *self.prefixes) for name in (*self.unneeded, *pooler, *heads)
        )

    def locate(self, name: str) -> tuple[str, str | None]:
        """Return which parameter a checkpoint's tensor belongs to, and which shard of it; None where it is whole."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        if not name.startswith("score."):
            name = f"model.{name}"
        *path, part, kind = name.split(".")
        packed, shard = self.packed_modules_mapping.get(part, (part, None))
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)  # as TensorFlow calls them
        return ".".join((*path, packed, kind)), shard

    def checkpoint_name(self, place: tuple[str, str | None]) -> str:
        """Return the checkpoint's name of a tensor that fills a place, perhaps with others: the inverse of `locate`."""
        name, shard = place
        packed_names = {packed: name for name, packed in self.packed_modules_mapping.items()}
        *path, part, kind = name.split(".")
        name = ".".join((*path, packed_names.get((part, shard or ""), part), kind)).removeprefix("model.")
        for theirs, ours in reversed(self.renamed):
            name = name.replace(ours, theirs)
        return name
