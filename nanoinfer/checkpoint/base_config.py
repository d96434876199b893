"""Defines what the engine and the runner ask of a model's config, whoever computes the layers."""

from dataclasses import dataclass, field

from nanoinfer.checkpoint.pooling_config import HeadConfig, PoolingConfig
from nanoinfer.errors import ConfigError

MIN_BFLOAT16_WEIGHTS = 2**24  # steps of smaller models wait for operators, of which bfloat16 needs more


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Describes the mixture-of-experts MLPs of a model.

    norm_topk_prob: whether the weights of a token's experts are made to sum to 1.
    has_experts: whether a layer has experts, by layer; the others have a dense MLP.
    shared_size: the inner size of the expert that computes all tokens; None: there is none.
    num_groups, num_chosen_groups: experts are in groups, and a token's come from a few of these.
    scaling_factor: what the weights of a token's experts are multiplied by.
    is_beside_mlp: whether layers with experts also have a dense MLP, whose output is added to theirs.
    is_geglu: whether experts compute GeGLU in the place of SwiGLU.
    swiglu_limit, swiglu_alpha: where gate and up are clamped, and the slope of the gate's sigmoid, see `clamped_swiglu`
        of ops/experts; None: plain SwiGLU.
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
    is_beside_mlp: bool = False
    is_geglu: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Describes the layers with linear attention (Gated DeltaNet, Yang et al. 2024).

    Neighbouring value heads share a key head. conv_width: how many tokens the convolution before it sees. is_linear:
    whether a layer is one of them, by layer; the others attend to all tokens.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    is_linear: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return sum(self.is_linear)

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Return how many channels are convolved: queries, keys and values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Describes latent attention (MLA, DeepSeek-V2, 2024), in which all heads share one vector for each token.

    The vector is a latent, from which keys and values are made, and the rotated part that all keys have.
    query_rank: of the two products that make queries; None: one product makes them. latent_size: of the latent.
    rotary_size, plain_size: of the rotated and the other numbers of a query or key. value_size: of a head's value.
    is_interleaved: whether rotation turns neighbouring numbers together, see `rotate` of ops/kv_cache.
    """

    query_rank: int | None
    latent_size: int
    rotary_size: int
    plain_size: int
    value_size: int
    is_interleaved: bool

    @property
    def vector_size(self) -> int:
        return self.latent_size + self.rotary_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelConfig:
    """Holds the sizes that the cache, the tables and the heads depend on.

    Layers are counted as the cache does: one for each attention, and one for each recurrence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    initializer_range: float
    dtype: str
    windows: tuple[int | None, ...]  # how many tokens each token attends to, by layer; None for all before it
    moe: MoEConfig | None = None
    linear_attention: LinearAttentionConfig | None = None  # None: all layers attend to tokens
    latent_attention: LatentAttentionConfig | None = None  # None: the cache holds keys and values of heads
    head: HeadConfig | None = None  # None: a language-model head
    # What becomes of hidden states; None until the folder was read, which says more than config.json.
    pooling: PoolingConfig | None = field(default=None, compare=False)

    @property
    def prefers_bfloat16(self) -> bool:
        """Return whether dtype="auto" is bfloat16 on a CPU that multiplies it.

        It is for large models, if their weights lose nothing by that, or kernels read these in fewer bits.
        """
        num_weights = 12 * self.num_hidden_layers * self.hidden_size**2  # about as many as all layers have
        return num_weights >= MIN_BFLOAT16_WEIGHTS and (self.dtype == "bfloat16" or self.has_bfloat16_kernels)

    @property
    def has_bfloat16_kernels(self) -> bool:
        """Return what `QuantizationConfig.has_bfloat16_kernels` says of the model's weights."""
        return False

    @property
    def is_encoder(self) -> bool:
        """Return whether tokens attend to all of a text: texts are then computed whole, and nothing of them is kept."""
        return False

    @property
    def has_dynamic_rope(self) -> bool:
        """Return whether rotations beyond `max_model_len` would depend on the current length."""
        return False

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence, in tokens, that the model's positions are made for."""
        return self.max_position_embeddings

    @property
    def refusal_reason(self) -> str | None:
        """Return why the model completes no prompts, and which calls serve it; None if it does."""
        if self.head is None:
            return None
        return f"{self.architecture} has no language-model head here; use " + (
            "classify or reward" if self.head.is_classifier else "embed"
        )

    @property
    def finds_prefixes(self) -> bool:
        """Return whether requests can reuse cached prefixes: not with an encoder, nor if all tokens are pooled."""
        if self.is_encoder:
            return False
        return self.head is None or (self.pooling is not None and self.pooling.finds_prefixes)

    def is_linear(self, index: int) -> bool:
        """Return whether a layer has linear attention."""
        return self.linear_attention is not None and self.linear_attention.is_linear[index]

    def index_among_its_kind(self, index: int) -> int:
        """Return how many layers before a layer have linear attention too, or have attention too."""
        return [self.is_linear(other) for other in range(index)].count(self.is_linear(index))

    def of_layer(self, index: int) -> "BaseModelConfig":
        """Return the config with the sizes of one layer, in models whose layers differ."""
        return self

    def cache_layer(self, index: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, or an earlier one."""
        return index

    def windows_within(self, max_positions: int) -> tuple[int | None, ...]:
        """Return the windows of the layers; a window that no sequence of so many positions outgrows becomes None."""
        return tuple(window if window and window < max_positions else None for window in self.windows)

    def longest_sequence(self, requested: int | None) -> int:
        """Return how long a sequence may be: as asked for, or as the model allows. Raises ConfigError above that."""
        limit = self.max_model_len
        if requested is not None and requested > limit:
            remedy = f"use at most {limit}, or a config.json with RoPE scaling"
            if self.has_dynamic_rope:
                remedy = (
                    f"use at most {limit}: beyond it rope_type='dynamic' depends on the current length, so that keys "
                    "in the KV cache would disagree with newer ones"
                )
            raise ConfigError(f"max_model_len={requested} is above the model's own limit of {limit} tokens; {remedy}")
        return requested or limit

    def check_tensor_parallel_size(self, size: int) -> None:
        """Raise ConfigError where the model cannot be split over `size` ranks, with the sizes that would do."""
        raise NotImplementedError
