"""allowed_token_ids and bad_words: what they leave, and after which tokens."""

from typing import Any

import numpy as np
import pytest

from nanoinfer import RequestError, SamplingParams
from nanoinfer.constraints import token_sets
from nanoinfer.constraints.constraints import Constraints
from tests.constraints.helpers import EOS, VOCAB_SIZE, allowed, encode, ids_of, new_constraints, next_ids, start


def test_sets_are_bits_also_where_the_vocabulary_ends_within_a_word() -> None:
    row = token_sets.all_tokens(70)
    assert len(row) == 3
    assert ids_of(row) == {*range(70)}
    token_sets.remove(row, [0, 31, 63, 69])
    assert ids_of(row) == {*range(70)} - {0, 31, 63, 69}
    token_sets.add(row, [31])
    assert ids_of(row) == {*range(70)} - {0, 63, 69}
    assert ids_of(token_sets.set_of([5, 64], 70)) == {5, 64}


def test_rows_of_several_sets_change_at_once_and_those_that_are_empty_are_found() -> None:
    vocab_size = 32 * (token_sets.NUM_FIRST_WORDS + 2)
    last = vocab_size - 1
    sets = np.stack([token_sets.set_of(ids, vocab_size) for ids in ([0, 31], [31, last], [31], [last], [])])
    token_sets.remove(sets, [31, 5], rows=[1, 2])
    assert [*map(ids_of, sets)] == [{0, 31}, {last}, set(), {last}, set()]
    assert token_sets.find_empty(sets, [4, 3, 2, 1, 0]) == [4, 2]
    token_sets.add(sets, [5, last], rows=[4, 2])
    assert [*map(ids_of, sets)] == [{0, 31}, {last}, {5, last}, {last}, {5, last}]
    assert token_sets.find_empty(sets, []) == []


def test_allowed_token_ids_are_all_that_may_come_and_follow_no_token() -> None:
    constraints = new_constraints()
    constraint = start(constraints, allowed_token_ids=[5, 1000, EOS])
    assert next_ids(constraints, constraint) == {5, 1000, EOS}
    assert not constraint.follows_tokens
    assert not constraint.append(5)
    masks = constraints.masks([None, constraint])
    assert masks.grammars is None
    assert masks.token_sets is not None
    assert masks.token_sets.batch_indices == [1]


def test_a_word_of_one_token_is_forbidden_everywhere_and_follows_no_token() -> None:
    constraints = new_constraints()
    [alone], [within] = encode("a"), encode(" a")
    constraint = start(constraints, bad_words=["a"])
    assert next_ids(constraints, constraint) == {*range(VOCAB_SIZE)} - {alone, within}
    assert not constraint.follows_tokens


def test_the_last_token_of_a_word_is_forbidden_after_the_others() -> None:
    constraints = new_constraints()
    word = encode("xyz")
    assert len(word) > 1, "the word has several tokens"
    constraint = start(constraints, bad_words=["xyz"])
    assert constraint.follows_tokens
    everything = {*range(VOCAB_SIZE)}
    assert next_ids(constraints, constraint) == everything
    for token_id in [word[0], *word[:-1]]:
        assert next_ids(constraints, constraint) == everything
        constraint.append(token_id)
    assert next_ids(constraints, constraint) == everything - {word[-1]}
    constraint.append(5)
    assert next_ids(constraints, constraint) == everything


def test_a_word_is_forbidden_with_a_space_before_it_where_that_makes_another_token() -> None:
    """Tokens of a tokenizer that splits off the space, as some do, are those of the word alone."""

    class FakeTokenizer:
        def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
            assert not add_special_tokens
            known = {"no": [1], " no": [2], "never mind": [3, 4], " never mind": [5, 4], "x": [6], " x": [7, 6]}
            return [known[text] for text in texts]

    tokenizer: Any = FakeTokenizer()
    found = token_sets.make_token_set(tokenizer, 10, None, ["no", " never mind", "x"])
    assert ids_of(found.always) == {*range(10)} - {1, 2, 6}
    assert found.endings == {3: [([3], 4)], 5: [([5], 4)]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids has 1024, outside the vocabulary; ids are 0 to 1023"),
        ({"allowed_token_ids": encode("a"), "bad_words": ["a"]}, "leave no token; allow more"),
    ],
)
def test_mistakes_are_named_before_anything_is_queued(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        start(new_constraints(), **options)


def test_bad_words_need_a_tokenizer_and_allowed_token_ids_do_not() -> None:
    constraints = Constraints(None, 10, frozenset())
    with pytest.raises(RequestError, match=r"bad_words=\['no'\] need a tokenizer, and this model has none"):
        constraints.compile([SamplingParams(bad_words=["no"])])
    assert constraints.compile([SamplingParams(allowed_token_ids=[1])]) != [None]


def test_a_sample_that_words_leave_no_token_ends_with_an_error_and_others_go_on() -> None:
    constraints = new_constraints()
    one, again = encode("~~")
    assert one == again
    stuck, other = start(constraints, allowed_token_ids=[one], bad_words=["~~"]), start(constraints, bad_words=["~~"])
    stuck.append(one)
    other.append(one)
    masks = constraints.masks([stuck, other])
    assert allowed(masks, 0) == set()
    assert stuck.error == (
        "no token may come after 1 tokens: allowed_token_ids and bad_words leave none; allow more of them"
    )
    assert allowed(masks, 1) == {*range(VOCAB_SIZE)} - {one}
    assert other.error is None
    assert next_ids(constraints, stuck) == set(), "it stays so"
