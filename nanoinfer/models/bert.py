"""BERT, RoBERTa and XLM-RoBERTa: absolute positions, post-norm; of the latter two, positions begin after padding's."""

from collections.abc import Callable
from types import MappingProxyType
from typing import ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.model_config import EncoderConfig
from nanoinfer.models.config_fields import Reader, number
from nanoinfer.models.encoder import ACTIVATIONS, COMMON_READERS, EncoderModel


def positions_from(first_position: Callable[[Fields], int]) -> dict[str, Reader]:
    """Return the readers of an encoder with a table of positions. first_position: reads the row of the first token."""

    def read_encoder(fields: Fields) -> EncoderConfig:
        activation = fields.choice("hidden_act", ACTIVATIONS, "gelu")
        return EncoderConfig(activation, first_position(fields), fields.int("type_vocab_size", least=0))

    def read_max_tokens(fields: Fields) -> int:
        first, name = first_position(fields), "max_position_embeddings"
        if fields.int(name) <= first:
            raise fields.error(name, f"it must be more than {first}")
        return fields.int(name) - first

    return {"encoder": read_encoder, "max_position_embeddings": read_max_tokens}


def after_padding(fields: Fields) -> int:
    """Return the first row of positions that is not the padding's."""
    return fields.int("pad_token_id", least=0) + 1


class BertModel(EncoderModel):
    config_defaults: ClassVar = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    config_readers: ClassVar = {
        **COMMON_READERS,
        **positions_from(lambda fields: 0),
        "rms_norm_eps": number("layer_norm_eps"),
        "attention_bias": lambda fields: True,
        "mlp_bias": lambda fields: True,
    }
    prefixes = ("bert.", "roberta.")
    packed_modules_mapping = MappingProxyType(
        {"query": ("qkv_proj", "q"), "key": ("qkv_proj", "k"), "value": ("qkv_proj", "v")}
    )
    renamed = (
        ("embeddings.LayerNorm.", "embedding_norm."),
        ("embeddings.word_embeddings.", "embed_tokens."),
        ("embeddings.position_embeddings.", "position_embeddings."),
        ("embeddings.token_type_embeddings.", "token_type_embeddings."),
        ("encoder.layer.", "layers."),
        ("attention.self.", "self_attn."),
        ("attention.output.dense.", "self_attn.o_proj."),
        ("attention.output.LayerNorm.", "attn_norm."),
        ("intermediate.dense.", "mlp.up_proj."),
        (".output.dense.", ".mlp.down_proj."),
        (".output.LayerNorm.", ".mlp_norm."),
        ("pooler.dense.", "score.dense."),
        ("classifier.dense.", "score.dense."),
        ("classifier.out_proj.", "score.out."),
        ("classifier.", "score.out."),
    )


class RobertaModel(BertModel):
    config_defaults: ClassVar = {**BertModel.config_defaults, "vocab_size": 50265, "pad_token_id": 1}
    config_readers: ClassVar = {**BertModel.config_readers, **positions_from(after_padding)}


class XLMRobertaModel(RobertaModel):
    config_defaults: ClassVar = {**RobertaModel.config_defaults, "vocab_size": 30522}
