"""Thoughts: where those of a sample begin and end, and how one is closed that has used up its budget.

A model writes a thought between two texts, such as <think> and </think>. `Thoughts` has these texts and the tokens that
write them; `Thinking` follows one sample by them. A budget means what vLLM's thinking_token_budget means: the tokens
that begin a thought do not count, each thought has the whole budget, and if the prompt leaves a thought open, its
tokens of the prompt count. The texts are compared as bytes, so it does not matter into which tokens a model cuts them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nanoinfer.config import REASONING_NAMES, EngineConfig
from nanoinfer.errors import ConfigError
from nanoinfer.responses.families import family_named, family_of
from nanoinfer.text.tokenizer import Tokenizer

START, CLOSING = REASONING_NAMES
NUM_LAST = 64  # tokens at the end of a prompt that are looked at first


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Says how a model writes its thoughts.

    start, end: the texts around a thought, in UTF-8. answer: the texts after which the answer begins, in their order
    and with others between them; none where it follows the thought. turns: the texts of a prompt after which the answer
    is to be written, as far as they are known. start_ids: tokens that write `start`. closing_ids: tokens that close a
    thought early. bytes_of: returns the bytes of a token.
    """

    start: bytes
    end: bytes
    answer: tuple[bytes, ...]
    turns: tuple[bytes, ...]
    start_ids: tuple[int, ...]
    closing_ids: tuple[int, ...]
    bytes_of: Callable[[int], bytes]

    def read_end(self, prompt: Sequence[int]) -> list[bytes]:
        """Return the last tokens of a prompt as bytes, all after the last of `turns` among them.

        Where the prompt has none of these, they are all its tokens.
        """
        num_last = NUM_LAST if self.turns else len(prompt)
        while True:
            parts = [*map(self.bytes_of, prompt[-num_last:])]
            text = b"".join(parts)
            if num_last >= len(prompt) or any(turn in text for turn in self.turns):
                return parts
            num_last *= 4


class Thinking:
    """Follows the thoughts of one sample, token by token.

    num_tokens: of the thought that is open, without those that began it; None where none is open. forced: the tokens
    that must come next. may_begin: whether the completion may begin with a thought: the prompt has none.
    """

    __slots__ = ("_before_answer", "_budget", "_num_kept", "_tail", "_thoughts", "forced", "may_begin", "num_tokens")

    def __init__(self, thoughts: Thoughts, budget: int | None, prompt: Sequence[int]) -> None:
        self._thoughts, self._budget = thoughts, math.inf if budget is None else budget
        self.num_tokens: int | None = None
        self.forced: tuple[int, ...] = ()
        parts = thoughts.read_end(prompt)
        text = b"".join(parts)
        turn = max(
            (after for turn in thoughts.turns if (after := _after_last(turn, text, 0)) is not None), default=None
        )
        started = _after_last(thoughts.start, text, turn or 0)
        ended = _after_last(thoughts.end, text, started or turn or 0)
        if started is not None and ended is None:
            begins = accumulate(map(len, parts), initial=0)
            self.num_tokens = sum(begin >= started for begin, _ in zip(begins, parts, strict=False))
        # Where no turn is found, the thought may be that of an earlier answer.
        is_over = ended is not None and (turn is not None or not text[ended:].strip())
        self.may_begin = self.num_tokens is None and not is_over
        # Texts that are still to come before the answer; a prompt without a turn is no chat.
        self._before_answer = thoughts.answer if turn is not None else ()
        self._num_kept = max(map(len, (thoughts.start, thoughts.end, *thoughts.answer)))
        self._tail = text[ended or started or turn or 0 :]
        while self.num_tokens is None and self._before_answer and self._has_come(self._before_answer[0]):
            self._before_answer = self._before_answer[1:]
        self._tail = self._tail[-self._num_kept :]  # may have the beginning of one of the texts
        self._close_late()

    @property
    def is_answer(self) -> bool:
        """Return whether the next token belongs to the answer."""
        return not self._before_answer and self.num_tokens is None and not self.forced

    @property
    def needs_newest(self) -> bool:
        """Return whether the next token may be forced, or not, because of one that is not known yet."""
        return bool(self.forced) or self._budget <= (0 if self.num_tokens is None else self.num_tokens + 1)

    def begin(self) -> None:
        """Have a thought begin with the next token."""
        self.forced = self._thoughts.start_ids

    def append(self, token_id: int) -> None:
        """Take the newest token."""
        self.forced = self.forced[1:]
        self._tail += self._thoughts.bytes_of(token_id)
        if self.num_tokens is not None:
            self.num_tokens = None if self._has_come(self._thoughts.end) else self.num_tokens + 1
        elif self._has_come(self._thoughts.start):
            self.num_tokens = 0
        elif self._before_answer and self._has_come(self._before_answer[0]):
            self._before_answer = self._before_answer[1:]
        self._tail = self._tail[-self._num_kept :]
        self._close_late()

    def _has_come(self, text: bytes) -> bool:
        """Return whether a text is complete; only what follows it is kept then."""
        if text not in self._tail:
            return False
        self._tail = self._tail.partition(text)[2]
        return True

    def _close_late(self) -> None:
        """Have a thought closed that has used up its budget."""
        if self.num_tokens is not None and self.num_tokens >= self._budget and not self.forced:
            self.forced = self._thoughts.closing_ids


def find_thoughts(config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Thoughts | None:
    """Return how a model writes its thoughts: as reasoning_config says, else as its family does; None for neither.

    Raises ConfigError for a reasoning_config that does not suit the model.
    """
    given, template = config.reasoning_config or {}, config.response_template
    if tokenizer is None:
        if given:
            raise ConfigError("reasoning_config is about text, and this model has no tokenizer; leave it out")
        return None
    family = family_of(getattr(tokenizer.hf, "chat_template", None))
    if isinstance(template, str) and template != "auto":
        family = family_named(template)
    texts = {} if family is None else {START: family.reasoning_start, CLOSING: family.forced_end}
    texts |= given
    if not texts:
        return None
    if missing := {START, CLOSING}.difference(texts):
        raise ConfigError(f"reasoning_config has no {missing.pop()}, and this model's is not known; give it too")
    start_ids, closing_ids = tokenizer.encode([texts[START], texts[CLOSING]], add_special_tokens=False)
    end = texts[CLOSING]  # the whole of it, unless a part of it is what ends thoughts by itself
    if family is not None and (family.reasoning_end in end or texts[START] == family.reasoning_start):
        end = family.reasoning_end
    elif added := [tokenizer.added_tokens[i] for i in closing_ids if i in tokenizer.added_tokens]:
        end = added[-1]
    answer = "" if family is None or family.answer_start == family.reasoning_end else family.answer_start
    channel, mark, message = answer.rpartition("<|")  # between them gpt-oss may say <|constrain|>json
    thoughts = Thoughts(
        start=texts[START].encode(),
        end=end.encode(),
        answer=tuple(text.encode() for text in (channel, mark + message) if text),
        turns=() if family is None else tuple(map(str.encode, family.turn_starts)),
        start_ids=tuple(start_ids),
        closing_ids=tuple(closing_ids),
        bytes_of=tokenizer.bytes_of,
    )
    for name, ids, written in ((START, start_ids, thoughts.start), (CLOSING, closing_ids, thoughts.end)):
        if max(ids, default=0) >= vocab_size or written not in b"".join(map(tokenizer.bytes_of, ids)):
            if not given:
                return None
            raise ConfigError(
                f"{name}={texts[name]!r} does not write {written.decode()!r} with this model's tokens; give another"
            )
    return thoughts


def _after_last(wanted: bytes, text: bytes, begin: int) -> int | None:
    """Return where the last `wanted` ends that is in a text from `begin` on; None where there is none."""
    place = text.rfind(wanted, begin) if wanted else -1
    return None if place < 0 else place + len(wanted)
