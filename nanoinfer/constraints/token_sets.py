"""Sets of token ids, one bit for each token: what allowed_token_ids and bad_words leave."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import RequestError
from nanoinfer.integers import ceil_div
from nanoinfer.text.tokenizer import Tokenizer

Bits = NDArray[np.int32]  # (num_words,): token i is bit i % 32 of word i // 32
NUM_FIRST_WORDS = 64  # where a set that is not empty almost always has a token


def new_bits(shape: tuple[int, int]) -> Bits:
    """Allocate several sets, (num_sets, num_words), not yet written."""
    return np.empty(shape, np.int32)


def all_tokens(vocab_size: int) -> Bits:
    """Return the set of all tokens; bits past the last are 0."""
    return set_of(slice(vocab_size), vocab_size)


def set_of(token_ids: list[int] | slice, vocab_size: int) -> Bits:
    """Return the set of these tokens of a vocabulary."""
    chosen = np.zeros(ceil_div(vocab_size, 32) * 32, bool)
    chosen[token_ids] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def add(bits: Bits, token_ids: Iterable[int], rows: Any = ...) -> None:
    """Add tokens to a set, or to these rows of several sets, (num_sets, num_words)."""
    words = bits.view(np.uint32)
    for token_id in token_ids:
        words[rows, token_id >> 5] |= 1 << (token_id & 31)


def remove(bits: Bits, token_ids: Iterable[int], rows: Any = ...) -> None:
    """Remove tokens from a set, or from these rows of several."""
    words = bits.view(np.uint32)
    for token_id in token_ids:
        words[rows, token_id >> 5] &= 0xFFFFFFFF ^ 1 << (token_id & 31)


def has(bits: Bits, token_id: int) -> bool:
    """Return whether a set has a token."""
    return token_id < 32 * len(bits) and bool(bits[token_id >> 5] >> (token_id & 31) & 1)


def find_empty(bits: Bits, rows: list[int]) -> list[int]:
    """Return which of these rows of several sets have no token."""
    num_found = np.count_nonzero(bits[rows, :NUM_FIRST_WORDS], axis=1)
    return [row for row, count in zip(rows, num_found, strict=True) if not count and not bits[row].any()]


@dataclass(frozen=True)
class TokenSet:
    """Holds the tokens that allowed_token_ids and bad_words leave of the vocabulary.

    always: what they leave wherever the text is.
    endings: bad words of several tokens, by their last token but one: (all tokens but the last; the last token, which
        is forbidden after these).
    """

    always: Bits
    endings: dict[int, list[tuple[list[int], int]]]

    def write(self, row: Bits, token_ids: Sequence[int]) -> None:
        """Write what is left after the completion's `token_ids`."""
        row[:] = self.always
        for before, last in self.endings.get(token_ids[-1], ()) if token_ids else ():
            if token_ids[-len(before) :] == before:
                remove(row, [last])


def make_token_set(
    tokenizer: Tokenizer | None, vocab_size: int, allowed_token_ids: Sequence[int] | None, bad_words: Sequence[str]
) -> TokenSet:
    """Return the set for a request's options. Raises RequestError for ids out of range, and where nothing is left."""
    always = all_tokens(vocab_size)
    if allowed_token_ids is not None:
        outside = [token_id for token_id in allowed_token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise RequestError(
                f"allowed_token_ids has {outside[0]}, outside the vocabulary; ids are 0 to {vocab_size - 1}"
            )
        always = set_of([*allowed_token_ids], vocab_size)
    endings: dict[int, list[tuple[list[int], int]]] = {}
    for *before, last in _encode_words(bad_words, tokenizer):
        if max(last, *before, 0) >= vocab_size:  # the model cannot write it
            continue
        if before:
            endings.setdefault(before[-1], []).append((before, last))
        else:
            remove(always, [last])
    if not always.any():
        raise RequestError("allowed_token_ids and bad_words leave no token; allow more")
    return TokenSet(always, endings)


def _encode_words(bad_words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the tokens of each word at the beginning of a text, and within it.

    As in vLLM, the word within a text counts only where it has as many tokens, and another first one: else its first
    token is a space, and what follows is what stands at the beginning.
    """
    if bad_words and tokenizer is None:
        raise RequestError(f"bad_words={list(bad_words)} need a tokenizer, and this model has none; leave them out")
    words = []
    for word in bad_words:
        assert tokenizer is not None, "checked above"
        first, within = tokenizer.encode([word.lstrip(), f" {word.lstrip()}"], add_special_tokens=False)
        if not first:
            raise RequestError(f"bad_words has {word!r}, which has no token; leave it out")
        words.append(first)
        if len(within) == len(first) and within[0] != first[0]:
            words.append(within)
    return words
