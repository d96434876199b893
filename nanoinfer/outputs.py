"""What a finished request hands back to its user."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    index: which of the request's completions this is, from 0.
    text: the decoded completion without its stop token and other special tokens; "" when there is no tokenizer.
    token_ids: the generated ids, the stop token included.
    finish_reason: "stop" (a stop token), "length" (max_tokens or max_model_len reached), or "error" (the model's logits
        were NaN or infinite; the tokens before that are kept).
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and its completions.

    request_id: the number that `add_request` returned.
    prompt: the prompt as given, or None when it was given as token ids.
    prompt_token_ids: the prompt as the model saw it.
    num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    outputs: the completions; `text`, `token_ids` and `finish_reason` are those of the first.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    def __getitem__(self, name: str) -> Any:
        """`output["text"]` and `output["token_ids"]`, as nano-vllm's users write it."""
        if name not in ("text", "token_ids", "finish_reason"):
            raise KeyError(f"{name!r} is no key of a RequestOutput; use 'text', 'token_ids' or 'finish_reason'")
        return getattr(self, name)
