"""Makes the engine's config from transformers' reading of a config.json, and from what a probe sees of the model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from nanoinfer.checkpoint.architecture_names import ENDINGS, explain_architecture
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.fields import ROPE_FIELDS, ROPE_PARAMETERS, SPELLINGS, Fields, in_rope, override, replaced
from nanoinfer.checkpoint.hub import read_json
from nanoinfer.checkpoint.pooling_config import read_head
from nanoinfer.checkpoint.sentence_transformers import choose_head, read_pooling
from nanoinfer.errors import ConfigError, ModelError, find_similar
from nanoinfer.models import SUPPORTED
from nanoinfer.models.native_config import dtype_name
from nanoinfer.models.transformers.attention_interface import ATTENTION
from nanoinfer.models.transformers.probe import AttentionCall, Probed, probe
from nanoinfer.models.transformers.split_model import SplitModel

# The names of the longest position in configs of transformers; most have the first.
MAX_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
)
DEFAULT_MAX_POSITIONS = 2048
GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "GenerationDecoder")  # ends of classes
ALIGNMENT = 8  # the kernels' head sizes are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(BaseModelConfig):
    """Describes a model that transformers computes.

    Its layers are its attention calls. head_dim, num_key_value_heads: the most of any call; the cache has as many for
    each. fields: of config.json, with the user's own. captures_decode: whether its forward pass reads nothing back from
    the device, so that a CUDA graph can hold it.
    """

    fields: Mapping[str, Any]
    calls: tuple[AttentionCall, ...]
    captures_decode: bool

    @property
    def is_encoder(self) -> bool:
        return not self.calls[0].sight.causal

    @property
    def has_dynamic_rope(self) -> bool:
        return "dynamic" in str(self.fields.get("rope_parameters") or self.fields.get("rope_scaling"))

    def check_tensor_parallel_size(self, size: int) -> None:
        if size > 1:
            raise ConfigError(
                f"tensor_parallel_size={size} cannot split {self.architecture}, whose layers are transformers'; use "
                f"data_parallel_size={size}"
            )


def read_transformers_config(
    folder: Path, overrides: Mapping[str, Any] | None = None, quantization: str | None = None, runner: str = "auto"
) -> TransformersConfig:
    """Read `folder`/config.json and probe its model. Raises ModelError, ConfigError for what is not supported."""
    fields = read_json(folder / "config.json")
    fields = override(fields, overrides) if overrides else fields
    model_class = find_class(fields)
    config = make_config(model_class, fields)
    check_overrides(overrides or {}, config)
    check_class(model_class, config, fields)
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} rounds the layers that are nanoinfer's own, and those of "
            f"{model_class.__name__} are transformers'; leave it out"
        )
    if fields.get("quantization_config"):
        method = dict(fields["quantization_config"]).get("quant_method")
        raise ModelError(
            f"{model_class.__name__} runs by transformers' layers, with weights of 16 or 32 bits, and quant_method="
            f"{method!r} has others; use the checkpoint in 16 bits"
        )
    dtype = dtype_name(getattr(config, "dtype", None))  # which making a model changes
    text = config.get_text_config(decoder=True)
    max_positions = _max_positions(text)
    model, probed = _probe(model_class, config, max_positions)
    _check_calls(calls := probed.calls)
    head_dim = max(max(call.head_dim, call.value_dim) for call in calls)
    is_encoder, hidden_size = not calls[0].sight.causal, probed.hidden.shape[-1]
    head = choose_head(read_head(Fields(fields), _head_kind(model_class.__name__, is_encoder)), runner, folder)
    return TransformersConfig(
        architecture=model_class.__name__,
        fields=fields,
        calls=calls,
        captures_decode=not probed.reads_host,
        vocab_size=probed.vocab_size or text.vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=getattr(text, "num_hidden_layers", len(calls)),
        num_attention_heads=calls[0].num_heads,
        num_key_value_heads=max(call.num_kv_heads for call in calls),
        head_dim=head_dim + -head_dim % ALIGNMENT,
        max_position_embeddings=max_positions - model.first_position,
        initializer_range=float(getattr(text, "initializer_range", None) or 0.02),
        dtype=dtype,
        windows=tuple(call.sight.window for call in calls),
        head=head,
        pooling=read_pooling(folder, head, hidden_size, is_encoder),
    )


def _max_positions(text: PretrainedConfig) -> int:
    found = (int(size) for name in MAX_POSITIONS if (size := getattr(text, name, None)))
    max_positions = next(found, DEFAULT_MAX_POSITIONS)
    if getattr(text, "attn_temperature_tuning", False):
        # Queries grow with their place in the step, not with their position: by nothing before this place.
        return min(max_positions, int(text.floor_scale) - 1)
    return max_positions


def _probe(
    model_class: type[PreTrainedModel], config: PretrainedConfig, max_positions: int
) -> tuple[SplitModel, Probed]:
    """Return a model without weights, and what a probe saw of it. Raises ModelError if it needs more than a text."""
    try:
        with torch.device("meta"):
            whole = model_class._from_config(config, **attention_option(config), **dtype_option(torch.bfloat16))
        model = SplitModel(whole.eval())
        return model, probe(model, max_positions - model.first_position, model_class.__name__.endswith(GENERATING))
    except ModelError:
        raise
    except Exception as error:  # each class fails in its own way
        reason = f"{type(error).__name__}: {shortened(error)}"
        raise ModelError(
            f"{model_class.__name__} cannot compute a text alone ({reason}); run it with transformers"
        ) from error


def find_class(fields: Mapping[str, Any]) -> type[PreTrainedModel]:
    """Return the class of transformers for a config.json. Raises ModelError where there is none that reads text."""
    name = str(fields["architectures"][0])
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel) and name.endswith((*GENERATING, *ENDINGS)):
        return found
    version, remote = transformers.__version__, "; its own code (auto_map) is not run" if "auto_map" in fields else ""
    absent = "" if found else f"; transformers {version} has no such class either{remote}"
    raise ModelError(explain_architecture(fields, name, SUPPORTED) + absent)


def check_class(model_class: type[PreTrainedModel], config: PretrainedConfig, fields: Mapping[str, Any]) -> None:
    """Raise ModelError for an encoder-decoder, and for a class whose attention cannot be replaced."""
    name, version = model_class.__name__, transformers.__version__
    if config.is_encoder_decoder and not name.endswith("ForCausalLM"):  # which is the half that writes
        raise ModelError(explain_architecture({**fields, "is_encoder_decoder": True}, name, SUPPORTED))
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{name} has no attention interface in transformers {version}, so that its attention cannot be replaced; "
            "run it with transformers, or try a newer version of it"
        )


def shortened(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:300]


def dtype_option(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the argument for a model's dtype, which transformers 4 calls torch_dtype."""
    return {"dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype": dtype}


def attention_option(config: PretrainedConfig) -> dict[str, Any]:
    """Return the argument by which the text part of a model calls our attention, and other parts eager attention.

    Some parts that see look their attention up among a few of their own.
    """
    text, names = config.get_text_config(), {"": ATTENTION}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        has_text = isinstance(part, PretrainedConfig) and part.get_text_config() is text
        names[name] = ATTENTION if has_text else "eager"
    return {"attn_implementation": names}


def make_config(model_class: type[PreTrainedModel], fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' config for the fields of a config.json. Raises ModelError if it refuses them."""
    version, wanted = transformers.__version__, model_class.config_class
    fields = {"model_type": wanted.model_type, **fields}
    fields.pop("auto_map", None)  # code of others, which is not run
    if version.startswith("4.") and '"rope_parameters"' in json.dumps(fields):
        raise ModelError(
            f"config.json has rope_parameters, as transformers 5 writes it, which {version} does not read; "
            "upgrade it, or write rope_theta and rope_scaling instead"
        )
    with TemporaryDirectory() as folder:  # whose reader knows what else a file may hold, such as infinity
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config = config if isinstance(config, wanted) else config.get_text_config()
        except Exception as error:  # each class checks in its own way
            raise ModelError(f"transformers {version} refuses this config.json: {shortened(error)}") from None
    if not isinstance(config, wanted):
        raise ModelError(
            f"config.json has model_type={fields['model_type']!r}, and {model_class.__name__} is of the type "
            f"{wanted.model_type!r}; download the file again"
        )
    config.use_cache = False
    return config


def _head_kind(name: str, is_encoder: bool) -> str | None:
    """Return what the head of a class computes; None for tokens."""
    if name.endswith(GENERATING):
        return "none" if is_encoder else None
    return next(kind for ending, kind in ENDINGS.items() if name.endswith(ending))


def check_overrides(overrides: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise ConfigError for an override that transformers' config has no field for."""
    for path, value in replaced(overrides):
        part: Any = config
        for name in path[:-1]:
            part = getattr(part, SPELLINGS.get(name, name) if name in ROPE_FIELDS else name, None) or {}
        if in_rope(path):
            known = [*ROPE_PARAMETERS]
        else:
            known = [name for name in dir(_default(part)) if not name.startswith("_")] + [*SPELLINGS]
        if path[-1] not in known:
            meant = find_similar(path[-1], known)
            hint = f"did you mean {meant!r}? Else leave it out" if meant else "leave it out"
            raise ConfigError(
                f"hf_overrides has {'.'.join(path)}={value!r:.99}, which changes nothing: {type(config).__name__} of "
                f"transformers has no such field; {hint}"
            )


def _default(config: Any) -> Any:
    """Return a config with the fields of its class alone, where it can be made without any."""
    try:
        return type(config)()
    except Exception:  # each class checks in its own way
        return config


def _check_calls(calls: tuple[AttentionCall, ...]) -> None:
    """Raise ModelError for calls that cannot share a cache, or a step."""
    if len({call.sight.causal for call in calls}) > 1:
        raise ModelError("some of its layers attend to later tokens, and others do not, which is not supported")
    most = max(call.num_kv_heads for call in calls)
    for call in calls:
        if not call.sight.causal and (call.has_sinks or call.soft_cap is not None):
            raise ModelError(f"{call.name} attends to later tokens with sinks or a soft cap, which is not supported")
        if most % call.num_kv_heads or call.num_heads % most:
            raise ModelError(f"{call.name} has {call.num_kv_heads} KV heads, and others {most}; supported are divisors")
