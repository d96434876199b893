"""How sentence-transformers makes an embedding or a score of hidden states, read from the files of a model's folder.

These are modules.json, the folders that it names, config_sentence_transformers.json and sentence_bert_config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    modules = read_json_list(folder / "modules.json")
    if head is not None or runner == "generate" or (runner == "auto" and not modules):
        return head
    scores = [path for kind, path in (_module(folder, module) for module in modules) if kind == "LogitScore"]
    return _read_logit_score(read_json(scores[0] / "config.json")) if scores else HeadConfig("none")


def _read_logit_score(settings: Mapping[str, Any]) -> HeadConfig:
    """Read which tokens' logits are the score of a reranker: that for no, if there is one, and that for yes."""
    ids = tuple(settings[name] for name in ("false_token_id", "true_token_id") if settings.get(name) is not None)
    if not ids or not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"LogitScore has {dict(settings)!r:.200}; it must name true_token_id")
    return HeadConfig("vocabulary", labels=("LABEL_0",), vocabulary=ids)


def read_pooling(folder: Path, head: HeadConfig | None, hidden_size: int, is_encoder: bool) -> PoolingConfig:
    """Read from a model's folder what becomes of its hidden states. Raises ModelError for what is not supported."""
    own = read_json(folder / "config_sentence_transformers.json")
    names = _read_names(folder, own, names_activation=head is not None and head.activation is not None)
    if head is not None and head.is_classifier:
        activation = _activation_of_classes(folder, own, head.labels, head)
        if head.kind == "vocabulary":
            return PoolingConfig(
                "last", activation, head.labels, token_ids=_token_ids(folder, head.vocabulary), **names
            )
        method = "all" if head.kind == "tokens" else (head.pooling or "cls") if is_encoder else "last"
        return PoolingConfig(method, activation, head.labels, pad_token_id=head.pad_token_id, **names)
    if not (folder / "modules.json").exists():
        return PoolingConfig(
            "mean" if is_encoder else "last", "normalize", dimensions=_read_dimensions(folder), **names
        )
    fields, activation, labels = _read_modules(folder, hidden_size)
    if labels:
        activation = _activation_of_classes(folder, own, labels)
    size = own.get("truncate_dim")
    if size is not None and (not isinstance(size, int) or size < 1):
        file = folder / "config_sentence_transformers.json"
        raise ModelError(f"{file} has truncate_dim={size!r}; it must be a whole number of at least 1")
    fields |= {"truncate_dim": size, "dimensions": _read_dimensions(folder), **names}
    return PoolingConfig(activation=activation, labels=labels, **fields)


def _read_modules(folder: Path, size: int) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Read the modules of sentence-transformers: some fields of PoolingConfig, its activation, its labels.

    size: of a hidden state.
    """
    file, dense = folder / "modules.json", list[DenseConfig]()
    fields: dict[str, Any] = {}
    activation, labels = "Identity", tuple[str, ...]()
    for module in read_json_list(file):
        kind, path = _module(folder, module)
        settings = read_json(path / "config.json")
        # The vectors of tokens may be normalised, too, and a dense layer may have scores as its output.
        reads = settings.get("module_input_name") or SENTENCE
        writes = settings.get("module_output_name") or reads
        if kind == "Pooling" and not fields:
            includes_prompt = settings.get("include_prompt", True) is not False
            fields = {"method": _read_method(path, settings), "includes_prompt": includes_prompt}
        elif kind in ("Dense", "Normalize") and (not fields or reads != SENTENCE or labels):
            raise ModelError(f"{file} has a {kind} of {reads} in this place, where only pooled vectors are supported")
        elif kind == "Dense" and activation == "normalize":
            raise ModelError(f"{file} has a Dense after Normalize, which is not supported")
        elif kind == "Dense":
            dense.append(_read_dense(path, settings, size))
            size = dense[-1].out_features
            if writes == "scores":  # a cross-encoder of several modules
                labels = tuple(f"LABEL_{index}" for index in range(size))
        elif kind == "Normalize":
            activation = "normalize"
        elif kind not in ("Transformer", "Dropout"):
            raise ModelError(
                f"{file} has the module {kind!r} in this place; supported are Transformer, Pooling, Dense and "
                "Normalize: run this model with sentence-transformers"
            )
    if not fields:
        raise ModelError(f"{file} has no Pooling; run this model with sentence-transformers")
    return {**fields, "dense": tuple(dense)}, activation, labels


def _activation_of_classes(
    folder: Path, own: Mapping[str, Any], labels: tuple[str, ...], head: HeadConfig | None = None
) -> str:
    """Return what makes probabilities of logits. own: what config_sentence_transformers.json has."""
    if own.get("activation_fn") is not None:
        return activation_name(own["activation_fn"], folder / "config_sentence_transformers.json")
    if head is not None and head.activation is not None:
        return head.activation
    if head is None or own.get("model_type") == "CrossEncoder":
        return "Sigmoid" if len(labels) == 1 else "Identity"
    if head.problem_type == "regression":
        return "Identity"
    is_single = head.problem_type != "multi_label_classification" and len(labels) > 1
    return "Softmax" if is_single else "Sigmoid"


def _module(folder: Path, module: Any) -> tuple[str, Path]:
    """Return the class of a module, and its folder."""
    kind, path = (module.get(name) if isinstance(module, Mapping) else None for name in ("type", "path"))
    # A path may be empty, for the folder itself, but not lead out of it.
    if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path or path == "..":
        raise ModelError(f"{folder / 'modules.json'} has {module!r:.200}, which is no module with a type and a path")
    if not kind.startswith("sentence_transformers."):
        raise ModelError(
            f"{folder / 'modules.json'} has the module {kind!r} of a package of its own, which is not run here; run "
            "this model with sentence-transformers"
        )
    return kind.rpartition(".")[2], folder / path


def _read_method(path: Path, settings: Mapping[str, Any]) -> str:
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        modes = [name for flag, name in POOLING_FLAGS.items() if settings.get(flag) is True] or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLING_METHODS:
        raise ModelError(
            f"{path / 'config.json'} pools by {modes!r}; supported is one of {', '.join(POOLING_METHODS)}: run this "
            "model with sentence-transformers"
        )
    return POOLING_METHODS[modes[0]]


def _read_dense(path: Path, settings: Mapping[str, Any], size: int) -> DenseConfig:
    file, sizes = path / "config.json", (settings.get("in_features"), settings.get("out_features"))
    activation = activation_name(settings.get("activation_function", "torch.nn.modules.activation.Tanh"), file)
    whole = all(isinstance(item, int) and item > 0 for item in sizes)
    if not whole or sizes[0] != size or settings.get("use_residual"):
        raise ModelError(
            f"{file} has {dict(settings)!r:.300}; supported is a dense layer of {size} inputs without use_residual"
        )
    return DenseConfig(path, size, int(sizes[1] or 0), settings.get("bias", True) is True, activation)


def _read_names(folder: Path, own: Mapping[str, Any], names_activation: bool) -> dict[str, Any]:
    """Read the prompts, how many tokens of a text are read, and what else becomes of it before it is tokenized.

    own: what config_sentence_transformers.json has. names_activation: whether config.json is a cross-encoder's.
    """
    own_file, transformer = folder / "config_sentence_transformers.json", _read_transformer(folder)
    prompts, default, length = own.get("prompts") or {}, own.get("default_prompt_name"), transformer["max_seq_length"]
    # Newer versions leave it to the tokenizer, as cross-encoders have always done.
    if length is None and (names_activation or (folder / "modules.json").exists()):
        length = read_json(folder / "tokenizer_config.json").get("model_max_length")
        length = length if isinstance(length, int) and length < NO_LENGTH else None
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{own_file} has prompts={prompts!r:.200}; texts by name")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{own_file} has default_prompt_name={default!r}, which its prompts lack; they have "
            f"{', '.join(prompts) or 'none'}"
        )
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ModelError(f"{folder} has max_seq_length={length!r}; it must be a whole number of at least 1")
    return {
        "prompts": dict(prompts),
        "default_prompt_name": default,
        "max_tokens": length,
        "lower_cases": transformer["lower_cases"],
        "renders_texts": transformer["renders_texts"],
    }


def _read_transformer(folder: Path) -> dict[str, Any]:
    """Read how the Transformer module of sentence-transformers reads texts. Raises ModelError for other ways."""
    files = [folder / f"sentence_{name}_config.json" for name in TRANSFORMER_FILES]
    file = next((file for file in files if file.exists()), files[0])
    settings = read_json(file)
    kinds, calls = settings.get("modality_config") or {}, settings.get("processing_kwargs") or {}
    output = (kinds.get("text") or {}).get("method_output_name")
    task = settings.get("transformer_task", TASKS[0])
    others = {name for part in ("common", "text") for name in calls.get(part) or {}} - HARMLESS_TOKENIZING
    if task not in TASKS or output not in TEXT_OUTPUTS or others:
        what = f"processing_kwargs with {', '.join(sorted(others))}" if others else f"{task!r} with output {output!r}"
        raise ModelError(f"{file} has {what}, which is not supported; run this model with sentence-transformers")
    return {
        "max_seq_length": settings.get("max_seq_length"),
        "lower_cases": settings.get("do_lower_case") is True,
        "renders_texts": "message" in kinds,
    }


def _read_dimensions(folder: Path) -> tuple[int, ...]:
    dimensions = read_json(folder / "config.json").get("matryoshka_dimensions") or ()
    return tuple(size for size in dimensions if isinstance(size, int)) if isinstance(dimensions, list) else ()


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
