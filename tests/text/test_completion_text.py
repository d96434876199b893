"""Where the text of a completion ends by a stop string, and what is shown of it before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.text.completion_text import CompletionText
from tests.text.test_detokenizer import TINY, ids_of_bytes, split


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
            return text[: end if include_stop else end - len(met[0])], met[0]
    return text, None


def test_text_is_held_back_while_it_may_become_a_stop_string() -> None:
    assert show("a\n\nb\n", "\n\nQ") == (["a", "", "", "\n\nb", "", "a\n\nb\n"], None)


def test_the_beginning_of_a_stop_string_of_a_million_characters_is_held_back() -> None:
    completion = CompletionText(TINY.detokenizer(), ["ab" * 500_000])
    completion.extend(ids_of_bytes(b"xaba"))
    assert completion.take() == "x"
    completion.extend(ids_of_bytes(b"c"))
    assert completion.take() == "abac"


def test_a_stop_string_across_tokens_is_cut_exactly_and_nothing_after_it_is_shown() -> None:
    assert show("one END two", "END") == (["o", "n", "e", " ", *[""] * 7, "one "], "END")


def test_the_stop_string_that_is_complete_first_counts_and_of_equals_the_first_in_the_list() -> None:
    assert show("abcd", "abcd", "bc", seed=0)[1] == "bc"
    assert show("abcd", "bc", "abc")[1] == "bc"
    assert show("abcd", "abc", "bc")[1] == "abc"


@pytest.mark.parametrize(
    ("stop", "text", "met"),
    [(["ort", "sh"], " sh", "ort"), (["sh", "ort"], " ", "sh"), (["no", "short", "h"], " ", "short")],
)
def test_of_stop_strings_that_one_token_completes_the_first_in_the_list_counts(
    stop: list[str], text: str, met: str
) -> None:
    [token_id] = TINY.encode([" short"])[0]
    completion = CompletionText(TINY.detokenizer(), stop)
    completion.extend([*ids_of_bytes(b"so"), token_id])
    assert (str(completion), completion.stop_string) == (f"so{text}", met)


@settings(max_examples=120, deadline=None, derandomize=True)
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
    met = next(string for string in stop if text[: ends[0]].endswith(string)) if ends else None
    assert completion.stop_string == met
    assert str(completion) == (text[: ends[0] - len(met)] if met else text)


@settings(max_examples=120, deadline=None, derandomize=True)
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
