"""Token ids to text as they come: no character in halves, and nothing shown that a stop string may still cut off.

A byte-level tokenizer (Qwen's, Llama 3's) writes each token as bytes that do not depend on its neighbours, so that text
grows by decoding the new bytes alone. Any other tokenizer is asked again about the last few tokens.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what stands for bytes that are no character, or not yet one
# Tokens that a decoder without bytes of its own keeps as context, and the most that it decodes again.
CONTEXT, WINDOW = 8, 32

# A byte-level vocabulary is written in printable characters: each byte that is one stands for itself, the others, in
# their order, are the characters from 256 on (GPT-2's convention).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def bytes_of_token(token: str) -> bytes:
    """The bytes of a byte-level token, given as its vocabulary writes it; an added token may be plain text."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id of a byte-level tokenizer, looked up when first asked for.

    token_of_id: the token as the vocabulary writes it, or None for an id that it does not know. skipped: ids without
    text.
    """

    def __init__(self, token_of_id: Callable[[int], str | None], skipped: Iterable[int] = ()) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._token_of_id = token_of_id

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of_id(token_id)
        self[token_id] = found = b"" if token is None else bytes_of_token(token)
        return found


class Detokenizer(Protocol):
    """Turns the tokens of one completion to text, in order."""

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The text that these tokens complete; with `final`, what was held back as well."""


class ByteDetokenizer:
    """For byte-level tokenizers: holds back the bytes of a character that is not whole."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        return self._utf8.decode(b"".join([self._bytes[token_id] for token_id in token_ids]), final)


class WindowDetokenizer:
    """For any tokenizer: decodes a window of the last tokens, and gives what is new in it.

    decode: the tokenizer's own. Replacement characters at the end are held back, for a while: they may be the bytes of
    a character that is not whole, and of what stands right before it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text
        self._num_waits = 0  # tokens in a row after which something was held back

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        if len(token_ids) > 1 and not final:
            return "".join([self.decode([token_id]) for token_id in token_ids])
        self._window += token_ids
        text = self._decode(self._window)
        end = len(text.rstrip(REPLACEMENT))
        self._num_waits = self._num_waits + 1 if end < len(text) else 0
        if final or self._num_waits > WINDOW:
            end = len(text)
        shown = min(self._num_shown, len(text))  # fewer, where bytes that were shown as none have become a character
        new, self._num_shown = text[shown:end], max(end, shown)
        if end == len(text) and len(self._window) > WINDOW:
            for size in range(CONTEXT, WINDOW):  # the fewest tokens that say by themselves what they say here
                tail = self._decode(self._window[-size:])
                if text.endswith(tail):
                    break
            self._window, self._num_shown = self._window[-size:], len(tail)
        return new


class CompletionText:
    """The text of one completion: grows with its tokens and ends at the first stop string.

    stop: strings that end it. include_stop: whether the text keeps the one that did. `stop_string` is that one, or
    None. Which one it is, and where the text ends, does not depend on how the text is cut into tokens: it is the stop
    string that is complete first, and of several that end together the longest.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self.stop = stop
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._parts: list[str] = []  # text that is certain
        self._num_taken = 0  # parts
        self._held = ""  # the longest end of the text that a stop string may begin with

    def extend(self, token_ids: Sequence[int], final: bool = False, may_stop: bool = True) -> None:
        """Add tokens; with `final`, add what was held back too. After a stop string nothing more is added.

        may_stop: whether a stop string that these tokens complete counts.
        """
        if self.stop_string is not None:
            return
        num_held = len(self._held)
        text = self._held + self._detokenizer.decode(token_ids, final)
        starts = [(text.find(stop, max(0, num_held - len(stop) + 1)), stop) for stop in self.stop if may_stop]
        found = [(start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0]
        if found:
            end, _, self.stop_string = min(found)
            certain = end if self._include_stop else end - len(self.stop_string)
        else:
            certain = len(text) if final else len(text) - self._num_open(text)
        self._held = "" if found else text[certain:]
        if certain:
            self._parts.append(text[:certain])

    def take(self) -> str:
        """The text that has become certain since the last call."""
        taken, self._num_taken = self._parts[self._num_taken :], len(self._parts)
        return "".join(taken)

    def __str__(self) -> str:
        return "".join(self._parts)

    def _num_open(self, text: str) -> int:
        """The length of the longest end of `text` that is the beginning of a stop string."""
        beginnings = (stop[:length] for stop in self.stop for length in range(1, min(len(stop), len(text) + 1)))
        return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
