"""Reads from a model's folder how sentence-transformers makes an embedding or a score of hidden states.

These are modules.json, the folders that it names, config_sentence_transformers.json and sentence_bert_config.json.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.hub import read_json, read_json_list
from nanoinfer.checkpoint.pooling_config import DenseConfig, HeadConfig, PoolingConfig, activation_name
from nanoinfer.errors import ConfigError, ModelError

POOLING_METHODS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # by sentence-transformers' names
# The older spelling, a flag for each.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# How sentence-transformers may call the tokenizer without changing the tokens of a text that is not cut.
HARMLESS_TOKENIZING = {"padding", "padding_side", "pad_to_multiple_of", "truncation", "return_tensors"}
# Between "sentence_" and "_config.json": how the file of a Transformer module has been called.
TRANSFORMER_FILES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TASKS = ("feature-extraction", "sequence-classification", "text-generation")  # of a Transformer module
TEXT_OUTPUTS = (None, "last_hidden_state", "logits")  # that these tasks read
SENTENCE = "sentence_embedding"  # the name of the vector that a text is pooled to
NO_LENGTH = 10**9  # from here on, a tokenizer's model_max_length means that it has no limit


def choose_head(head: HeadConfig | None, runner: str, folder: Path) -> HeadConfig | None:
    """Return the head that a model gets: its own, or none where it is to make embeddings instead of text.

    runner: the option. Raises ConfigError where the model cannot do what it asks for.
    """
    if runner == "generate" and head is not None:
        raise ConfigError(
            "runner='generate' needs a language-model head, and the model of config.json has none; leave runner out, "
            "and use embed, classify or reward"
        )
    modules = [*_modules(folder)] if head is None and runner != "generate" else []
    if head is not None or runner == "generate" or (runner == "auto" and not modules):
        return head
    scores = next((settings for kind, settings in modules if kind == "LogitScore"), None)
    if scores is None:
        return HeadConfig("none")
    # The tokens whose logits are the score of a reranker: that for no, if there is one, and that for yes.
    ids = tuple(token for name in ("false_token_id", "true_token_id") if (token := scores.get(name)) is not None)
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ModelError(f"LogitScore has {dict(scores.values)!r:.200}; it must name true_token_id")
    return HeadConfig("vocabulary", labels=("LABEL_0",), vocabulary=ids)


def read_pooling(folder: Path, head: HeadConfig | None, hidden_size: int, is_encoder: bool) -> PoolingConfig:
    """Read how a model's folder says to pool hidden states. Raises ModelError if that is not supported."""
    own, has_modules = _read(folder / "config_sentence_transformers.json"), (folder / "modules.json").exists()
    fields = {
        **_read_transformer(folder, has_modules or (head is not None and head.activation is not None)),
        **_read_prompts(own),
    }
    if head is not None and head.is_classifier:
        methods = {"vocabulary": "last", "tokens": "all"}
        fields |= {
            "method": methods.get(head.kind, (head.pooling or "cls") if is_encoder else "last"),
            "activation": _activation_of_classes(own, head.labels, head),
            "labels": head.labels,
            "token_ids": _token_ids(folder, head.vocabulary),
            "pad_token_id": head.pad_token_id,
        }
        return PoolingConfig(**fields)
    if has_modules:
        fields |= _read_modules(folder, own, hidden_size) | {"truncate_dim": own.optional_int("truncate_dim")}
    else:
        fields |= {"method": "mean" if is_encoder else "last", "activation": "normalize"}
    sizes = read_json(folder / "config.json").get("matryoshka_dimensions")
    dimensions = tuple(size for size in sizes if isinstance(size, int)) if isinstance(sizes, list) else ()
    return PoolingConfig(dimensions=dimensions, **fields)


def _read(path: Path) -> Fields:
    return Fields(read_json(path), source=str(path))


def _modules(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield the class and the settings of each module of sentence-transformers."""
    file = folder / "modules.json"
    for module in read_json_list(file):
        kind, path = (module.get(name) if isinstance(module, Mapping) else None for name in ("type", "path"))
        # A path may be empty, for the folder itself, but not lead out of it.
        if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path or path == "..":
            raise ModelError(f"{file} has {module!r:.200}, which is no module with a type and a path")
        if not kind.startswith("sentence_transformers."):
            raise ModelError(
                f"{file} has the module {kind!r} of a package of its own, which is not run here; run this model with "
                "sentence-transformers"
            )
        yield kind.rpartition(".")[2], _read(folder / path / "config.json")


def _read_modules(folder: Path, own: Fields, size: int) -> dict[str, Any]:
    """Read what the modules of sentence-transformers say of PoolingConfig's fields. size: of a hidden state."""
    file, dense = folder / "modules.json", list[DenseConfig]()
    found: dict[str, Any] = {"activation": "Identity"}
    for kind, settings in _modules(folder):
        # The vectors of tokens may be normalised, too, and a dense layer may have scores as its output.
        reads = settings.get("module_input_name") or SENTENCE
        writes = settings.get("module_output_name") or reads
        is_pooled = "method" in found
        if kind == "Pooling" and not is_pooled:
            found["method"] = _read_method(settings)
            found["includes_prompt"] = settings.get("include_prompt") is not False
        elif kind in ("Dense", "Normalize") and (not is_pooled or reads != SENTENCE or "labels" in found):
            raise ModelError(f"{file} has a {kind} of {reads} in this place, where only pooled vectors are supported")
        elif kind == "Dense" and found["activation"] == "normalize":
            raise ModelError(f"{file} has a Dense after Normalize, which is not supported")
        elif kind == "Dense":
            dense.append(_read_dense(settings, size))
            size = dense[-1].out_features
            if writes == "scores":  # a cross-encoder of several modules
                found["labels"] = tuple(f"LABEL_{index}" for index in range(size))
        elif kind == "Normalize":
            found["activation"] = "normalize"
        elif kind not in ("Transformer", "Dropout"):
            raise ModelError(
                f"{file} has the module {kind!r} in this place; supported are Transformer, Pooling, Dense and "
                "Normalize: run this model with sentence-transformers"
            )
    if "method" not in found:
        raise ModelError(f"{file} has no Pooling; run this model with sentence-transformers")
    if "labels" in found:
        found["activation"] = _activation_of_classes(own, found["labels"])
    return {**found, "dense": tuple(dense)}


def _activation_of_classes(own: Fields, labels: tuple[str, ...], head: HeadConfig | None = None) -> str:
    """Return the name of the class that makes probabilities of logits. own: config_sentence_transformers.json."""
    if own.get("activation_fn") is not None:
        return activation_name(own.get("activation_fn"), own.source)
    if head is not None and head.activation is not None:
        return head.activation
    if head is None or own.get("model_type") == "CrossEncoder":
        return "Sigmoid" if len(labels) == 1 else "Identity"
    if head.problem_type == "regression":
        return "Identity"
    is_single = head.problem_type != "multi_label_classification" and len(labels) > 1
    return "Softmax" if is_single else "Sigmoid"


def _read_method(settings: Fields) -> str:
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        modes = [name for flag, name in POOLING_FLAGS.items() if settings.get(flag) is True] or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLING_METHODS:
        raise ModelError(
            f"{settings.source} pools by {modes!r}; supported is one of {', '.join(POOLING_METHODS)}: run this model "
            "with sentence-transformers"
        )
    return POOLING_METHODS[modes[0]]


def _read_dense(settings: Fields, size: int) -> DenseConfig:
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if settings.int("in_features") != size:
        raise settings.error("in_features", f"supported is a dense layer of {size} inputs")
    settings.must_be("use_residual", False)
    return DenseConfig(
        Path(settings.source).parent,
        size,
        settings.int("out_features"),
        settings.flag("bias", True),
        activation_name(activation, settings.source),
    )


def _read_prompts(own: Fields) -> dict[str, Any]:
    """Read the prompts that texts may begin with."""
    prompts, default = own.get("prompts") or {}, own.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise own.error("prompts", "texts by name")
    if default is not None and default not in prompts:
        rule = f"which its prompts lack; they have {', '.join(prompts) or 'none'}"
        raise own.error("default_prompt_name", rule, ",")
    return {"prompts": dict(prompts), "default_prompt_name": default}


def _read_transformer(folder: Path, asks_tokenizer: bool) -> dict[str, Any]:
    """Read how the Transformer module of sentence-transformers reads texts. Raises ModelError for other ways.

    asks_tokenizer: whether the tokenizer says how many tokens of a text are read, where that module does not.
    """
    files = [folder / f"sentence_{name}_config.json" for name in TRANSFORMER_FILES]
    settings = _read(next((file for file in files if file.exists()), files[0]))
    kinds, calls = settings.get("modality_config") or {}, settings.get("processing_kwargs") or {}
    output = (kinds.get("text") or {}).get("method_output_name")
    task = settings.get("transformer_task", TASKS[0])
    others = {name for part in ("common", "text") for name in calls.get(part) or {}} - HARMLESS_TOKENIZING
    if task not in TASKS or output not in TEXT_OUTPUTS or others:
        what = f"processing_kwargs with {', '.join(sorted(others))}" if others else f"{task!r} with output {output!r}"
        raise ModelError(
            f"{settings.source} has {what}, which is not supported; run this model with sentence-transformers"
        )
    length = settings.optional_int("max_seq_length")
    # Newer versions leave it to the tokenizer, as cross-encoders have always done.
    if length is None and asks_tokenizer:
        tokenizer, name = _read(folder / "tokenizer_config.json"), "model_max_length"
        is_limited = isinstance(limit := tokenizer.get(name), int) and limit < NO_LENGTH
        length = tokenizer.int(name) if is_limited else None
    return {
        "max_tokens": length,
        "lower_cases": settings.get("do_lower_case") is True,
        "renders_texts": "message" in kinds,
    }


def _token_ids(folder: Path, tokens: tuple[str | int, ...]) -> tuple[int, ...]:
    """Return the ids of tokens, which may be given as their texts."""
    if all(isinstance(token, int) for token in tokens):
        return tuple(int(token) for token in tokens)
    model = read_json(folder / "tokenizer.json").get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    vocab = vocab if isinstance(vocab, Mapping) else {}
    if missing := [token for token in tokens if isinstance(token, str) and token not in vocab]:
        raise ModelError(
            f"classifier_from_token names {missing[0]!r}, which is no token of {folder / 'tokenizer.json'}; give its "
            "token id"
        )
    return tuple(token if isinstance(token, int) else int(vocab[token]) for token in tokens)
