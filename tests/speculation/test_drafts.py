"""Drafts are what texts have gone on with, and a copy survives what a rewriter changes."""

import doctest
from array import array
from collections import Counter
from random import Random
from typing import Any

import pytest

from nanoinfer.bench.rewriting import TEXTS
from nanoinfer.speculation import drafts as drafts_module
from nanoinfer.speculation.drafts import MIN_MATCH, EarlierAnswers, TextDrafts
from nanoinfer.speculation.text_index import TextIndex, num_right
from nanoinfer.speculative_config import SpeculativeOptions, as_speculative_config

NO_ANSWERS = EarlierAnswers(0)


def options_of(method: str = "ngram", most: int = 4, **others: Any) -> SpeculativeOptions:
    config = as_speculative_config({"method": method, "num_speculative_tokens": most, **others})
    assert config is not None
    return SpeculativeOptions(**config)


def drafts_after(source: list[int], typed: list[int], most: int = 4, **others: Any) -> list[int]:
    """What is drafted after a source, and typed tokens that come one by one."""
    text = array("i", source)
    drafts = TextDrafts(options_of(most=most, **{"prompt_lookup_min": 2, **others}), text, NO_ANSWERS)
    for token_id in typed:
        drafts.draft(most)
        text.append(token_id)
        drafts.follow()
    return drafts.draft(most)


def test_the_example_in_the_docstring_is_right() -> None:
    results = doctest.testmod(drafts_module)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_index_finds_all_places_of_the_last_tokens_the_newest_first(size: int) -> None:
    rng, tokens = Random(0), array("i")
    index = TextIndex(tokens, size)
    for _ in range(60):
        tokens.extend(rng.randrange(3) for _ in range(rng.randint(0, 4)))
        index.extend()
        last = tokens[-size:]
        places = [place for place in range(size, len(tokens)) if tokens[place - size : place] == last]
        assert index.places(index.key(tokens), 1000) == (places[::-1] if len(tokens) >= size else [])
        assert index.places(index.key(tokens), 2) == index.places(index.key(tokens), 1000)[:2]


def test_ngrams_go_on_from_the_longest_match() -> None:
    source = [1, 2, 3, 4, 5, 9, 9, 2, 3, 4, 6, 9, 9, 1, 2, 3, 4]
    options = options_of(prompt_lookup_min=2, prompt_lookup_max=4)
    assert TextDrafts(options, array("i", source), NO_ANSWERS).draft(3) == [5, 9, 9]
    options = options_of(prompt_lookup_min=2, prompt_lookup_max=3)  # both match three tokens, and one is newer
    assert TextDrafts(options, array("i", source), NO_ANSWERS).draft(3) == [6, 9, 9]
    options = options_of(prompt_lookup_min=5)
    assert TextDrafts(options, array("i", source), NO_ANSWERS).draft(3) == []


def test_a_text_that_repeats_its_end_is_drafted_beyond_it() -> None:
    assert drafts_after([7, 8, 9, 7, 8, 9], [], most=8) == [7, 8, 9, 7, 8, 9, 7, 8]


SOURCE = [*range(100, 120)]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("run", [[7], [7, 8], [7, 8, 9]], ids=str)
def test_a_text_is_looked_up_again_where_a_run_has_ended(run: list[int], method: str) -> None:
    assert drafts_after(SOURCE + 12 * run, [5, 101, 102, 103], most=2, method=method) == [104, 105]


@pytest.mark.parametrize(
    ("typed", "drafted"),
    [
        ([102, 103, 104], [105, 106, 107, 108]),
        ([102, 103, 104, 5], [106, 107, 108, 109]),  # in place of 105
        ([102, 103, 104, 5, 106], [107, 108, 109, 110]),
        ([102, 103, 104, 5, 105], [106, 107, 108, 109]),  # before 105
        ([102, 103, 104, 106], [107, 108, 109, 110]),  # without 105
        ([102, 103, 104, 5, 107], [108, 109, 110, 111]),  # in place of 105 and 106
        ([102, 103, 104, 5, 6, 7], []),
        ([102, 103, 104, 5, 6, 7, 109], [110, 111, 112, 113]),  # in place of 105 to 108: resumed by one token
        ([102, 103, 104, 5, 6, 7, 101], []),  # which does not stand further on
        ([102, 103, 104, *range(40), 109], []),  # nor after so long
    ],
)
def test_a_copy_survives_a_change(typed: list[int], drafted: list[int]) -> None:
    assert drafts_after(SOURCE, typed) == drafted


def spec_of_suffix(options: SpeculativeOptions, texts: list[list[int]], text: list[int]) -> float:
    """The best score of any draft by suffix decoding: from all places in all texts, whatever their number."""
    best = 0.0
    for tokens in texts:
        for length in range(MIN_MATCH, options.suffix_decoding_max_tree_depth + 1):
            if length > len(text):
                break
            last = text[-length:]
            places = [at for at in range(len(tokens) - 1, length - 1, -1) if tokens[at - length : at] == last]
            probability, score = 1.0, 0.0
            for _ in range(min(options.num_speculative_tokens, int(length * options.suffix_decoding_max_spec_factor))):
                nexts = Counter(tokens[at] for at in places if at < len(tokens) and tokens[at] >= 0)
                if not nexts:
                    break
                token_id, count = nexts.most_common(1)[0]
                probability *= count / len(places)
                if probability < options.suffix_decoding_min_token_prob:
                    break
                score += probability
                places = [at + 1 for at in places if at < len(tokens) and tokens[at] == token_id]
            best = max(best, score)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_suffixes_draft_what_the_published_method_does(seed: int) -> None:
    """The draft with the largest sum of probabilities, in the text and in answers, as long as places are few."""
    rng = Random(seed)
    words = [[rng.randrange(40) for _ in range(rng.randint(2, 7))] for _ in range(8)]

    def draw() -> list[int]:
        return [token_id for _ in range(12) for token_id in rng.choice(words)]

    answers, options = EarlierAnswers(100), options_of("suffix", most=8)
    texts = [draw() for _ in range(4)]
    for answer in texts:
        answers.add(array("i", answer))
    [whole] = [[token_id for answer in texts for token_id in [*answer, -1]]]
    text = [1000, 1001, *draw()[:7]]  # with a copy of its own end, the draft could be longer than what there is to copy
    drafts = TextDrafts(options, array("i", text), answers)
    drafts._look_up(8)
    score = 0.0
    if drafts._places:
        score = drafts._draft_from(drafts._source, drafts._places, drafts._max_proposals(8, drafts._num_trusted)).score
    assert score == pytest.approx(spec_of_suffix(options, [text, whole], text), abs=1e-9)


def test_an_answer_is_found_in_later_requests_and_does_not_run_into_the_next_one() -> None:
    answers = EarlierAnswers(10)
    answers.add(array("i", [1, 2, 3, 4, 5]))
    answers.add(array("i", [6, 7, 8]))
    options = options_of("suffix", most=8, suffix_decoding_max_spec_factor=4.0)
    assert TextDrafts(options, array("i", [1, 2, 3]), answers).draft(8) == [4, 5]


@pytest.mark.parametrize("most", [0, 1, 2, 7])
def test_no_more_answers_are_kept_than_asked_for(most: int) -> None:
    answers = EarlierAnswers(most)
    for number in range(20):
        answers.add(array("i", [number]))
        kept = [token_id for half in answers.halves for token_id in half.tokens if token_id >= 0]
        assert len(kept) <= most
        assert most == 0 or number in kept


def test_answers_are_bounded_in_tokens() -> None:
    answers = EarlierAnswers(1000, max_tokens=100)
    for number in range(50):
        answers.add(array("i", [number] * 30))
        assert sum(len(half.tokens) for half in answers.halves) <= 100
    answers.add(array("i", [*range(1000)]))
    assert sum(len(half.tokens) for half in answers.halves) <= 102  # the ends of answers aside


@pytest.mark.parametrize(
    ("text", "method", "least"),
    [("rewriting", "suffix", 2.9), ("rewriting", "ngram", 2.9), ("every fifth token new", "suffix", 4.5)],
)
def test_rewriting_takes_a_third_of_the_steps(text: str, method: str, least: float) -> None:
    """As long as all proposals are computed: spans of 24 copied tokens and 6 new ones, after a prompt of 500."""
    rng, num_steps = Random(1), 0
    for _ in range(5):
        prompt = [rng.randrange(150_000) for _ in range(500)]
        tokens = TEXTS[text](rng, prompt, 150_000)
        answer = [next(tokens) for _ in range(1000)]
        known = array("i", prompt)
        drafts = TextDrafts(options_of(method, most=8), known, NO_ANSWERS)
        while len(known) < 1500:
            done = len(known) - 500
            draft = drafts.draft(8)
            known.extend(answer[done : done + num_right(draft, answer[done:]) + 1])
            drafts.follow()
            num_steps += 1
    assert 5 * 1000 / num_steps > least


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_was_looked_ahead_is_what_would_be_drafted(method: str) -> None:
    """Copies of the prompt, of the text's own end and of an earlier answer; a step may have fewer proposals."""
    rng, num_ahead, num_steps = Random(3), 0, 0
    options, answers = options_of(method, most=8, prompt_lookup_min=2), EarlierAnswers(10)
    answers.add(array("i", range(40, 70)))
    for _ in range(40):
        prompt = [rng.randrange(30) for _ in range(60)]
        answer = [*prompt[rng.randrange(30) :], *range(42, 68), *prompt[5:20] * 3, 7, *prompt[rng.randrange(30) :]]
        known, known_ahead = array("i", prompt), array("i", prompt)
        one, other = TextDrafts(options, known, answers), TextDrafts(options, known_ahead, answers)
        draft = one.draft(8)
        assert other.draft(8) == draft
        while answer:
            proposed = draft[: rng.randint(0, 8)]
            ahead = other.look_ahead(len(proposed), 8)
            came = answer[: num_right(proposed, answer) + 1]
            del answer[: len(came)]
            known.extend(came)
            known_ahead.extend(came)
            one.follow()
            draft = one.draft(8)
            if ahead is not None and ahead.expected == array("i", came):
                assert other.follow_ahead(ahead) == draft
                num_ahead += 1
            else:
                other.follow()
                assert other.draft(8) == draft
            assert other.num_before == one.num_before
            num_steps += 1
    assert num_ahead > num_steps // 5
