"""Random JSON schemas, and answers that are held to them: for all tests that need many."""

import json
import random
from collections.abc import Sequence
from typing import Any

from nanoinfer import RequestOutput, SamplingParams, StructuredOutputsParams

PATTERNS = ["^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(red|green|blue)$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", r"^\+?[0-9 ]{3,8}$"]
NAMES = ["id", "name", "größe", "a b", "tags", 'quote"d', "x/y", "$ref me", "n", "日本"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    kinds = ["boolean", "null", "integer", "number", "string", "enum", "const", "pattern"]
    kinds += ["object", "object", "array", "anyOf"] if depth else []
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", "é", 1, 2.5, -7, None, True, [1], {"k": "v"}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 0, False, ["x", 1], {"a": {}}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "string":
        least = rng.randint(0, 4)
        return {"type": kind, "minLength": least, "maxLength": least + rng.randint(0, 8)}
    if kind in ("integer", "number"):
        least = rng.randint(-1000, 1000)
        most = least + rng.randint(1, 500)
        names = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")])
        return {"type": kind, **dict(zip(names, (least, most), strict=True))}
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": kind, "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "object":
        return random_object(rng, depth)
    return {"type": kind}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False} if rng.random() < 0.8 else schema


def random_requests(
    num_requests: int, seed: int, disable_any_whitespace: bool, **options: Any
) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Schemas, and what asks for answers of their form; options are those of SamplingParams."""
    rng = random.Random(seed)
    schemas = [random_object(rng, depth=3) for _ in range(num_requests)]
    params = [
        SamplingParams(
            max_tokens=400,
            seed=index,
            structured_outputs=StructuredOutputsParams(
                json=schema,
                disable_any_whitespace=disable_any_whitespace,
                disable_additional_properties=rng.random() < 0.8,
            ),
            **options,
        )
        for index, schema in enumerate(schemas)
    ]
    return schemas, params


def check_answers(schemas: Sequence[dict[str, Any]], outputs: Sequence[RequestOutput]) -> float:
    """Hold the answers that are finished to their schemas; return which share of all they are."""
    import jsonschema

    num_finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason in ("stop", "length"), f"{output.outputs[0].error} in {schema}"
        if output.finish_reason == "stop":
            num_finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        else:
            assert len(output.token_ids) == 400
    return num_finished / len(schemas)
