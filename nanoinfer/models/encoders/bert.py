"""BERT, RoBERTa and XLM-RoBERTa: absolute positions, post-norm; of the latter two, positions begin after padding's."""

from types import MappingProxyType
from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.model_config import EncoderConfig
from nanoinfer.models.encoders.encoder import UNREAD_ROPE, EncoderModel
from nanoinfer.models.encoders.layers import ACTIVATIONS


class BertModel(EncoderModel):
    config_defaults: ClassVar = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
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

    @classmethod
    def first_position(cls, fields: Fields) -> int:
        return 0

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        fields.must_be("position_embedding_type", "absolute")
        fields.must_be("is_decoder", False)
        first_position = cls.first_position(fields)
        max_tokens = fields.int("max_position_embeddings") - first_position
        if max_tokens < 1:
            raise fields.error("max_position_embeddings", f"it must be more than {first_position}")
        activation = fields.choice("hidden_act", ACTIVATIONS, "gelu")
        return {
            "encoder": EncoderConfig(activation, first_position, fields.int("type_vocab_size", least=0)),
            "max_position_embeddings": max_tokens,
            "rope": UNREAD_ROPE,
            "rms_norm_eps": fields.float("layer_norm_eps", 1e-12),
            "attention_bias": True,
            "mlp_bias": True,
        }


class RobertaModel(BertModel):
    config_defaults: ClassVar = {**BertModel.config_defaults, "vocab_size": 50265, "pad_token_id": 1}

    @classmethod
    def first_position(cls, fields: Fields) -> int:
        return fields.int("pad_token_id", least=0) + 1


class XLMRobertaModel(RobertaModel):
    config_defaults: ClassVar = {**RobertaModel.config_defaults, "vocab_size": 30522}
