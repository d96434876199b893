"""Token ids to text as they come, and no character in halves.

The text of a completion is always what one detokenizer makes of its tokens in order, whether it is streamed, searched
for stop strings, or made at the end. It is the same however the tokens are grouped. A detokenizer knows the prompt,
because some tokenizers strip the first space of a text, and a completion begins a text only where the prompt has none.

Most tokenizers write tokens as bytes that do not depend on their neighbours, so text grows by decoding the new bytes
alone. Any other tokenizer is asked again about its last few tokens.
"""

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

REPLACEMENT = "\ufffd"  # stands for bytes that are not a character, or not yet one
WINDOW = 32  # tokens that a WindowDetokenizer holds back at most
CONTEXT = 4  # tokens of a prompt that it looks back at, or more where these have no text
MAX_CHARACTER_BYTES = 4  # in UTF-8

# A byte-level vocabulary is written in printable characters: each byte that is one stands for itself, the others, in
# their order, are the characters from 256 on (GPT-2's convention).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}

EACH_BYTE = "nanoinfer.replace_each_byte"  # how tokenizers with byte fallback replace bytes that are not a character
codecs.register_error(EACH_BYTE, lambda error: (REPLACEMENT * (error.end - error.start), error.end))  # type: ignore[attr-defined]


class ByteFormat(NamedTuple):
    """Describes how a tokenizer writes bytes as tokens, and joins them to a text."""

    to_bytes: Callable[[str], bytes]  # the bytes of a token, given as the vocabulary writes it
    errors: str = "replace"  # Python's name for what happens to bytes that are not a character
    num_stripped: int = 0  # spaces that the start of a text loses


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token (Qwen, Llama 3); an added token may be plain text."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback_bytes(token: str, space: str = "▁") -> bytes:
    """Return the bytes of a token with byte fallback (Llama 2, Gemma): text, or one byte such as "<0x0A>"."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace(space, " ").encode()


def find_byte_format(decoder: Mapping[str, Any]) -> ByteFormat | None:
    """Return the format that a decoder in tokenizer.json describes; None if its tokens depend on their neighbours."""
    match decoder:
        case {"type": "ByteLevel"}:
            return ByteFormat(byte_level_bytes)
        case {"decoders": [{"type": "Replace", "pattern": {"String": space}, "content": " "}, *others]}:
            to_bytes = partial(byte_fallback_bytes, space=space)
            match others:
                case [{"type": "ByteFallback"}, {"type": "Fuse"}]:
                    return ByteFormat(to_bytes, EACH_BYTE)
                case [
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": n, "stop": 0},
                ]:
                    return ByteFormat(to_bytes, EACH_BYTE, num_stripped=n)
    return None


class ByteTokens(NamedTuple):
    """Looks up what token ids stand for, each once."""

    format: ByteFormat
    bytes_of: Callable[[int], bytes]
    text_of: Callable[[int], str]  # of a token within a text, after a whole character; "" for half of one
    is_whole: Callable[[int], bool]  # whether such a token leaves no half of a character


def look_up_bytes(
    byte_format: ByteFormat, token_of_id: Callable[[int], str | None], skipped: Collection[int] = ()
) -> ByteTokens:
    """Return what looks up a tokenizer's tokens.

    token_of_id: returns a token as the vocabulary writes it, or None for an id that it does not know. skipped: ids
    without text.
    """

    @cache
    def bytes_of(token_id: int) -> bytes:
        token = None if token_id in skipped else token_of_id(token_id)
        return b"" if token is None else byte_format.to_bytes(token)

    @cache
    def text_of(token_id: int) -> str:
        return codecs.getincrementaldecoder("utf-8")(byte_format.errors).decode(bytes_of(token_id))

    @cache
    def is_whole(token_id: int) -> bool:
        utf8 = codecs.getincrementaldecoder("utf-8")(byte_format.errors)
        utf8.decode(bytes_of(token_id))
        return not utf8.getstate()[0]

    return ByteTokens(byte_format, bytes_of, text_of, is_whole)


class Detokenizer(Protocol):
    """Turns the tokens of one completion into text, in order."""

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Return the text that these tokens complete; with `final`, also the text that was held back."""

    def decode_first(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each of these tokens would complete if it came next, and decode the first."""


class ByteDetokenizer:
    """Decodes tokens that are bytes, and holds back the bytes of a character that is not whole.

    The text is what the tokenizer makes of prompt and completion together, after what it makes of the prompt. There is
    one exception: a tokenizer with byte fallback replaces all of a run of byte tokens if a part of it is not a
    character, for example a newline before half an emoji. Here the characters stay, because they may have been shown
    already. A character that begins in the prompt and ends in the completion is the completion's.
    """

    def __init__(self, tokens: ByteTokens, prompt: Sequence[int] = ()) -> None:
        self._tokens, self._bytes_of = tokens, tokens.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokens.format.errors)
        self._num_to_strip = tokens.format.num_stripped
        self._shown = ""  # half a character at the end of the prompt, as its own text shows it
        if prompt:
            self._read(prompt)

    def _read(self, prompt: Sequence[int]) -> None:
        """Come to where the prompt ends, without decoding all of it."""
        for data in map(self._bytes_of, prompt):
            if not self._num_to_strip:
                break
            self._num_to_strip -= min(self._num_to_strip, len(data) - len(data.lstrip(b" ")))
            if data.strip(b" "):
                self._num_to_strip = 0
        end = b""  # the last bytes decide whether a character is whole
        for data in map(self._bytes_of, reversed(prompt)):
            end = data + end
            if len(end) >= MAX_CHARACTER_BYTES:
                break
        self._utf8.decode(end)
        self._shown = self._utf8.getstate()[0].decode("utf-8", self._utf8.errors)

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        text = self._utf8.decode(b"".join(map(self._bytes_of, token_ids)), final)
        while self._num_to_strip and text:
            self._num_to_strip = self._num_to_strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ")
        if self._shown and text:
            text, self._shown = text[count_shown(self._shown, text) :], ""
        return text

    def decode_first(self, token_ids: Sequence[int]) -> list[str]:
        if self._shown or self._num_to_strip or self._utf8.getstate()[0]:
            return try_each(token_ids, self._try, self.decode)
        if not self._tokens.is_whole(token_ids[0]):  # else nothing changes
            self.decode(token_ids[:1])
        return [*map(self._tokens.text_of, token_ids)]

    def _try(self, token_id: int) -> str:
        buffered, num_to_strip, shown = self._utf8.getstate(), self._num_to_strip, self._shown
        text = self.decode([token_id])
        self._utf8.setstate(buffered)
        self._num_to_strip, self._shown = num_to_strip, shown
        return text


class WindowDetokenizer:
    """Decodes the last few tokens again with each new one, and gives what is new in their text.

    decode: the tokenizer's own. Tokens are held back while the text ends in replacement characters: these may become a
    character that is not whole yet. joined: tokens, by id, that follow one another without a space between them.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], joined: Mapping[int, str] | None = None, prompt: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._joined = joined or {}
        self._is_after_joined = bool(prompt) and prompt[-1] in self._joined
        # The tokens whose text was shown last, as context, and those after them.
        self._window, self._shown = _find_context(decode, prompt)
        self._num_context = len(self._window)  # tokens

    def decode(self, token_ids: Sequence[int], final: bool = False) -> str:
        shown = [self._add(token_id) for token_id in token_ids]
        if final and self._window:
            text = self._decode(self._window)
            shown.append(text[count_shown(self._shown, text) :])
        return "".join(shown)

    def decode_first(self, token_ids: Sequence[int]) -> list[str]:
        return try_each(token_ids, self._try, self.decode)

    def _try(self, token_id: int) -> str:
        other = copy(self)
        other._window = [*self._window]
        return other._add(token_id)

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_full = len(self._window) - self._num_context >= WINDOW
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        new = text[count_shown(self._shown, text) :]
        if new:
            is_joined = token_id in self._joined
            if is_joined and self._is_after_joined:
                new = self._joined[token_id]
            self._is_after_joined = is_joined
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._shown = self._decode(self._window)
        elif is_full:
            del self._window[self._num_context :]  # these tokens have no text
        return new


def try_each(
    token_ids: Sequence[int], try_token: Callable[[int], str], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """Return what `try_token` says of all tokens but the first, and `decode`, which is called last, of that one."""
    first = token_ids[0]
    texts = {token_id: try_token(token_id) for token_id in {*token_ids} - {first}}
    texts[first] = decode([first])
    return [texts[token_id] for token_id in token_ids]


def _find_context(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> tuple[list[int], str]:
    """Return the last few tokens of a prompt and their text, which is "" only if all of the prompt has none.

    There are more of them where they begin within a character.
    """
    num_tokens = CONTEXT
    while True:
        last = [*prompt[-num_tokens:]]
        text = decode(last) if last else ""
        is_cut = REPLACEMENT in text and num_tokens < WINDOW
        if len(last) == len(prompt) or (text and not is_cut):
            return last, text
        num_tokens *= 4


def count_shown(shown: str, text: str) -> int:
    """Return how much of `text` is in `shown`, whose last replacement characters may have become a character."""
    count = min(len(shown), len(text))
    while count and shown[count - 1] == REPLACEMENT != text[count - 1]:
        count -= 1
    return count
