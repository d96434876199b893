"""Texts drawn by random schemas, with any allowed token as likely as another: they parse and validate."""

import json
import random
from pathlib import Path

import pytest

from nanoinfer import SamplingParams
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.text.tokenizer import Tokenizer
from tests.constraints.helpers import EOS, VOCAB_SIZE, draw, tiny_tokenizer
from tests.constraints.random_schemas import random_object
from tests.real.make_smollm2 import save_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


def check_random_schemas(num_schemas: int, seed: int, tokenizer: Tokenizer, vocab_size: int, eos: int) -> float:
    """Draw a text by each of some random schemas; return which share of them was finished."""
    rng, constraints = random.Random(seed), Constraints(tokenizer, vocab_size, frozenset({eos}))
    schemas = [random_object(rng, depth=3) for _ in range(num_schemas)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    wanted = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(
                json=schema,
                disable_any_whitespace=index % 2 == 0,
                disable_additional_properties=rng.random() < 0.8,
            )
        )
        for index, schema in enumerate(schemas)
    ]
    num_finished, walks = 0, draw(constraints, wanted, seed, 400, vocab_size)
    for schema, (tokens, reason, sample) in zip(schemas, walks, strict=True):
        assert reason != "error", f"{sample.error} in {schema}"
        if reason == "stop":
            num_finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(tokens)))
    return num_finished / num_schemas


def test_texts_of_a_hundred_random_schemas_parse_and_validate() -> None:
    assert check_random_schemas(100, 0, tiny_tokenizer(), VOCAB_SIZE, EOS) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_texts_of_a_thousand_random_schemas_parse_and_validate(seed: int) -> None:
    assert check_random_schemas(100, seed, tiny_tokenizer(), VOCAB_SIZE, EOS) > 0.8


@pytest.mark.real
def test_texts_of_a_real_tokenizer_parse_and_validate(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    # Of so many tokens few are quotes: a drawn string without a limit goes on for long.
    assert check_random_schemas(50, 0, tokenizer, 49_152, tokenizer.hf.eos_token_id) > 0.5
