"""ModernBERT (Warner et al. 2024): rotated positions, pre-norm, a gated MLP, and windows in two of three layers."""

from nanoinfer.models.encoders.encoder import EncoderModel


class ModernBertModel(EncoderModel):
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
