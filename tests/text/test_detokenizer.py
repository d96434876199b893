"""Text from tokens as they come: in the end the tokenizer's own, however the tokens come, and nothing is taken back."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from nanoinfer import tiny_model_path
from nanoinfer.text.completion_text import CompletionText
from nanoinfer.text.detokenizer import BYTE_OF_CHARACTER, WINDOW, Detokenizer, WindowDetokenizer
from nanoinfer.text.tokenizer import Tokenizer

TINY = Tokenizer(tiny_model_path())
BYTE_IDS = {byte: TINY.hf.convert_tokens_to_ids(token) for token, byte in BYTE_OF_CHARACTER.items()}
texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)


def split(items: list, seed: int) -> list[list]:  # type: ignore[type-arg]
    """Cut a list at random places."""
    random = Random(seed)
    cuts = sorted(random.choices(range(len(items) + 1), k=random.randint(0, len(items))))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def ids_of_bytes(data: bytes) -> list[int]:
    return [BYTE_IDS[byte] for byte in data]


def stream(detokenizer: Detokenizer, token_ids: list[int], seed: int | None = None) -> str:
    """The joined text of the tokens, given one by one, or as `seed` cuts them."""
    pieces = [[token_id] for token_id in token_ids] if seed is None else split(token_ids, seed)
    return "".join([detokenizer.decode(piece) for piece in pieces]) + detokenizer.decode([], final=True)


# --- all kinds of tokenizers ---

SPECIAL, BYTES, WORDS = 0, 1, 257  # ids of "<s>", of the byte 0, and of the first word
NUM_TOKENS = WORDS + 9  # two more than there are
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
KINDS = {
    "byte fallback, as Llama 2": decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
    "byte fallback, as Gemma": decoders.Sequence([REPLACE, FALLBACK, FUSE]),
    "byte fallback, of a kind not known": decoders.Sequence([FALLBACK, REPLACE, FUSE]),
    "metaspace": decoders.Metaspace(),
    "word pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(suffix="</w>"),
    "words": None,
}


def with_decoder(decoder: decoders.Decoder | None, folder: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    words = ["▁the", "▁", "##s", ",", "n't", "é", "end</w>"]
    vocab = {token: token_id for token_id, token in enumerate(["<s>", *BYTE_TOKENS, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_decoder(KINDS[request.param], tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_decoder(KINDS["byte fallback, as Llama 2"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def unknown_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Detokenizer]:
    tokenizer = with_decoder(KINDS["byte fallback, of a kind not known"], tmp_path_factory.mktemp("unknown"))
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    return tokenizer.detokenizer


def fallback_ids(data: bytes) -> list[int]:
    return [BYTES + byte for byte in data]


word_ids = st.sampled_from([SPECIAL, *range(WORDS, NUM_TOKENS)]).map(lambda token_id: [token_id])
characters = st.sampled_from(["\n", " ", "é", "中", "🙂"]).map(lambda text: fallback_ids(text.encode()))
# Half a character between words; where it stands beside a whole one, decoders replace both (see the next test).
half_characters = st.sampled_from([b"\xf0\x9f", b"\xe4", b"\xff", b"\x80\x80"]).map(
    lambda data: [WORDS, *fallback_ids(data), WORDS]
)
completions = st.lists(word_ids | characters | half_characters, max_size=20).map(
    lambda parts: [*chain.from_iterable(parts)]
)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(token_ids=completions, ends_in_half=st.booleans(), seed=st.integers(0, 2**32))
def test_the_joined_text_is_the_tokenizers_own_however_the_tokens_come(
    tokenizer: Tokenizer, skip_special_tokens: bool, token_ids: list[int], ends_in_half: bool, seed: int
) -> None:
    token_ids = [*token_ids, WORDS, *fallback_ids(b"\xf0\x9f")] if ends_in_half else token_ids
    expected = tokenizer.hf.decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=False)
    assert stream(tokenizer.detokenizer(skip_special_tokens), token_ids) == expected
    assert stream(tokenizer.detokenizer(skip_special_tokens), token_ids, seed) == expected
    assert tokenizer.decode(token_ids, skip_special_tokens) == expected


def after_prompt(hf: Any, prompt: list[int], token_ids: list[int], skip_special_tokens: bool) -> str:
    """What transformers makes of prompt and completion, after what it makes of the prompt.

    A character that is half in the prompt shows as "\ufffd" there; where the completion has the rest, it has all of it.
    """
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    before, whole = hf.decode(prompt, **options), hf.decode(prompt + token_ids, **options)
    num_same = next((i for i, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), len(before))
    return str(whole[num_same:])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompt=completions, token_ids=completions, seed=st.integers(0, 2**32))
def test_after_a_prompt_the_text_is_what_the_tokenizer_adds_to_the_prompts(
    tokenizer: Tokenizer, skip_special_tokens: bool, prompt: list[int], token_ids: list[int], seed: int
) -> None:
    expected = after_prompt(tokenizer.hf, prompt, token_ids, skip_special_tokens)
    assert stream(tokenizer.detokenizer(skip_special_tokens, prompt=prompt), token_ids) == expected
    assert stream(tokenizer.detokenizer(skip_special_tokens, prompt=prompt), token_ids, seed) == expected


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 1023), max_size=12),
    token_ids=st.lists(st.integers(0, 1023) | st.integers(0, 255), max_size=40),
    seed=st.integers(0, 2**32),
)
def test_byte_level_text_after_any_prompt_is_what_the_tokenizer_adds_to_the_prompts(
    skip_special_tokens: bool, prompt: list[int], token_ids: list[int], seed: int
) -> None:
    expected = after_prompt(TINY.hf, prompt, token_ids, skip_special_tokens)
    assert stream(TINY.detokenizer(skip_special_tokens, prompt=prompt), token_ids, seed) == expected


@pytest.mark.parametrize("character", ["é", "中", "🙂"])
def test_a_character_that_begins_in_the_prompt_and_ends_in_the_completion_is_the_completions(
    tokenizer: Tokenizer, character: str
) -> None:
    for cut in range(1, len(character.encode())):
        first, last = fallback_ids(character.encode()[:cut]), fallback_ids(character.encode()[cut:])
        prompt, token_ids = [WORDS, *first], [*last, WORDS]
        text = stream(tokenizer.detokenizer(prompt=prompt), token_ids)
        assert text == after_prompt(tokenizer.hf, prompt, token_ids, skip_special_tokens=True)
        if "byte" in tokenizer.hf.backend_tokenizer.to_str().lower() and character in tokenizer.hf.decode(first + last):
            assert text == f"{character} the"
        lost = [WORDS]  # the character never ends, so its beginning is the prompt's
        text = stream(tokenizer.detokenizer(prompt=prompt), lost)
        assert text == after_prompt(tokenizer.hf, prompt, lost, skip_special_tokens=True)


@pytest.mark.parametrize("spaces", [True, False])
def test_a_special_token_after_one_that_ends_the_prompt_is_one_beside_another(tmp_path: Path, spaces: bool) -> None:
    tokenizer = with_decoder(KINDS["word pieces"], tmp_path)
    detokenizer = tokenizer.detokenizer(False, spaces, prompt=[WORDS, SPECIAL])
    assert stream(detokenizer, [SPECIAL, WORDS]) == (" <s> ▁the" if spaces else "<s> ▁the")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompt=completions, token_ids=completions, cut=st.integers(0, 5))
def test_the_texts_of_tokens_add_up_and_asking_for_others_changes_none(
    tokenizer: Tokenizer, prompt: list[int], token_ids: list[int], cut: int
) -> None:
    token_ids = token_ids[: len(token_ids) - cut]  # perhaps within a character
    texts = tokenizer.token_texts(prompt=prompt)
    found = []
    for token_id in token_ids:
        text, *others, same = texts.add_first([token_id, WORDS, SPECIAL, BYTES + 0xE4, token_id])
        assert (len(others), same) == (3, text)
        found.append(text)
    if token_ids:
        found[-1] = texts.end(token_ids[-1], found[-1])
    plain = [text for token_id, text in zip(token_ids, found, strict=True) if token_id != SPECIAL]
    at_end = "\ufffd" * sum(text.count("\ufffd") for i, text in zip(token_ids, found, strict=True) if i == SPECIAL)
    assert "".join(plain) + at_end == stream(tokenizer.detokenizer(prompt=prompt), token_ids)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    token_ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60),
    stop=st.sampled_from(["x", "▁the"]),
    seed=st.integers(0, 2**32),
)
def test_neither_the_cuts_nor_a_stop_string_that_never_comes_change_the_text(
    tokenizer: Tokenizer, token_ids: list[int], stop: str, seed: int
) -> None:
    """Even where bytes are no characters at all."""
    texts = []
    for stops, pieces in [
        ((), [token_ids]),
        ((), split(token_ids, seed)),
        ((f"never {stop}",), split(token_ids, seed)),
    ]:
        text = CompletionText(tokenizer.detokenizer(), stops)
        for piece in pieces:
            text.extend(piece)
        text.extend([], final=True)
        texts.append(str(text))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(token_ids=st.lists(st.integers(0, 1023), max_size=120), seed=st.integers(0, 2**32))
def test_byte_level_text_is_the_tokenizers_own_for_any_tokens(
    skip_special_tokens: bool, token_ids: list[int], seed: int
) -> None:
    """Random tokens hold broken characters as well as whole ones; some ids have no token, as in a padded vocabulary."""
    expected = TINY.hf.decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=False)
    assert stream(TINY.detokenizer(skip_special_tokens), token_ids, seed) == expected
    window = WindowDetokenizer(lambda ids: TINY.hf.decode(ids, skip_special_tokens))
    assert stream(window, token_ids, seed) == expected


def test_special_tokens_side_by_side_may_do_without_the_spaces_that_a_tokenizer_writes(tmp_path: Path) -> None:
    tokenizer = with_decoder(KINDS["word pieces"], tmp_path)
    token_ids = [WORDS, SPECIAL, SPECIAL, SPECIAL, WORDS, SPECIAL]
    assert tokenizer.hf.decode(token_ids) == "▁the <s> <s> <s> ▁the <s>"
    assert stream(tokenizer.detokenizer(False, spaces_between_special_tokens=False), token_ids) == (
        "▁the <s><s><s> ▁the <s>"
    )
    assert stream(tokenizer.detokenizer(False), token_ids) == "▁the <s> <s> <s> ▁the <s>"
    assert stream(tokenizer.detokenizer(True, spaces_between_special_tokens=False), token_ids) == "▁the ▁the"


def test_a_newline_before_half_a_character_stays(llama: Tokenizer) -> None:
    """The tokenizer itself replaces all bytes of such a run, also those that a stream has shown."""
    token_ids = [WORDS, *fallback_ids(b"\n\xf0\x9f")]
    assert llama.hf.decode(token_ids) == "the\ufffd\ufffd\ufffd"
    assert stream(llama.detokenizer(), token_ids) == llama.decode(token_ids) == "the\n\ufffd\ufffd"


def test_a_newline_token_is_shown_and_stops_at_once_and_only_the_first_space_is_stripped(llama: Tokenizer) -> None:
    detokenizer = llama.detokenizer()
    assert [detokenizer.decode([token_id]) for token_id in [WORDS, BYTES + 10, WORDS]] == ["the", "\n", " the"]
    text = CompletionText(llama.detokenizer(), ["\n"])
    text.extend([WORDS, BYTES + 10])
    assert (str(text), text.stop_string) == ("the", "\n")
    assert llama.decode([WORDS + 1, WORDS]) == " the"


def test_a_tokenizer_without_a_backend_in_rust_gives_its_own_text(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    byt5 = Tokenizer(tmp_path)
    token_ids = byt5.encode(["é 🙂"], add_special_tokens=False)[0]
    assert stream(byt5.detokenizer(), token_ids) == byt5.hf.decode(token_ids) == "é 🙂"
    assert stream(byt5.detokenizer(), token_ids[:-1]) == byt5.hf.decode(token_ids[:-1]) == "é "


# --- characters in pieces ---


@settings(max_examples=120, deadline=None, derandomize=True)
@given(text=texts, seed=st.integers(0, 2**32))
def test_any_unicode_text_cut_at_any_byte_comes_back_whole_and_no_character_in_halves(text: str, seed: int) -> None:
    detokenizer, shown = TINY.detokenizer(), ""
    for piece in split(ids_of_bytes(text.encode()), seed):
        shown += detokenizer.decode(piece)
        assert text.startswith(shown)
    assert shown == text, "nothing is left for the end"


def test_a_character_is_shown_with_its_last_byte_and_none_is_replaced_as_soon_as_that_is_certain() -> None:
    detokenizer = TINY.detokenizer()
    single = [bytes([byte]) for byte in "é🙂".encode()]
    pieces = [ids_of_bytes(data) for data in (*single, b"\xf0", b"\x9f", b"a", b"\xe2")]
    shown = [detokenizer.decode(piece) for piece in pieces]
    assert shown == ["", "é", "", "", "", "🙂", "", "", "\ufffda", ""]
    assert detokenizer.decode([], final=True) == "\ufffd"


@pytest.mark.parametrize("text", ["héllo 中文 🙂 x", "中文" * 100, "🙂é中a" * 40, "a" * 200, "é"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_tokenizer_of_a_kind_not_known_gives_whole_characters_and_loses_none(
    unknown_kind: Callable[[], Detokenizer], text: str, seed: int | None
) -> None:
    shown = stream(unknown_kind(), [WORDS, *fallback_ids(text.encode()), WORDS], seed)
    assert shown == f" the{text} the"


def test_bytes_that_are_no_character_are_not_held_back_for_ever(unknown_kind: Callable[[], Detokenizer]) -> None:
    detokenizer = unknown_kind()
    text = "".join([detokenizer.decode(fallback_ids(b"\xff")) for _ in range(5 * WINDOW)])
    assert len(text) >= 4 * WINDOW
    assert text + detokenizer.decode([], final=True) == "\ufffd" * 5 * WINDOW


@pytest.mark.parametrize("count", range(8, 20))
def test_what_follows_bytes_that_are_no_character_is_not_lost(
    unknown_kind: Callable[[], Detokenizer], count: int
) -> None:
    token_ids = [WORDS, *fallback_ids(b"\xff" + "中".encode() * count), *[WORDS] * 4]
    assert stream(unknown_kind(), token_ids).endswith(" the" * 4)


@pytest.mark.parametrize("token_id", [WORDS, SPECIAL, BYTES + 0xFF])
def test_a_token_costs_no_more_the_longer_the_text(token_id: int) -> None:
    sizes = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return "".join({WORDS: " the", SPECIAL: "", BYTES + 0xFF: "\ufffd"}[token_id] for token_id in token_ids)

    stream(WindowDetokenizer(decode), [token_id] * 10 * WINDOW)
    assert max(sizes) <= 2 * WINDOW
