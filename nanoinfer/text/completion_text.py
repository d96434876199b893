"""Grows the text of a completion: it ends at a stop string, and shows nothing that a stop string may still cut off."""

from collections.abc import Mapping, Sequence

from nanoinfer.text.detokenizer import Detokenizer


class TokenTexts:
    """Says what each token of a text adds to it, and what another token would add there.

    detokenizer: of that text, at its beginning. special: by id, the texts of tokens that the detokenizer leaves out;
    here they count. A token with part of a character adds nothing of it; the token with its last part adds all of it.
    """

    def __init__(self, detokenizer: Detokenizer, special: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._special = special

    def add_first(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each of these tokens would add at this place, and go on to the one after the first."""
        texts, special = self._detokenizer.decode_first(token_ids), self._special
        if special.keys().isdisjoint(token_ids):
            return texts
        return [special.get(token_id, text) for token_id, text in zip(token_ids, texts, strict=True)]

    def end(self, token_id: int, text: str) -> str:
        """Return the text of the last token, `text` so far, with the half character that the completion ends with."""
        half = self._detokenizer.decode([], final=True)
        return half + text if token_id in self._special else text + half


class CompletionText:
    """Holds the text of one completion, which grows with its tokens and ends at the first stop string.

    detokenizer: None makes no text. stop: strings that end it. include_stop: whether the text keeps the string that
    ended it. of_tokens: says which text each token adds, where log-probabilities are wanted. `stop_string` is the
    string that ended the text, or None: the one completed first; if one token completes several, the first in `stop`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        of_tokens: TokenTexts | None = None,
    ) -> None:
        self.stop = stop
        self.of_tokens = of_tokens
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        # Of a stop string that may be coming: how much of it is there at most, and what it begins with.
        self._max_open = max(map(len, stop), default=1) - 1
        self._first_characters = {string[0] for string in stop}
        self._parts: list[str] = []  # text that is certain
        self._num_taken = 0  # parts
        self._held = ""  # the end of the text, which may be the beginning of a stop string

    def extend(self, token_ids: Sequence[int], final: bool = False, may_stop: bool = True) -> None:
        """Add tokens; with `final`, add what was held back too. After a stop string nothing more is added.

        may_stop: whether a stop string that these tokens complete counts.
        """
        if self._detokenizer is None or self.stop_string is not None:
            return
        # With stop strings it matters which token completes one.
        for piece in [[token_id] for token_id in token_ids] if self.stop else [token_ids]:
            self._add(self._detokenizer.decode(piece), may_stop=may_stop)
        if final:
            self._add(self._detokenizer.decode([], final=True), final=True, may_stop=may_stop)

    def _add(self, new: str, final: bool = False, may_stop: bool = True) -> None:
        if self.stop_string is not None:
            return
        text = self._held + new
        end = self._find_stop(text, len(self._held)) if self.stop and may_stop and new else None
        if end is None:
            end = len(text) if final else len(text) - self._num_open(text)
            self._held = text[end:]
        if end:
            self._parts.append(text[:end])

    def take(self) -> str:
        """Return the text that has become certain since the last call."""
        taken, self._num_taken = self._parts[self._num_taken :], len(self._parts)
        return "".join(taken)

    def __str__(self) -> str:
        return "".join(self._parts)

    def _find_stop(self, text: str, num_held: int) -> int | None:
        """Note the first stop string that is complete after the held text; return where the text ends, or None."""
        for string in self.stop:
            start = text.find(string, max(0, num_held - len(string) + 1))
            if start >= 0:
                self.stop_string = string
                return start + len(string) if self._include_stop else start
        return None

    def _num_open(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._max_open), len(text)):
            if text[start] in self._first_characters:
                end = text[start:]
                if any(len(end) < len(string) and string.startswith(end) for string in self.stop):
                    return len(end)
        return 0
