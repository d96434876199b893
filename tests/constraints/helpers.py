"""What stands in for the engine: a sampler that draws any token that the masks allow."""

import random
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer import SamplingParams, tiny_model_path
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.constraints.token_sets import all_tokens
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.text.tokenizer import Tokenizer

VOCAB_SIZE = 1024
EOS = 1017  # <|im_end|>


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_model_path())


def new_constraints(vocab_size: int = VOCAB_SIZE, stop_token_ids: frozenset[int] = frozenset({EOS})) -> Constraints:
    return Constraints(tiny_tokenizer(), vocab_size, stop_token_ids)


def start(constraints: Constraints, **options: Any) -> Any:
    """The constraint of one sample; options are those of SamplingParams or of StructuredOutputsParams."""
    ours = {name for name in options if name in StructuredOutputsParams.__dataclass_fields__}
    wanted = StructuredOutputsParams(**{name: options[name] for name in ours}) if ours else None
    others = {name: value for name, value in options.items() if name not in ours}
    [plan] = constraints.compile([SamplingParams(structured_outputs=wanted, **others)])
    assert plan is not None
    return plan.start()


def encode(text: str) -> list[int]:
    [ids] = tiny_tokenizer().encode([text], add_special_tokens=False)
    return ids


def ids_of(bits: NDArray[np.int32]) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()}


def allowed_bits(masks: TokenMasks, line: int, vocab_size: int) -> NDArray[np.int32]:
    bits = all_tokens(vocab_size)
    for part in (masks.grammars, masks.token_sets):
        if part is not None and line in part.batch_indices:
            bits &= part.bits[part.batch_indices.index(line)]
    return bits


def allowed(masks: TokenMasks, line: int = 0) -> set[int]:
    """The tokens that one line may get."""
    return ids_of(allowed_bits(masks, line, VOCAB_SIZE))


def next_ids(constraints: Constraints, constraint: Any) -> set[int]:
    return allowed(constraints.masks([constraint]))


def follow(constraint: Any, text: str) -> bool:
    """Append a text's tokens; whether it is complete with the last."""
    complete = False
    for token_id in encode(text):
        assert not complete, f"complete before the end of {text!r}"
        complete = constraint.append(token_id)
        assert constraint.error is None
    return complete


def is_possible(constraints: Constraints, text: str, **options: Any) -> bool:
    """Whether a text may be the whole completion, token by token as the tokenizer writes it."""
    constraint = start(constraints, **options)
    ids = encode(text)
    for index, token_id in enumerate(ids):
        if token_id not in next_ids(constraints, constraint):
            return False
        if constraint.append(token_id):
            return index == len(ids) - 1
    return EOS in next_ids(constraints, constraint)


def draw(
    constraints: Constraints, wanted: list[SamplingParams], seed: int, max_tokens: int, vocab_size: int = VOCAB_SIZE
) -> list[tuple[list[int], str, Any]]:
    """Draw completions side by side: tokens, why each ended ("stop", "length", "error"), and its constraint.

    Any allowed token is as likely as any other, but for a stop token, which has three chances in ten.
    """
    rng = random.Random(seed)
    samples: list[Any] = [plan.start() for plan in constraints.compile(wanted) if plan is not None]
    stop_ids = constraints._stop_token_ids
    tokens: list[list[int]] = [[] for _ in samples]
    reasons = ["length"] * len(samples)
    live = [*range(len(samples))]
    for _ in range(max_tokens):
        masks, going_on = constraints.masks([samples[index] for index in live]), []
        for line, index in enumerate(live):
            bits = np.unpackbits(allowed_bits(masks, line, vocab_size).view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits)
            if not len(ids) or (any(bits[stop_id] for stop_id in stop_ids) and rng.random() < 0.3):
                reasons[index] = "stop" if len(ids) else "error"
                continue
            token_id = int(rng.choice(ids))
            if token_id in stop_ids:
                reasons[index] = "stop"
                continue
            tokens[index].append(token_id)
            if samples[index].append(token_id):
                reasons[index] = "stop"
            else:
                going_on.append(index)
        live = going_on
    return list(zip(tokens, reasons, samples, strict=True))
