"""Masks of tokens that follow proposals: each is the mask of a sample that has got the proposals before it."""

import random
from typing import Any

import numpy as np
import pytest

from nanoinfer import SamplingParams
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.structured_outputs import StructuredOutputsParams
from tests.constraints.helpers import EOS, VOCAB_SIZE, allowed, draw, encode, new_constraints, next_ids, start

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
[FIRST, *_] = encode("cat")


def same(ids: list[int], logits: Any) -> Any:
    return logits


OPTIONS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "[a-c]+( [0-9]+)*"}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"choice": ["cat", "category", "cat dog"]}},
    {"structured_outputs": {"regex": "[a-z ]*"}, "min_tokens": 4},
    {"structured_outputs": {"regex": "[a-z ]*"}, "stop_token_ids": [FIRST], "ignore_eos": True},
    {"structured_outputs": {"regex": "[a-z ]*"}, "bad_words": ["cat", "dog"]},
    {"structured_outputs": {"json_object": True}, "allowed_token_ids": [*range(700), EOS]},
    {"allowed_token_ids": [3, 4, 5, 700, EOS]},
    {"bad_words": ["xyz", "a", "the"]},
    {"bad_words": ["xyz"], "logits_processors": [same]},
]


def params_of(options: dict[str, Any]) -> SamplingParams:
    wanted = options.get("structured_outputs")
    structured = StructuredOutputsParams(**wanted) if wanted else None
    return SamplingParams(max_tokens=50, **{**options, "structured_outputs": structured})


def sample_after(constraints: Constraints, params: SamplingParams, token_ids: list[int]) -> Any:
    """A sample that has got these tokens, one by one."""
    [plan] = constraints.compile([params])
    assert plan is not None
    sample = plan.start()
    for token_id in token_ids:
        sample.append(token_id)
    return sample


def of_line(masks: TokenMasks, line: int) -> list[Any]:
    """All that masks say of one token: what grammars and sets allow, functions, and what these get."""
    found: list[Any] = []
    for part in (masks.grammars, masks.token_sets):
        places = [] if part is None else [place for place, index in enumerate(part.batch_indices) if index == line]
        assert len(places) < 2
        found.append([part.bits[place].tolist() for place in places] if part else [])
    return [*found, masks.functions.get(line)]


@pytest.mark.parametrize("num_tokens", [2, 4, 8])
def test_each_line_has_the_mask_of_a_sample_that_got_the_proposals_before_it(num_tokens: int) -> None:
    """Texts drawn step by step are proposed: right, or wrong at any place, in steps with samples of all kinds."""
    constraints, params = new_constraints(), [params_of(options) for options in OPTIONS * 2]
    texts = [tokens for tokens, _, _ in draw(constraints, params, seed=num_tokens, max_tokens=14)]
    rng, num_right, num_wrong = random.Random(num_tokens), 0, 0
    for begin in range(max(map(len, texts))):
        rows = [row for row, text in enumerate(texts) if begin <= len(text)]
        samples = [sample_after(constraints, params[row], texts[row][:begin]) for row in rows]
        proposals = [texts[row][begin:][: rng.randint(0, num_tokens - 1)] for row in rows]
        for proposed in proposals:
            if proposed and rng.random() < 0.5:
                proposed[rng.randrange(len(proposed))] = rng.choice([EOS, FIRST, rng.randrange(VOCAB_SIZE)])
        constraints_of_step = [None, *samples]
        masks = constraints.masks(constraints_of_step, [[1], *proposals], num_tokens)
        lines = {index for part in masks[:2] if part is not None for index in part.batch_indices}
        assert min(lines) >= num_tokens, "the first sample has no constraint"
        for place, (row, proposed) in enumerate(zip(rows, proposals, strict=True)):
            first = (1 + place) * num_tokens
            sample, ends = sample_after(constraints, params[row], texts[row][:begin]), False
            for token, proposal in enumerate([*proposed, None]):
                expected = constraints.masks([sample])
                assert of_line(masks, first + token) == of_line(expected, 0)
                assert sample.error is None
                if proposal is not None:
                    num_wrong += proposal not in allowed(expected)
                    num_right += proposal in allowed(expected)
                if proposal is None or proposal not in allowed(expected) or sample.append(proposal):
                    later = range(first + token + 1, first + num_tokens)
                    assert not lines.intersection(later), "what follows cannot count"
                    assert not masks.functions.keys() & {*later}
                    ends = True
                    break
            assert ends
            assert of_line(constraints.masks([samples[place]]), 0) == of_line(
                constraints.masks([sample_after(constraints, params[row], texts[row][:begin])]), 0
            ), "the sample itself has got none of it"
    assert min(num_right, num_wrong) > 10


def test_forced_tokens_are_those_that_masks_leave() -> None:
    """Asking for them changes no mask."""
    constraints, params = new_constraints(), [params_of(options) for options in OPTIONS]
    num_forced = 0
    for one, (text, _, _) in zip(params, draw(constraints, params, seed=3, max_tokens=20), strict=True):
        sample, unasked = sample_after(constraints, one, []), sample_after(constraints, one, [])
        for token_id in text:
            forced = [*sample.forced()]
            masks, expected = constraints.masks([sample]), constraints.masks([unasked])
            assert of_line(masks, 0) == of_line(expected, 0)
            assert not forced or allowed(masks) == {forced[0]}
            num_forced += len(forced)
            assert sample.append(token_id) == unasked.append(token_id)
    assert num_forced > 5


def test_masks_of_lines_come_in_memory_of_the_step() -> None:
    allocated: list[Any] = []

    def new_bits(shape: tuple[int, int]) -> Any:
        allocated.append(np.empty(shape, np.int32))
        return allocated[-1]

    constraints = new_constraints()
    constraints._new_bits = new_bits
    masks = constraints.masks([start(constraints, regex="[0-9]+", bad_words=["7"])], [encode("1")], 2)
    for part in masks[:2]:
        assert isinstance(part, RowMasks)
        assert any(part.bits is one for one in allocated)


def test_an_error_found_ahead_is_one_of_the_sample_when_it_has_come_there() -> None:
    constraints = new_constraints()
    [one], [two], [three] = encode("1"), encode("2"), encode("3")
    options: dict[str, Any] = {"regex": "1(23|3)", "allowed_token_ids": [one, two, three]}
    for text, proposed in (([one, two], [one, two, three]), ([one, three], [one, two, three])):
        sample, limited = start(constraints, **options), start(constraints, **{**options, "bad_words": ["23"]})
        masks = constraints.masks([sample, limited], [proposed] * 2, 4)
        assert [allowed(masks, line) for line in range(3)] == [{one}, {two, three}, {three}]
        assert [allowed(masks, line) for line in range(4, 7)] == [{one}, {two, three}, set()]
        assert sample.error is None
        assert limited.error is None
        for token_id in text:
            limited.append(token_id)
        expected = start(constraints, **{**options, "bad_words": ["23"]})
        for token_id in text:
            expected.append(token_id)
        constraints.masks([expected])
        assert limited.error == expected.error
        assert (limited.error is None) == (text[1] == three)


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"regex": "[0-9]+"}, "123a4", 3),
        ({"regex": "[0-9]+"}, "a", 0),
        ({"regex": "1"}, "11", 1),
        ({"bad_words": ["a"]}, "bab", 3),
        ({"regex": "[0-9]+"}, "", 0),
    ],
)
def test_proposals_are_allowed_up_to_the_first_that_the_grammar_refuses(
    options: dict[str, Any], text: str, expected: int
) -> None:
    constraints = new_constraints()
    sample = start(constraints, **options)
    before = next_ids(constraints, sample)
    assert sample.num_allowed([token_id for character in text for token_id in encode(character)]) == expected
    assert sample.num_allowed([VOCAB_SIZE]) in (0, 1), "an id that no token has is no error"
    assert next_ids(constraints, sample) == before
    assert sample.error is None
