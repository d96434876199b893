"""Reads the config.json of a model whose layers are our own, with what its architecture says of it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.architecture_names import explain_architecture, read_architecture, read_config_json
from nanoinfer.checkpoint.fields import Fields, read_overridden
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.checkpoint.pooling_config import read_head, read_padding
from nanoinfer.checkpoint.sentence_transformers import choose_head, read_pooling
from nanoinfer.config import DTYPES
from nanoinfer.errors import ModelError
from nanoinfer.models import SUPPORTED, TEXT_TYPES, get_model_class
from nanoinfer.models.config_fields import COMMON_DEFAULTS, COMMON_READERS
from nanoinfer.quantization.method_selection import read_quantization

# What config.json may ask for that must not be ignored, and the value that does not ask for it. Other fields that an
# architecture does not read are passed over: checkpoints carry fields of their relatives that transformers does not
# read either.
UNSUPPORTED_UNLESS = {
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",  # Gemma's name for it
    "use_bidirectional_attention": False,
    "is_causal": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_out_bias": False,
}
OF_DECODERS = ("hidden_act", "hidden_activation")  # encoders read one of them, and pass over the other
# Fields of the whole config that hold for its text part, too, and override that part's own.
OF_THE_WHOLE = ("architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")


def read_native_folder(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    runner: str = "auto",
) -> ModelConfig:
    """Read `folder`/config.json. Raises ModelError where it is missing, not JSON, or lacks a size.

    overrides: fields that replace those of the file. quantization: how to round weights that the checkpoint has in 16
    bits; one in 8 bits says itself how it is to be read. runner: whether the model is to generate or to embed, where it
    can do both.
    """
    read = partial(read_native_config, quantization=quantization)
    config = read_overridden(read_config_json(folder), overrides, read)
    config = replace(config, head=choose_head(config.head, runner, folder))
    return replace(config, pooling=read_pooling(folder, config.head, config.hidden_size, config.is_encoder))


def read_native_config(whole: Fields | Mapping[str, Any], quantization: str | None = None) -> ModelConfig:
    """Read the fields of a config.json; what the engine would have to ignore is refused.

    An unknown architecture is refused first, since its config.json may name its sizes differently.
    """
    whole = whole if isinstance(whole, Fields) else Fields(whole)
    architecture, kind = read_architecture(whole, SUPPORTED)
    head = read_head(whole, kind)
    if architecture not in SUPPORTED:
        raise ModelError(explain_architecture(whole.values, architecture, SUPPORTED))
    fields, architecture = _text_part(whole, architecture)
    model_class = get_model_class(architecture)
    fields = replace(fields, defaults={**COMMON_DEFAULTS, **model_class.config_defaults})
    is_encoder = "encoder" in model_class.config_readers
    if is_encoder and (quantization is not None or fields.get("quantization_config") is not None):
        raise ModelError(
            "encoders have their weights in 16 or 32 bits; leave quantization out, or take another checkpoint"
        )
    values = {name: read(fields) for name, read in {**COMMON_READERS, **model_class.config_readers}.items()}
    for name, neutral in {**UNSUPPORTED_UNLESS, **model_class.unsupported_unless}.items():
        if not fields.is_read(fields.path_of(name)) and not (is_encoder and name in OF_DECODERS):
            fields.must_be(name, neutral)
    if head is not None and head.kind == "sequence" and not is_encoder:
        head = replace(head, pad_token_id=read_padding(fields))
    packed, renamed = model_class.packed_modules_mapping, model_class.renamed_modules
    config = ModelConfig(
        architecture=architecture,
        dtype=dtype_name(fields.get("dtype") or fields.get("torch_dtype")),
        head=head,
        quantization=read_quantization(fields, quantization, packed, renamed),
        **values,
    )
    config.check(quantization)
    return config


def _text_part(whole: Fields, architecture: str) -> tuple[Fields, str]:
    """Return the fields of the text model, and its class where a config.json gives its type.

    Raises ModelError for a text model of another type than we know of this architecture.
    """
    text = whole.part("text_config")
    types, model_type = TEXT_TYPES.get(architecture, {}), text.values.get("model_type")
    if types and model_type is not None:
        if model_type not in types:
            raise ModelError(
                f"config.json has text_config with model_type={model_type!r}, which {architecture} is not supported "
                f"with; supported: {', '.join(types)}"
            )
        architecture = types[model_type]
    is_nested = bool(text.values) and "num_hidden_layers" not in whole.values  # else the text model's fields are here
    return text.with_others(whole, OF_THE_WHOLE) if is_nested else whole, architecture


def dtype_name(given: Any) -> str:
    """Return the name of the dtype that a config gives as `dtype` (transformers 5) or `torch_dtype`; None is float32.

    Raises ModelError for one that is not supported.
    """
    dtype = str(given or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"config.json has dtype={dtype!r}; supported are {', '.join(DTYPES)}")
    return dtype
