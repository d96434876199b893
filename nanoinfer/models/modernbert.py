"""ModernBERT (Warner et al. 2024): rotated positions, pre-norm, a gated MLP, and windows in two of three layers."""

from typing import ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.model_config import EncoderConfig
from nanoinfer.models.config_fields import number
from nanoinfer.models.encoder import ACTIVATIONS, COMMON_READERS, EncoderModel


def read_encoder(fields: Fields) -> EncoderConfig:
    """Read what the encoder has and decoders lack."""
    num_layers = fields.int("num_hidden_layers")
    local_layers = fields.layers(num_layers, {"sliding_attention": True, "full_attention": False})
    if local_layers is None:
        every = fields.int("global_attn_every_n_layers")
        local_layers = tuple(index % every != 0 for index in range(num_layers))
    return EncoderConfig(
        fields.choice("hidden_activation", ACTIVATIONS, "gelu"),
        norm_bias=fields.flag("norm_bias"),
        window=fields.int("local_attention", least=2) // 2 + 1,
        local_layers=local_layers,
        rope_thetas=read_thetas(fields),
        head_bias=fields.flag("classifier_bias"),
        head_activation=fields.choice("classifier_activation", ACTIVATIONS, "gelu"),
    )


def read_thetas(fields: Fields) -> tuple[float, float]:
    """Read the bases of RoPE of layers that attend to all tokens, and of those with a window."""
    names = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    sets, rule = fields.part("rope_parameters"), "only those of type default are supported"
    if not sets.values.keys() <= names.keys():
        raise fields.error("rope_parameters", rule)
    thetas = []
    for kind, base in names.items():
        part = sets.part(kind, rule)
        if part.get("rope_type", "default") != "default":
            raise fields.error("rope_parameters", rule)
        thetas.append(part.float("rope_theta") if part.get("rope_theta") else fields.float(base))
    return thetas[0], thetas[1]


class ModernBertModel(EncoderModel):
    config_defaults: ClassVar = {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "norm_eps": 1e-5,
    }
    config_readers: ClassVar = {**COMMON_READERS, "encoder": read_encoder, "rms_norm_eps": number("norm_eps")}
    prefixes = ("model.",)
    renamed = (
        ("embeddings.tok_embeddings.", "embed_tokens."),
        ("embeddings.norm.", "embedding_norm."),
        (".attn.Wqkv.", ".self_attn.qkv_proj."),
        (".attn.Wo.", ".self_attn.o_proj."),
        (".mlp.Wi.", ".mlp.up_proj."),
        (".mlp.Wo.", ".mlp.down_proj."),
        ("head.dense.", "score.dense."),
        ("head.norm.", "score.norm."),
        ("classifier.", "score.out."),
    )
