"""What a model makes of hidden states in the place of tokens: embeddings, classes, scores. Read from its folder.

The config.json names the head and its labels. The files of sentence-transformers say how hidden states become an
embedding: modules.json, the folders that it names, config_sentence_transformers.json, sentence_bert_config.json.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.hub import read_json, read_json_list
from nanoinfer.errors import ConfigError, ModelError

# How the names of architectures end that generate nothing, and what their head computes.
ENDINGS = {"ForSequenceClassification": "sequence", "ForTokenClassification": "tokens", "Model": "none"}
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
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")  # of torch.nn
NO_LENGTH = 10**9  # from here on, a tokenizer's model_max_length means that it has no limit
UNTRAINED_LABELS = 2  # that transformers takes where a config.json names none


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Describes what stands in the place of a language-model head.

    kind: "none" for hidden states alone; "sequence" for a classifier of the whole text; "tokens" for one of each token;
    "vocabulary" for the logits of a few tokens after the text. labels: of the classes, in order. problem_type: as
    transformers has it; None where the config does not say. activation: what sentence-transformers' cross-encoders
    apply to the logits; None where it is not said. pooling: "cls" or "mean"; None where the config does not say.
    vocabulary: the tokens of "vocabulary", as texts or ids.
    """

    kind: str
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    activation: str | None = None
    pooling: str | None = None
    vocabulary: tuple[str | int, ...] = ()

    @property
    def is_classifier(self) -> bool:
        return self.kind != "none"


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Describes a dense layer after pooling: `path` is the folder of its weights."""

    path: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Says what becomes of the hidden states of a text.

    method: "last", "mean" or "cls" (the first) of its tokens, or "all" for each of them. activation: "normalize",
    "softmax", "sigmoid" or "identity". labels: of classes; () for embeddings. dense: layers after pooling.
    dimensions: to which embeddings were trained to be cut; () where that is not said. token_ids: of a "vocabulary"
    head. prompts: what texts may begin with, by name. max_tokens: how many sentence-transformers reads of a text.
    """

    method: str
    activation: str
    labels: tuple[str, ...] = ()
    dense: tuple[DenseConfig, ...] = ()
    dimensions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    includes_prompt: bool = True
    max_tokens: int | None = None
    lower_cases: bool = False

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def is_of_each_token(self) -> bool:
        """Return whether a text gets a vector for each of its tokens, instead of one."""
        return self.method == "all"

    @property
    def finds_prefixes(self) -> bool:
        """Return whether the first tokens may come from the prefix cache, which has no hidden states of them."""
        return self.method == "last"

    @property
    def leaves_out_prompts(self) -> bool:
        """Return whether the mean is of the text alone, without what `prompts` puts before it."""
        return self.method == "mean" and not self.includes_prompt

    def first_wanted(self, num_tokens: int) -> int:
        """Return the first token of a text whose hidden state is needed."""
        return max(num_tokens - 1, 0) if self.method == "last" else 0


def split_architecture(raw: Mapping[str, Any], architecture: str, supported: Collection[str]) -> tuple[str, str | None]:
    """Return the architecture that is run, and what its head computes; None for a language-model head.

    Qwen3ForSequenceClassification, say, is Qwen3ForCausalLM with the head "sequence". What is not known is returned as
    it is.
    """
    if architecture in supported and not architecture.endswith(tuple(ENDINGS)):
        return architecture, None
    for ending, kind in ENDINGS.items():
        if not architecture.endswith(ending):
            continue
        stem = architecture.removesuffix(ending).removesuffix("Text")
        whole = "ForConditionalGeneration" if "text_config" in raw else "ForCausalLM"
        for base in (f"{stem}{whole}", f"{stem}Model"):
            if base in supported:
                return base, kind
    return architecture, None


def read_head(raw: Mapping[str, Any], kind: str | None) -> HeadConfig | None:
    """Read what a config.json says of a head of this kind; None for a language-model head."""
    vocabulary = raw.get("classifier_from_token")
    if vocabulary is not None and kind in (None, "sequence"):
        if not isinstance(vocabulary, list) or len(vocabulary) not in (1, 2):
            raise ModelError(
                f"classifier_from_token={vocabulary!r} must be a list of one token, or of two: that for no and that "
                "for yes"
            )
        # vLLM's users write it; here the tokens say enough.
        if not isinstance(raw.get("is_original_qwen3_reranker", True), bool):
            raise ModelError("is_original_qwen3_reranker must be true or false")
        return HeadConfig("vocabulary", labels=("LABEL_0",), vocabulary=tuple(vocabulary))
    if kind is None or kind == "none":
        return None if kind is None else HeadConfig("none")
    problem_type = raw.get("problem_type")
    known = ("regression", "single_label_classification", "multi_label_classification", None)
    if problem_type not in known:
        raise ModelError(f"config.json has problem_type={problem_type!r}; it must be one of {known[:3]}")
    pooling = raw.get("classifier_pooling") if kind == "sequence" else None
    if pooling not in (None, "cls", "mean"):
        raise ModelError(f"config.json has classifier_pooling={pooling!r}; it must be 'cls' or 'mean'")
    return HeadConfig(kind, _read_labels(raw), problem_type, _read_activation(raw), pooling)


def _read_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    names, count = raw.get("id2label"), raw.get("num_labels")
    if names is None:
        count = UNTRAINED_LABELS if count is None else count
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ModelError(f"config.json has num_labels={count!r}; it must be a whole number of at least 1")
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        by_id = {int(index): str(name) for index, name in names.items()}
        return tuple(by_id[index] for index in range(len(by_id))) or ("LABEL_0",)
    except (AttributeError, KeyError, ValueError, TypeError):
        raise ModelError(f"config.json has id2label={names!r:.200}; it must name the classes 0, 1, 2 ...") from None


def _read_activation(raw: Mapping[str, Any]) -> str | None:
    """Read what a cross-encoder of sentence-transformers applies to its logits."""
    part = raw.get("sentence_transformers")
    name = part.get("activation_fn") if isinstance(part, Mapping) else None
    name = name or raw.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    kind = str(name).rpartition(".")[2].lower()
    if kind not in ("identity", "sigmoid"):
        raise ModelError(f"config.json has the activation {name!r}; supported are Identity and Sigmoid of torch.nn")
    return kind


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
    names = _read_names(folder)
    if head is not None and head.is_classifier:
        activation = _activation_of_classes(head)
        if head.kind == "vocabulary":
            return PoolingConfig(
                "last", activation, head.labels, token_ids=_token_ids(folder, head.vocabulary), **names
            )
        method = "all" if head.kind == "tokens" else (head.pooling or "cls") if is_encoder else "last"
        return PoolingConfig(method, activation, head.labels, **names)
    method, activation, dense = "mean" if is_encoder else "last", "normalize", []
    if (folder / "modules.json").exists():
        activation = "identity"
        size = hidden_size
        for module in read_json_list(folder / "modules.json"):
            kind, path = _module(folder, module)
            settings = read_json(path / "config.json")
            if kind == "Pooling":
                method = _read_method(path, settings)
                names["includes_prompt"] = settings.get("include_prompt", True) is not False
            elif kind == "Dense":
                if activation == "normalize":
                    raise ModelError(f"{folder / 'modules.json'} has a Dense after Normalize, which is not supported")
                dense.append(_read_dense(path, settings, size))
                size = dense[-1].out_features
            elif kind == "Normalize":
                activation = "normalize"
            elif kind != "Transformer":
                raise ModelError(
                    f"{folder / 'modules.json'} has the module {kind!r}; supported are Transformer, Pooling, Dense and "
                    "Normalize: run this model with sentence-transformers"
                )
    return PoolingConfig(method, activation, dense=tuple(dense), dimensions=_read_dimensions(folder), **names)


def _activation_of_classes(head: HeadConfig) -> str:
    if head.activation is not None:
        return head.activation
    if head.problem_type == "regression":
        return "identity"
    is_single = head.problem_type != "multi_label_classification" and len(head.labels) > 1
    return "softmax" if is_single else "sigmoid"


def _module(folder: Path, module: Any) -> tuple[str, Path]:
    """Return the class of a module, and its folder."""
    kind, path = (module.get(name) if isinstance(module, Mapping) else None for name in ("type", "path"))
    # A path may be empty, for the folder itself, but not lead out of it.
    if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path or path == "..":
        raise ModelError(f"{folder / 'modules.json'} has {module!r:.200}, which is no module with a type and a path")
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
    sizes = settings.get("in_features"), settings.get("out_features")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    whole = all(isinstance(item, int) and item > 0 for item in sizes)
    if not whole or sizes[0] != size or activation not in DENSE_ACTIVATIONS or settings.get("use_residual"):
        raise ModelError(
            f"{path / 'config.json'} has {dict(settings)!r:.300}; supported is a dense layer of {size} inputs with one "
            f"of the activations {', '.join(DENSE_ACTIVATIONS)}"
        )
    return DenseConfig(path, size, int(sizes[1] or 0), settings.get("bias", True) is True, activation)


def _read_names(folder: Path) -> dict[str, Any]:
    """Read the prompts, how many tokens of a text are read, and whether texts become lower case."""
    found = read_json(folder / "config_sentence_transformers.json")
    bert: dict[str, Any] = {}
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json"):
        bert = bert or read_json(folder / name)
    prompts, default, length = found.get("prompts") or {}, found.get("default_prompt_name"), bert.get("max_seq_length")
    if length is None and (folder / "modules.json").exists():  # newer versions leave it to the tokenizer
        length = read_json(folder / "tokenizer_config.json").get("model_max_length")
        length = length if isinstance(length, int) and length < NO_LENGTH else None
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{folder / 'config_sentence_transformers.json'} has prompts={prompts!r:.200}; texts by name")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{folder / 'config_sentence_transformers.json'} has default_prompt_name={default!r}, which its prompts "
            f"lack; they have {', '.join(prompts) or 'none'}"
        )
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ModelError(f"{folder} has max_seq_length={length!r}; it must be a whole number of at least 1")
    return {
        "prompts": dict(prompts),
        "default_prompt_name": default,
        "max_tokens": length,
        "lower_cases": bert.get("do_lower_case") is True,
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
