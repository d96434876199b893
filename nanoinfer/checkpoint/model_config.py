"""Holds a model's sizes, as its architecture reads them from config.json, and says how ranks split them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, cast

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.fields import MAX_SIZE
from nanoinfer.checkpoint.quantization_config import QuantizationConfig
from nanoinfer.errors import ConfigError, ModelError

# The products of an MLP, by the field of its inner size.
PRODUCTS_OF_MLPS = {
    "intermediate_size": ("mlp.gate_up_proj", "mlp.down_proj"),
    "moe_intermediate_size": ("mlp.experts.gate_up_proj",),  # which stands for all of an expert
    "shared_expert_intermediate_size": ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"),
}


class ShareOfHeads(NamedTuple):
    """Says how many values of some heads a rank has, and which products have them as outputs and as inputs."""

    name: str
    share: int
    outputs_of: str | None
    inputs_of: str | None = None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes a rotary embedding: `theta` is the base; `parameters` are the other numbers of its type."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Describes what encoders have and decoders lack.

    first_position: the row of the position table that a text's first token has; None where positions are rotations.
    type_vocab_size: kinds of segments, such as the first and the second text of a pair; 0 for none.
    activation: of the MLP.
    norm_bias: whether layer norms add a bias.
    window: how many tokens a layer with a window sees to either side, its own included.
    local_layers: which layers have that window, by layer.
    rope_thetas: the bases of layers without a window, and of those with one.
    head_bias, head_activation: of the dense layer of ModernBERT's classifiers.
    """

    activation: str
    first_position: int | None = None
    type_vocab_size: int = 0
    norm_bias: bool = True
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    rope_thetas: tuple[float, float] = (10000.0, 10000.0)
    head_bias: bool = True
    head_activation: str = "tanh"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Holds the sizes of one layer where layers differ; its fields replace those of ModelConfig of the same names."""

    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    intermediate_size: int
    has_keys_as_values: bool = False
    shares_cache: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Describes each layer's own embeddings, beside the one that goes through all layers."""

    vocab_size: int
    size: int  # of a layer's embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(BaseModelConfig):
    """Holds a model's sizes."""

    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    rotary_dim: int  # how many dimensions of a head, the first ones, are rotated
    local_rope: RopeConfig | None = None  # of layers with a window, where it differs
    attention_scale: float  # the factor of the scores
    attention_soft_cap: float | None = None  # of the scores, see `AttentionSpec`; None: none
    unrotated: tuple[bool, ...]  # which layers know no positions
    qk_norm: bool | None = None  # whether each head of queries and keys is normalised; None: the architecture says
    query_scaling_beta: float | None = None  # of queries far from the start, see `rotary_embedding.py`; None: none
    has_keys_as_values: bool = False  # values are the keys as they are before their norm and rotation
    shares_cache: bool = False  # a layer attends to the keys and values of an earlier one, and has none of its own
    layers: tuple[LayerConfig, ...] | None = None  # by layer; None where all are alike
    layer_inputs: LayerInputs | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scaling: float = 1.0  # logits are divided by it
    logits_soft_cap: float | None = None  # of the logits, see `cap_logits`; None: none
    quantization: QuantizationConfig | None = None  # None: all weights have 16 bits, or 32
    encoder: EncoderConfig | None = None  # None: a decoder

    def check(self, quantization: str | None) -> None:
        """Raise ModelError for sizes that do not fit each other. quantization: how the user wants weights rounded."""
        num_heads = self.num_attention_heads
        for kind in self._kinds_of_layers:
            if num_heads % (num_kv_heads := kind.num_key_value_heads) != 0:
                raise ModelError(
                    f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
                )
            for name in ("head_dim", "rotary_dim"):
                if (size := getattr(kind, name)) % 2 != 0:
                    raise ModelError(f"{name}={size} is odd; rotary embedding turns pairs of dimensions")
        if not 0 < self.max_model_len <= MAX_SIZE:
            raise ModelError(f"config.json stretches the context to {self.max_model_len} tokens; check its RoPE factor")
        if quantization is not None and self.moe is not None and self.moe.swiglu_limit is not None:
            raise ModelError(
                f"quantization={quantization!r} rounds experts without biases, and {self.architecture} has biases; "
                "leave quantization out, or use a checkpoint in MXFP4"
            )
        if cut := self._cut_blocks(1):
            raise ModelError(f"{cut}, and weights of different scales are packed in one; use the checkpoint in 16 bits")

    @property
    def is_encoder(self) -> bool:
        return self.encoder is not None

    def of_layer(self, index: int) -> "ModelConfig":
        return self if self.layers is None else replace(self, **asdict(self.layers[index]))

    def cache_layer(self, index: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, or the last before it with its window."""
        if self.layers is None or not self.layers[index].shares_cache:
            return index
        alike = (other for other in range(index) if self.windows[other] == self.windows[index])
        return max(other for other in alike if not self.layers[other].shares_cache)

    @property
    def has_bfloat16_kernels(self) -> bool:
        return self.quantization is not None and self.quantization.has_bfloat16_kernels

    @property
    def has_dynamic_rope(self) -> bool:
        return self.rope.rope_type == "dynamic"

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence, in tokens, that the model's positions are made for."""
        factor = self.rope.parameters.get("factor", 1.0)
        original = self.rope.parameters.get("original_max_position_embeddings")
        if self.rope.rope_type == "linear" and self.local_rope is None:  # Gemma counts the factor in already
            return int(self.max_position_embeddings * factor)
        if self.rope.rope_type == "yarn" and original:
            return int(original * factor)
        return self.max_position_embeddings

    @property
    def has_multipliers(self) -> bool:
        """Return whether embeddings, or the outputs of attention and MLP, are multiplied by a number."""
        return self.embedding_multiplier != 1 or self.residual_multiplier != 1

    def check_tensor_parallel_size(self, size: int) -> None:
        """Raise ConfigError where heads or MLP cannot be split over `size` ranks, with the sizes that would do."""
        heads, mlps = self.num_attention_heads, self._mlps
        all_kv_heads = [*dict.fromkeys(kind.num_key_value_heads for kind in self._kinds_of_layers)]
        even = {} if self.mlp_multiple > 1 else {**mlps}  # others are filled up
        if self.linear_attention is not None:
            even["linear_num_key_heads"] = mlps["linear_num_key_heads"] = self.linear_attention.num_key_heads

        def fits(n: int) -> bool:  # ranks may share a KV head
            fit = all(size % n == 0 for size in even.values())
            return heads % n == 0 and fit and all(kv % n == 0 or n % kv == 0 for kv in all_kv_heads)

        if not fits(size) or self._cut_blocks(size):
            sizes = ", ".join(str(n) for n in range(1, heads + 1) if fits(n) and not self._cut_blocks(n))
            of_mlps = " and ".join(f"{name}={mlp}" for name, mlp in mlps.items())
            kv_heads = " or ".join(map(str, all_kv_heads))
            why = f": {self._cut_blocks(size)}" if fits(size) else ""
            raise ConfigError(
                f"tensor_parallel_size={size} cannot split num_attention_heads={heads}, num_key_value_heads="
                f"{kv_heads} and {of_mlps} of this model{why}; use one of {sizes}"
            )

    @property
    def mlp_multiple(self) -> int:
        """Return what every rank's share of an MLP is a multiple of; see `TensorParallel`."""
        return 1 if self.quantization is None else self.quantization.mlp_multiple

    @property
    def _mlps(self) -> dict[str, int]:
        """Return the inner sizes of the MLPs that the model has, by the names of their fields."""
        mlps = {}
        if self.moe is None or self.moe.is_beside_mlp or not all(self.moe.has_experts):
            mlps["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            mlps["moe_intermediate_size"] = self.moe.intermediate_size
            if self.moe.shared_size is not None:
                mlps["shared_expert_intermediate_size"] = self.moe.shared_size
        return mlps

    @property
    def _kinds_of_layers(self) -> Iterator["ModelConfig"]:
        """Yield the config with the sizes of each kind of layers."""
        if self.layers is None:
            yield self
        for layer in dict.fromkeys(self.layers or ()):
            yield replace(self, **asdict(layer))

    def _cut_blocks(self, size: int) -> str | None:
        """Return in words which share of one of `size` ranks cuts a group with one scale; None if none does."""
        quantization = self.quantization
        if quantization is None:
            return None
        if size > 1 and quantization.unsplittable_reason is not None:
            return quantization.unsplittable_reason
        block_size = quantization.block_size
        multiple = block_size or (quantization.shard_multiple if size > 1 else 1)  # a whole row may end in less
        uneven = f"is no multiple of the {multiple} that share a scale"
        for heads in self._shares_of_heads(size):  # outputs share scales in blocks alone
            products = [heads.inputs_of, heads.outputs_of if block_size else None]
            if heads.share % multiple and self._have_fewer_bits(products):
                return f"a rank's share of {heads.name}, {heads.share} values, {uneven}"
        for name, mlp in self._mlps.items() if block_size else ():  # of which ranks have whole blocks
            if mlp % multiple and self._have_fewer_bits(PRODUCTS_OF_MLPS[name]):
                return f"{name}={mlp} {uneven}"
        return None

    def _shares_of_heads(self, size: int) -> Iterator["ShareOfHeads"]:
        """Yield what each of `size` ranks has of the heads; of latent attention, also what ranks do not split."""
        if (latent := self.latent_attention) is not None:
            num_heads, has_rank = self.num_attention_heads // size, latent.query_rank is not None
            queries = "self_attn.q_b_proj" if has_rank else "self_attn.qkv_a_proj"
            yield ShareOfHeads("the query heads", num_heads * self.head_dim, queries)
            yield ShareOfHeads("kv_b_proj", num_heads * (latent.plain_size + latent.value_size), "self_attn.kv_b_proj")
            yield ShareOfHeads("the values of heads", num_heads * latent.value_size, None, "self_attn.o_proj")
            if latent.query_rank is not None:  # outputs of the product before, which packs others behind them
                yield ShareOfHeads("q_lora_rank", latent.query_rank, "self_attn.qkv_a_proj")
            return
        for kind in self._kinds_of_layers:
            value_heads = kind.num_attention_heads // size * kind.head_dim
            yield ShareOfHeads("the query heads", value_heads, "self_attn.qkv_proj", "self_attn.o_proj")
            key_heads = max(1, kind.num_key_value_heads // size) * kind.head_dim
            yield ShareOfHeads("the KV heads", key_heads, "self_attn.qkv_proj")
        if (linear := self.linear_attention) is not None:
            products = "linear_attn.in_proj_qkvz", "linear_attn.out_proj"
            yield ShareOfHeads("the linear value heads", linear.value_size // size, *products)
            yield ShareOfHeads("the linear key heads", linear.key_size // size, products[0])

    def _have_fewer_bits(self, products: Iterable[str | None]) -> bool:
        """Return whether the weight of one of these products has fewer bits in any layer that has it."""
        covers = cast(QuantizationConfig, self.quantization).covers
        return any(
            covers(f"model.layers.{index}.{product}")
            for product in products
            if product is not None
            for index in range(self.num_hidden_layers)
            if self._has_product(index, product)
        )

    def _has_product(self, index: int, product: str) -> bool:
        part, _, last = product.partition(".")
        if part == "mlp":
            has_experts = self.moe is not None and self.moe.has_experts[index]
            if has_experts and self.moe is not None and self.moe.is_beside_mlp:
                return True
            return has_experts == last.startswith(("experts", "shared_expert"))
        return self.is_linear(index) == (part == "linear_attn")
