"""BERT, RoBERTa and XLM-RoBERTa: absolute positions, post-norm; of the latter two, positions begin after padding's."""

from types import MappingProxyType

from nanoinfer.models.encoders.encoder import EncoderModel


class BertModel(EncoderModel):
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
