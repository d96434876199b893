"""Says what a model makes of hidden states instead of tokens: embeddings, classes or scores, and by which head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.errors import ModelError

# Classes of torch.nn that need no argument. The files name the class alone, so sentence-transformers gives it none.
ACTIVATIONS = (
    *("Identity", "Sigmoid", "Softmax", "Tanh", "ReLU", "GELU", "SiLU", "Mish", "ELU", "SELU", "LeakyReLU"),
    *("Softplus", "Softsign", "Hardtanh", "LogSigmoid"),
)
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
UNTRAINED_LABELS = 2  # that transformers takes where a config.json names none


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Describes what stands in the place of a language-model head.

    kind: "none" for hidden states alone; "sequence" for a classifier of the whole text; "tokens" for one of each token;
        "vocabulary" for the logits of a few tokens after the text.
    labels: of the classes, in order.
    problem_type: as transformers has it; None where the config does not say.
    activation: what sentence-transformers' cross-encoders apply to the logits, of ACTIVATIONS; None where it is not
        said.
    pooling: "cls" or "mean"; None where the config does not say.
    vocabulary: the tokens of "vocabulary", as texts or ids.
    pad_token_id: what a decoder's classifier passes over at the end of a text; None for nothing.
    """

    kind: str
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    activation: str | None = None
    pooling: str | None = None
    vocabulary: tuple[str | int, ...] = ()
    pad_token_id: int | None = None

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

    method: "last", "mean" or "cls" (the first) of its tokens, or "all" for each of them.
    activation: "normalize", or one of ACTIVATIONS.
    labels: of classes; () for embeddings.
    dense: layers after pooling.
    dimensions: to which embeddings were trained to be cut; () where that is not said.
    truncate_dim: to how many values a folder cuts its embeddings; None for all.
    token_ids: of a "vocabulary" head.
    pad_token_id: see HeadConfig.
    prompts: what texts may begin with, by name.
    max_tokens: how many sentence-transformers reads of a text.
    renders_texts: whether it writes texts out by the chat template first.
    """

    method: str
    activation: str
    labels: tuple[str, ...] = ()
    dense: tuple[DenseConfig, ...] = ()
    dimensions: tuple[int, ...] = ()
    truncate_dim: int | None = None
    token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    includes_prompt: bool = True
    max_tokens: int | None = None
    lower_cases: bool = False
    renders_texts: bool = False

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def is_of_each_token(self) -> bool:
        """Return whether a text gets a vector for each of its tokens, instead of one."""
        return self.method == "all"

    @property
    def finds_prefixes(self) -> bool:
        """Return whether cached prefixes can be skipped: only the last token's method needs no states of the others."""
        return self.method == "last"

    @property
    def leaves_out_prompts(self) -> bool:
        """Return whether the text alone is pooled, without the prompt before it."""
        return self.method in ("mean", "cls") and not self.includes_prompt

    def first_wanted(self, num_tokens: int) -> int:
        """Return the first token of a text whose hidden state is needed."""
        return max(num_tokens - 1, 0) if self.method == "last" else 0


def read_head(fields: Fields, kind: str | None) -> HeadConfig | None:
    """Read what a config.json says of a head of this kind; None for a language-model head."""
    vocabulary = fields.get("classifier_from_token") if kind in (None, "sequence") else None
    if vocabulary is not None:
        if not isinstance(vocabulary, list) or len(vocabulary) not in (1, 2):
            raise ModelError(
                f"classifier_from_token={vocabulary!r} must be a list of one token, or of two: that for no and that "
                "for yes"
            )
        # vLLM's users write it; here the tokens say enough.
        if not isinstance(fields.get("is_original_qwen3_reranker", True), bool):
            raise ModelError("is_original_qwen3_reranker must be true or false")
        return HeadConfig("vocabulary", labels=("LABEL_0",), vocabulary=tuple(vocabulary))
    if kind is None or kind == "none":
        return None if kind is None else HeadConfig("none")
    problem_type = fields.get("problem_type")
    if problem_type not in (*PROBLEM_TYPES, None):
        raise fields.error("problem_type", f"it must be one of {PROBLEM_TYPES}")
    pooling = fields.get("classifier_pooling") if kind == "sequence" else None
    if pooling not in (None, "cls", "mean"):
        raise fields.error("classifier_pooling", "it must be 'cls' or 'mean'")
    return HeadConfig(kind, _read_labels(fields), problem_type, _read_activation(fields), pooling)


def read_padding(fields: Fields) -> int | None:
    """Read the padding that a classifier of texts passes over, as in transformers."""
    token_id: int | None = fields.get("pad_token_id")
    if token_id is not None and not isinstance(token_id, int):
        raise fields.error("pad_token_id", "it must be a token id or null")
    return token_id


def _read_labels(fields: Fields) -> tuple[str, ...]:
    names = fields.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(fields.int("num_labels", UNTRAINED_LABELS)))
    try:
        by_id = {int(index): str(name) for index, name in names.items()}
        return tuple(by_id[index] for index in range(len(by_id))) or ("LABEL_0",)
    except (AttributeError, KeyError, ValueError, TypeError):
        raise fields.error("id2label", "it must name the classes 0, 1, 2 ...") from None


def _read_activation(fields: Fields) -> str | None:
    """Read what a cross-encoder of sentence-transformers before version 6 applies to its logits."""
    part = fields.get("sentence_transformers")
    name = part.get("activation_fn") if isinstance(part, Mapping) else None
    name = name or fields.get("sbert_ce_default_activation_function")
    return None if name is None else activation_name(name, fields.source)


def activation_name(path: Any, source: str) -> str:
    """Return the class of torch.nn that a file names, as "torch.nn.modules.activation.Tanh", say."""
    package, _, name = str(path).rpartition(".")
    if name not in ACTIVATIONS or package.partition(".")[0] != "torch":
        raise ModelError(f"{source} has the activation {path!r}; supported are {', '.join(ACTIVATIONS)} of torch.nn")
    return name
