"""Holds what a request returns, and shows it in a console and in a notebook."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex, TypeVar, cast, overload

if TYPE_CHECKING:  # importing the package is to cost little
    from numpy.typing import NDArray
    from pandas import DataFrame
    from typing_extensions import Self  # which `typing` has from Python 3.11 on

MAX_SHOWN = 80  # characters of a text or a list in a repr
MAX_HTML = 2000  # characters of a text in a notebook
MAX_ROWS = 20  # completions in a table in a notebook


def shown(value: Any) -> str:
    """Return the repr of a value, with long texts and lists cut. What was left out is counted outside of the quotes."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{value[:MAX_SHOWN]!r}... of {len(value)} characters"
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, list):
        return f"[{_first(map(shown, value), len(value))}]"
    if isinstance(value, dict):
        return f"{{{_first((f'{key!r}: {shown(item)}' for key, item in value.items()), len(value))}}}"
    return repr(value)


def _first(items: Iterator[str], count: int) -> str:
    """Join as many items as fit into MAX_SHOWN characters, at least one, and say how many there are if some do not."""
    taken: list[str] = []
    while len(taken) < count and len(", ".join(taken)) < MAX_SHOWN:
        taken.append(next(items))
    return ", ".join(taken if len(taken) == count else [*taken, f"... {count} in all"])


def short_repr(item: Any) -> str:
    """Return the repr of a dataclass's object in short form, without fields that are None by default and None now."""
    values = {one.name: getattr(item, one.name) for one in fields(item) if one.repr}
    left_out = {one.name for one in fields(item) if one.default is None and values.get(one.name) is None}
    given = ", ".join(f"{name}={shown(value)}" for name, value in values.items() if name not in left_out)
    return f"{type(item).__qualname__}({given})"


def html_table(rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of plain texts, the first row its head; long texts are cut."""
    style = ' style="text-align: left; vertical-align: top; white-space: pre-wrap"'
    lines: list[str] = []
    for row in rows:
        tag = "td" if lines else "th"
        cut = [text if len(text) <= MAX_HTML else f"{text[:MAX_HTML]}... of {len(text)} characters" for text in row]
        lines.append("".join(f"<{tag}{style}>{html.escape(text)}</{tag}>" for text in cut))
    # A notebook would otherwise set what stands between two dollar signs as a formula.
    return f'<table class="tex2jax_ignore mathjax_ignore">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


class MadeLater:
    """Lets dataclasses with slots keep what is made of an object when it is first asked for.

    It is no field, so tables, comparisons and `replace` do not see it. Pickled objects have it ready.
    """

    __slots__ = ("_made",)

    def _make(self) -> Any:
        made = getattr(self, "_made", None)
        if callable(made):
            made = made(self)
            object.__setattr__(self, "_made", made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        me = cast(Any, self)
        return _restore, (type(me), {found.name: getattr(me, found.name) for found in fields(me)}, self._make())


def _restore(cls: Any, values: Mapping[str, Any], made: Any) -> Any:
    """Return an object as it was pickled."""
    return make_later(cls(**values), made)


def make_later(item: Any, make: Any) -> Any:
    """Have an object make what it holds by calling `make` with itself; return the object."""
    object.__setattr__(item, "_made", make)
    return item


@dataclass(frozen=True, slots=True)
class Logprob:
    """Says how likely one token is at one place, in the distribution that `logprobs_mode` of the LLM names.

    logprob: natural logarithm of its probability, or its logit. rank: 1 is the likeliest of all; of equal ones the
    lower id comes first, as in greedy decoding; None for logprob_token_ids other than the sampled one. decoded_token:
    the text that this token adds at its place, or would add; None where there is no text. Joined, the texts of a
    completion's tokens are its text, beside special tokens, which are left out there and not here. A token that is
    part of a character adds "", and the last part adds the character.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None = None

    __repr__ = short_repr


# At one place, by token id: the token that is there, then the likeliest, or those of logprob_token_ids.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput(MadeLater):
    """Holds one completion of a prompt.

    index: which of the request's completions this is, from 0.
    text: the decoded completion without what stopped it and without special tokens, unless its SamplingParams ask for
        them; "" when there is no tokenizer.
    token_ids: the generated ids, the stop token or those of the stop string included.
    finish_reason: "stop" (a stop token, a stop string, or a form that is complete), "length" (max_tokens or
        max_model_len reached), "abort", or "error" (the model's logits were NaN or infinite, no token was allowed, or
        a logits processor failed; the tokens before that are kept).
    stop_reason: the string of `stop` or the id of the stop token that ended it; None for all other ends, the
        tokenizer's own EOS among them.
    logprobs: for each of `token_ids`, where SamplingParams ask for them: a list, or FlatLogprobs; their sum for these
        is cumulative_logprob.
    error: why it ended with "error"; None for all other ends. error_kind: a short name of that, to group errors by.
    routed_experts: where the LLM has enable_return_routed_experts, which experts computed each token: an array of whole
        numbers (num_tokens - 1, num_layers, num_experts_per_tok), the prompt's tokens from routed_experts_prompt_start
        on first. The last token was never computed. Layers without experts have zeros.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    error_kind: str | None = None
    routed_experts: "NDArray[Any] | None" = field(default=None, repr=False, compare=False)

    __repr__ = short_repr

    @property
    def message(self) -> dict[str, Any]:
        """Return the completion as a message: {"role", "content", "reasoning", "tool_calls"}.

        `chat` has it split when it is first asked for, as `nanoinfer.parse_response` says. Of other calls, content is
        the whole text.
        """
        made: dict[str, Any] | None = self._make()
        plain = {"role": "assistant", "content": self.text, "reasoning": None, "tool_calls": None}
        return plain if made is None else made


@dataclass(frozen=True, slots=True)
class StreamChunk(MadeLater):
    """Holds what is new of one prompt's completion.

    index: which of the prompts of the `stream`, from 0. text: what is certain now and was not before; "" while it may
    still become a stop string or is half a character. token_ids: ids that came; the joined ids of a stream's chunks
    are the completion's, and so are their texts. finish_reason: as in CompletionOutput, in the last chunk of a
    completion; None in all others. sample: which of the prompt's `n` completions, from 0. logprobs: for each of
    `token_ids`, where SamplingParams ask for them. request_id: what `abort`, `pause` and `resume` take; given by name.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    sample: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None
    request_id: int = field(kw_only=True)

    __repr__ = short_repr

    @property
    def part(self) -> Literal["reasoning", "content", "tool_calls"] | None:
        """Return the part of the answer that these tokens end in, as far as it can be told yet.

        None for tokens that only mark where parts begin and end, and for models of which no family is known.
        """
        part: Literal["reasoning", "content", "tool_calls"] | None = self._make()
        return part


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Says how long a request took, in seconds; None for what it did not come to.

    queue_time: from its arrival to the launch of its first step. time_to_first_token: from its arrival to when the
    host had its first token. time_per_token: mean, of the tokens after the first of the longest completion.
    """

    queue_time: float | None = None
    time_to_first_token: float | None = None
    time_per_token: float | None = None

    __repr__ = short_repr

    @classmethod
    def of(
        cls, arrival_time: float, start_time: float | None, first_token_time: float | None, num_later: int
    ) -> "RequestMetrics":
        """Return the metrics of a request that ends now.

        start_time: when its first step was launched. first_token_time: when the host had that. num_later: how many
        tokens came after it. Times are of perf_counter; None for what did not happen.
        """
        queue_time = None if start_time is None else start_time - arrival_time
        if first_token_time is None:
            return cls(queue_time)
        time_per_token = (perf_counter() - first_token_time) / num_later if num_later > 0 else None
        return cls(queue_time, first_token_time - arrival_time, time_per_token)


# Fields of a RequestOutput that it takes from its first completion.
OF_FIRST = ("text", "token_ids", "finish_reason", "stop_reason", "error", "error_kind", "cumulative_logprob")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Holds a finished request: its prompt and its completions.

    request_id: the number that `add_request` returned.
    prompt: the prompt as given, or None when it was given as token ids.
    prompt_token_ids: the prompt as the model saw it.
    num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    outputs: the completions; what is a field of theirs too, such as `text` and `error`, is that of the first.
    metrics: how long it took.
    prompt_logprobs: for each prompt token, where SamplingParams ask for them; None for the first, because no token
        comes before it.
    hidden_states: of the prompt, where they are asked for: by layer, a tensor (num_prompt_tokens, hidden_size) on the
        CPU, or of its last token alone.

    What follows from these is a field too, since pandas makes a column of each field: `pandas.DataFrame(outputs)` has a
    row for each output. `to_dict` and the `to_dataframe` of a list of outputs give the same without what is nested.
    """

    request_id: int
    prompt: str | None
    text: str = field(init=False, repr=False, compare=False)
    finish_reason: str = field(init=False, repr=False, compare=False)
    stop_reason: str | int | None = field(init=False, repr=False, compare=False)
    error: str | None = field(init=False, repr=False, compare=False)
    error_kind: str | None = field(init=False, repr=False, compare=False)
    num_prompt_tokens: int = field(init=False, repr=False, compare=False)
    num_generated_tokens: int = field(init=False, repr=False, compare=False)
    cumulative_logprob: float | None = field(init=False, repr=False, compare=False)
    prompt_token_ids: list[int]
    token_ids: list[int] = field(init=False, repr=False, compare=False)
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default=RequestMetrics(), repr=False)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    hidden_states: Mapping[int, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        first, set_field = self.outputs[0], object.__setattr__  # the class is frozen
        for name in OF_FIRST:
            set_field(self, name, getattr(first, name))
        set_field(self, "num_prompt_tokens", len(self.prompt_token_ids))
        set_field(self, "num_generated_tokens", len(first.token_ids))

    __repr__ = short_repr

    @property
    def message(self) -> dict[str, Any]:
        """Return the first completion as a message: {"role", "content", "reasoning", "tool_calls"}."""
        return self.outputs[0].message

    @property
    def finished(self) -> bool:
        """Return True: programs written for vLLM ask."""
        return True

    def to_dict(self, sample: int = 0) -> dict[str, Any]:
        """Return a flat row of a table about one of the completions: texts, numbers, None and lists of token ids.

        stop_reason is a text here, so that a column has values of one type.
        """
        completion = self.outputs[sample]
        return {
            "request_id": self.request_id,
            "sample": completion.index,
            "prompt": self.prompt,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": None if completion.stop_reason is None else str(completion.stop_reason),
            "error": completion.error,
            "error_kind": completion.error_kind,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_generated_tokens": len(completion.token_ids),
            "cumulative_logprob": completion.cumulative_logprob,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": completion.token_ids,
        }

    def __getitem__(self, name: str) -> Any:
        """Serve `output["text"]` and `output["token_ids"]`, as nano-vllm's users write them."""
        if name not in ("text", "token_ids", "finish_reason"):
            raise KeyError(f"{name!r} is no key of a RequestOutput; use 'text', 'token_ids' or 'finish_reason'")
        return getattr(self, name)

    def _repr_html_(self) -> str:
        """Return a table with a row for each completion, for notebooks."""
        return RequestOutputs([self])._repr_html_()


Output = TypeVar("Output")  # has `to_dict` and `html_row`


class OutputList(list[Output]):
    """Lists what a call returns: a notebook shows it as a table, and its slices too.

    head: the names of the table's columns.
    """

    head: ClassVar[Sequence[str]]

    @overload
    def __getitem__(self, index: SupportsIndex) -> Output: ...
    @overload
    def __getitem__(self, index: slice) -> "Self": ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        picked = super().__getitem__(index)
        return type(self)(cast("list[Output]", picked)) if isinstance(index, slice) else picked

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the `to_dict` of each output: rows for Polars, `datasets` and others."""
        items: Iterable[Any] = self
        return [item.to_dict() for item in items]

    def to_dataframe(self, **options: Any) -> "DataFrame":
        """Return the `to_dicts` as a DataFrame of pandas. options: those of `to_dicts`."""
        from pandas import DataFrame

        return DataFrame(self.to_dicts(**options))

    def _rows(self) -> Iterator[Sequence[str]]:
        """Yield the rows of the table that a notebook shows."""
        items: Iterable[Any] = self
        return (item.html_row() for item in items)

    def _num_rows(self) -> int:
        return len(self)

    def _repr_html_(self) -> str:
        num_left = self._num_rows() - MAX_ROWS
        rows = [self.head, *islice(self._rows(), MAX_ROWS)]
        return html_table([*rows, [f"{num_left} more"]] if num_left > 0 else rows)


class RequestOutputs(OutputList[RequestOutput]):
    """Lists what `generate` and `chat` return. A row of its table is a completion."""

    head = "request", "prompt", "completion", "tokens in + out", "finish_reason"

    def to_dicts(self, samples: bool = False) -> list[dict[str, Any]]:
        """Return a flat row for each output, of its first completion. samples: a row for every completion instead."""
        if not samples:
            return super().to_dicts()
        return [output.to_dict(sample) for output in self for sample in range(len(output.outputs))]

    def _rows(self) -> Iterator[Sequence[str]]:
        return (_row(output, sample) for output in self for sample in output.outputs)

    def _num_rows(self) -> int:
        return sum(len(output.outputs) for output in self)


def _row(output: RequestOutput, sample: CompletionOutput) -> list[str]:
    numbers = f"{len(output.prompt_token_ids)} + {len(sample.token_ids)}"
    text = sample.text or (shown(sample.token_ids) if sample.token_ids else "")
    return [f"{output.request_id}", prompt_cell(output), text, numbers, with_error(sample.finish_reason, sample.error)]


def prompt_cell(output: Any) -> str:
    """Return the prompt of an output for a table: its text, else its token ids, if it has any."""
    if output.prompt is not None:
        return str(output.prompt)
    return shown(output.prompt_token_ids) if output.prompt_token_ids else ""


def with_error(text: str, error: str | None) -> str:
    """Return a table's cell, with the error of the output if it has one."""
    return text if error is None else f"{text}: {error}"


@dataclass(frozen=True, slots=True)
class Score:
    """Says how likely a model finds a completion of a prompt.

    token_ids: the completion's. logprobs: of each of them, given all before it. total: their sum, the log-likelihood
    of the whole. is_greedy: whether greedy decoding of the prompt would have said just this. error, error_kind: why
    there is no score, as in CompletionOutput; total is NaN then. If the request was aborted or the model's logits are
    NaN, logprobs and total have NaN, and is_greedy is False.
    """

    token_ids: list[int]
    logprobs: list[float]
    total: float
    is_greedy: bool
    error: str | None = None
    error_kind: str | None = None

    __repr__ = short_repr

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a row of a table."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def html_row(self) -> list[str]:
        return [
            shown(self.token_ids),
            shown(self.logprobs),
            with_error(shown(self.total), self.error),
            str(self.is_greedy),
        ]


class Scores(OutputList[Score]):
    """Lists what `score` returns."""

    head = "token_ids", "logprobs", "total", "is_greedy"
