"""Text from tokens as they come: equal in the end to decoding at once, and never more than is certain."""

from pathlib import Path
from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import tiny_model_path
from nanoinfer.text.detokenizer import (
    WINDOW,
    ByteDetokenizer,
    CompletionText,
    TokenBytes,
    WindowDetokenizer,
    bytes_of_token,
)
from nanoinfer.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import save_tokenizer

TINY = Tokenizer(tiny_model_path())
NUM_TOKENS = 1024  # more ids than the tokenizer knows, as a padded vocabulary has
texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)


def split(items: list, seed: int) -> list[list]:  # type: ignore[type-arg]
    """Cut a list at random places."""
    random = Random(seed)
    cuts = sorted(random.choices(range(len(items) + 1), k=random.randint(0, len(items))))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def token_of_bytes(data: bytes) -> int:
    """The tiny tokenizer has a token for each single byte; its merges are not wanted here."""
    return next(token_id for token_id in range(NUM_TOKENS) if TINY.detokenizer()._bytes[token_id] == data)  # type: ignore[attr-defined]


def ids_of_bytes(data: bytes) -> list[int]:
    return [BYTE_IDS[byte] for byte in data]


BYTE_IDS = [token_of_bytes(bytes([byte])) for byte in range(256)]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(token_ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=120), seed=st.integers(0, 2**32))
def test_random_tokens_in_random_pieces_give_the_text_of_all_at_once(
    skip_special_tokens: bool, token_ids: list[int], seed: int
) -> None:
    """Random tokens hold broken characters as well as whole ones."""
    expected = TINY.decode(token_ids, skip_special_tokens)
    for detokenizer in (
        TINY.detokenizer(skip_special_tokens),
        WindowDetokenizer(lambda ids: TINY.decode(ids, skip_special_tokens)),
    ):
        pieces = [detokenizer.decode(piece) for piece in split(token_ids, seed)]
        assert "".join(pieces) + detokenizer.decode([], final=True) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=texts, seed=st.integers(0, 2**32))
def test_any_unicode_text_cut_at_any_byte_comes_back_whole_and_no_character_in_halves(text: str, seed: int) -> None:
    detokenizer, shown = TINY.detokenizer(), ""
    for piece in split(ids_of_bytes(text.encode()), seed):
        shown += detokenizer.decode(piece)
        assert text.startswith(shown)
    assert shown == text, "nothing is left for the end"


def test_a_character_is_shown_with_its_last_byte() -> None:
    detokenizer = TINY.detokenizer()
    assert [detokenizer.decode([token_id]) for token_id in ids_of_bytes("é🙂".encode())] == ["", "é", "", "", "", "🙂"]


def test_what_is_no_character_is_replaced_as_soon_as_that_is_certain() -> None:
    detokenizer = TINY.detokenizer()
    pieces = [detokenizer.decode(ids_of_bytes(data)) for data in (b"\xf0", b"\x9f", b"a", b"\xe2")]
    assert pieces == ["", "", "\ufffda", ""]
    assert detokenizer.decode([], final=True) == "\ufffd"


def test_an_id_that_the_tokenizer_does_not_know_has_no_text() -> None:
    token_bytes = TokenBytes({0: "a"}.get)
    assert ByteDetokenizer(token_bytes).decode([0, 1, 0]) == "aa"


def test_a_token_is_bytes_or_else_plain_text() -> None:
    assert bytes_of_token("Ġa") == b" a"
    assert bytes_of_token("Ċ") == b"\n"
    assert bytes_of_token("ÿĀ") == b"\xff\x00"
    assert bytes_of_token("<終>") == "<終>".encode()


def test_a_text_without_one_whole_character_costs_no_more_than_others() -> None:
    detokenizer = WindowDetokenizer(TINY.decode)
    token_ids = ids_of_bytes(bytes([0x9F]) * 5 * WINDOW)
    shown = "".join([detokenizer.decode([token_id]) for token_id in token_ids])
    assert shown + detokenizer.decode([], final=True) == "\ufffd" * 5 * WINDOW
    assert len(detokenizer._window) <= WINDOW


def test_a_tokenizer_of_words_gets_its_spaces_right_however_long_the_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    words = Tokenizer(tmp_path)
    token_ids = Random(0).choices(range(7), k=5 * WINDOW)
    detokenizer = words.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join([detokenizer.decode([token_id]) for token_id in token_ids]) == words.decode(token_ids)
    assert len(detokenizer._window) <= WINDOW, "the cost of a token does not grow"


# --- stop strings ---


def show(text: str, *stop: str, include_stop: bool = False, seed: int | None = None) -> tuple[list[str], str | None]:
    """What is shown after each piece of `text` (bytes one by one, or cut by `seed`), and the stop string met."""
    token_ids = ids_of_bytes(text.encode())
    completion = CompletionText(TINY.detokenizer(), stop, include_stop)
    shown = []
    for piece in [[i] for i in token_ids] if seed is None else split(token_ids, seed):
        completion.extend(piece)
        shown.append(completion.take())
    completion.extend([], final=True)
    assert str(completion) == "".join(shown) + completion.take()
    return [*shown, str(completion)], completion.stop_string


def reference(text: str, stop: list[str], include_stop: bool) -> tuple[str, str | None]:
    """One character after the other, until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        met = [string for string in stop if text[:end].endswith(string)]
        if met:
            longest = max(met, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def test_text_is_held_back_while_it_may_become_a_stop_string() -> None:
    assert show("a\n\nb\n", "\n\nQ") == (["a", "", "", "\n\nb", "", "a\n\nb\n"], None)


def test_a_stop_string_across_tokens_is_cut_exactly_and_nothing_after_it_is_shown() -> None:
    assert show("one END two", "END") == (["o", "n", "e", " ", *[""] * 7, "one "], "END")


def test_a_stop_string_can_be_kept() -> None:
    assert show("one END two", "END", include_stop=True)[0][-1] == "one END"


def test_the_stop_string_that_is_complete_first_counts_and_of_equals_the_longest() -> None:
    assert show("abcd", "abcd", "bc", seed=0)[1] == "bc"
    assert show("abcd", "bc", "abc")[1] == "abc"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    early=st.text(alphabet="ab", max_size=12),
    late=st.text(alphabet="ab", max_size=12),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_counts_from_the_token_on_that_may_complete_it(early: str, late: str, stop: list[str]) -> None:
    completion = CompletionText(TINY.detokenizer(), stop)
    for character in early:
        completion.extend(ids_of_bytes(character.encode()), may_stop=False)
    assert completion.stop_string is None
    for character in late:
        completion.extend(ids_of_bytes(character.encode()))
    completion.extend([], final=True)
    text = early + late
    ends = [end for end in range(len(early) + 1, len(text) + 1) if text[:end].endswith(tuple(stop))]
    met = max((string for string in stop if text[: ends[0]].endswith(string)), key=len) if ends else None
    assert completion.stop_string == met
    assert str(completion) == (text[: ends[0] - len(met)] if met else text)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="abé", max_size=30),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    include_stop=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_stop_strings_are_found_whatever_the_token_boundaries(
    text: str, stop: list[str], include_stop: bool, seed: int
) -> None:
    expected = reference(text, stop, include_stop)
    for pieces in (seed, None):
        shown, met = show(text, *stop, include_stop=include_stop, seed=pieces)
        assert (shown[-1], met) == expected
        assert expected[0].startswith("".join(shown[:-1])), "nothing shown is taken back"


@pytest.fixture(scope="module")
def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's and Gemma's: a token for each byte where there is none for the text."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁end": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer.decoder = tokenizers.decoders.Sequence(parts)
    return tokenizer


@pytest.mark.parametrize("text", ["héllo 中文 🙂 x", "中文" * 100, "🙂é中a" * 40, "a" * 200, "é"])
@pytest.mark.parametrize("piece", [1, 3, 50])
def test_characters_of_byte_tokens_come_whole_and_none_is_lost(
    byte_fallback: tokenizers.Tokenizer, text: str, piece: int
) -> None:
    ids = [257, *(byte + 1 for byte in text.encode()), 257]
    detokenizer = WindowDetokenizer(byte_fallback.decode)
    parts = [detokenizer.decode(ids[start : start + piece]) for start in range(0, len(ids), piece)]
    assert "".join(parts) + detokenizer.decode([], final=True) == f" end{text} end" == byte_fallback.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def test_bytes_that_are_no_character_are_not_held_back_for_ever(byte_fallback: tokenizers.Tokenizer) -> None:
    detokenizer = WindowDetokenizer(byte_fallback.decode)
    text = "".join(detokenizer.decode([0xFF + 1]) for _ in range(100))
    assert len(text) > 50
    assert set(text + detokenizer.decode([], final=True)) == {"\ufffd"}


@pytest.mark.parametrize("count", range(8, 20))
def test_what_follows_bytes_that_are_no_character_is_not_lost(byte_fallback: tokenizers.Tokenizer, count: int) -> None:
    ids = [257, *(byte + 1 for byte in b"\xff" + "中".encode() * count), *[257] * 4]
    detokenizer = WindowDetokenizer(byte_fallback.decode)
    text = "".join([detokenizer.decode([token_id]) for token_id in ids]) + detokenizer.decode([], final=True)
    assert text.endswith(" end" * 4)
