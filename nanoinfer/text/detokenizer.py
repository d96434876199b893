"""Token ids to text as they come: no character in halves, and nothing shown that a stop string may still cut off.

The text of a completion is always what one detokenizer makes of its tokens in order, whether it is streamed, searched
for stop strings, or made at the end. It is the same however the tokens are grouped.

Most tokenizers write tokens as bytes that do not depend on their neighbours, so text grows by decoding the new bytes
alone. Any other tokenizer is asked again about its last few tokens.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

REPLACEMENT = "\ufffd"  # stands for bytes that are not a character, or not yet one
WINDOW = 32  # tokens that a WindowDetokenizer holds back at most

# A byte-level vocabulary is written in printable characters: each byte that is one stands for itself, the others, in
# their order, are the characters from 256 on (GPT-2's convention).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}

EACH_BYTE = "nanoinfer.replace_each_byte"  # how tokenizers with byte fallback replace bytes that are not a character
codecs.register_error(EACH_BYTE, lambda error: (REPLACEMENT * (error.end - error.start), error.end))  # type: ignore[attr-defined]


class ByteFormat(NamedTuple):
    """How a tokenizer writes bytes as tokens, and joins them to a text."""

    to_bytes: Callable[[str], bytes]  # the bytes of a token, given as the vocabulary writes it
    errors: str = "replace"  # Python's name for what happens to bytes that are not a character
    num_stripped: int = 0  # spaces that the start of a text loses


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token (Qwen, Llama 3); an added token may be plain text."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback_bytes(token: str, space: str = "▁") -> bytes:
    """The bytes of a token of a tokenizer with byte fallback (Llama 2, Gemma): text, or one byte such as "<0x0A>"."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace(space, " ").encode()


def find_byte_format(decoder: Mapping[str, Any]) -> ByteFormat | None:
    """The byte format that a decoder in tokenizer.json describes; None if its tokens depend on their neighbours."""
    if decoder["type"] == "ByteLevel":
        return ByteFormat(byte_level_bytes)
    match decoder.get("decoders"):
        case [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            pass
        case _:
            return None
    match rest:
        case []:
            num_stripped = 0
        case [{"type": "Strip", "content": " ", "start": num_stripped, "stop": 0}]:
            pass
        case _:
            return None
    return ByteFormat(lambda token: byte_fallback_bytes(token, space), EACH_BYTE, num_stripped)


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, looked up when first asked for.

    token_of_id: the token as the vocabulary writes it, or None for an id that it does not know. skipped: ids without
    text.
    """

    def __init__(
        self, byte_format: ByteFormat, token_of_id: Callable[[int], str | None], skipped: Iterable[int] = ()
    ) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self.format = byte_format
        self._token_of_id = token_of_id

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of_id(token_id)
        self[token_id] = found = b"" if token is None else self.format.to_bytes(token)
        return found


class Detokenizer(Protocol):
    """Turns the tokens of one completion to text, in order."""

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The text that these tokens complete; with `final`, what was held back as well."""


class ByteDetokenizer:
    """Decodes tokens that are bytes, and holds back the bytes of a character that is not whole.

    The text is the tokenizer's own, with one exception: a tokenizer with byte fallback replaces all of a run of byte
    tokens if a part of it is not a character, for example a newline before half an emoji. Here the characters stay,
    because they may have been shown already.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(token_bytes.format.errors)
        self._num_to_strip = token_bytes.format.num_stripped

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        text = self._utf8.decode(b"".join([self._bytes[token_id] for token_id in token_ids]), final)
        while self._num_to_strip and text:
            self._num_to_strip = self._num_to_strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Decodes the last few tokens again with each new one, and gives what is new in their text.

    decode: the tokenizer's own. Tokens are held back while the text ends in replacement characters: these may become a
    character that is not whole yet.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the tokens whose text was shown last, as context, and those after them
        self._num_context = 0  # tokens
        self._num_shown = 0  # characters of the window's text

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        shown = [self._add(token_id) for token_id in token_ids]
        if final and self._window:
            shown.append(self._decode(self._window)[self._num_shown :])
        return "".join(shown)

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_full = len(self._window) - self._num_context >= WINDOW
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        self._num_shown = min(self._num_shown, len(text))  # bytes shown as no character may have become one
        new = text[self._num_shown :]
        if new:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._decode(self._window))
        elif is_full:
            del self._window[self._num_context :]  # these tokens have no text
        return new


class CompletionText:
    """The text of one completion: grows with its tokens and ends at the first stop string.

    detokenizer: None makes no text. stop: strings that end it. include_stop: whether the text keeps the one that did.
    `stop_string` is that one, or None. Which one it is, and where the text ends, does not depend on how the text is cut
    into tokens: it is the stop string that is complete first, and of several that end together the longest.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self.stop = stop
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        # What the text may end with while a stop string is still coming, the longest first.
        beginnings = {string[:length] for string in stop for length in range(1, len(string))}
        self._beginnings = tuple(sorted(beginnings, key=len, reverse=True))
        self._parts: list[str] = []  # text that is certain
        self._num_taken = 0  # parts
        self._held = ""  # the end of the text, which may be the beginning of a stop string

    def extend(self, token_ids: Sequence[int], final: bool = False, may_stop: bool = True) -> None:
        """Add tokens; with `final`, add what was held back too. After a stop string nothing more is added.

        may_stop: whether a stop string that these tokens complete counts.
        """
        if self._detokenizer is None or self.stop_string is not None:
            return
        new = self._detokenizer.decode(token_ids, final)
        text = self._held + new
        end = self._find_stop(text, len(self._held)) if self.stop and may_stop and new else None
        if end is None:
            end = len(text) if final else len(text) - self._num_open(text)
            self._held = text[end:]
        if end:
            self._parts.append(text[:end])

    def take(self) -> str:
        """The text that has become certain since the last call."""
        taken, self._num_taken = self._parts[self._num_taken :], len(self._parts)
        return "".join(taken)

    def __str__(self) -> str:
        return "".join(self._parts)

    def _find_stop(self, text: str, num_held: int) -> int | None:
        """Note the stop string that is complete first, after the held text; return where the text ends, or None."""
        found = []
        for string in self.stop:
            start = text.find(string, max(0, num_held - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start, string))
        if not found:
            return None
        end, start, self.stop_string = min(found)
        return end if self._include_stop else start

    def _num_open(self, text: str) -> int:
        """The length of the longest end of `text` that is the beginning of a stop string."""
        if not text.endswith(self._beginnings):  # one call for all of them: the usual case
            return 0
        return next(len(beginning) for beginning in self._beginnings if text.endswith(beginning))
