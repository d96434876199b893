"""Refuses a loaded model whose tokens reach each other, or find their places, elsewhere than in its attention.

Also finds out whether CUDA graphs can hold its steps.

Batches put tokens of many sequences side by side, and prompts are cut into chunks. So what a token becomes may depend
on its id, its position and attention alone: not on a convolution, a recurrence, or positions that a model counts.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.device import capturing, is_out_of_memory
from nanoinfer.errors import ModelError
from nanoinfer.models.transformers.attention_interface import ATTENTION, handling_attention, name_attention
from nanoinfer.models.transformers.probe import seen_alone
from nanoinfer.models.transformers.split_model import SplitModel
from nanoinfer.models.transformers.transformers_config import shortened

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}  # of hidden states, relative

CACHES = ("cache", "past_key_values")


@contextmanager
def _errors_as_refusals(refusal: str) -> Iterator[None]:
    """Turn errors of a model that a guard runs into ModelErrors; a device out of memory stays what it is.

    refusal: the message, with {} where the error is named.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # models fail in their own ways
        if is_out_of_memory(error):
            raise
        raise ModelError(refusal.format(f"({type(error).__name__}: {shortened(error)})")) from error


def check_mixing(model: SplitModel, vocab_size: int) -> None:
    """Raise ModelError where, with attention in which each token sees itself alone, others still matter."""
    name = type(model.model).__name__
    ids = [index % vocab_size for index in (5, 9, 17, 23)]

    def run(*positions: int) -> Tensor:
        """Return the hidden states of a step of the text's tokens at these positions."""
        return _run_alone(model, [ids[position] for position in positions], positions)

    whole, counted = run(0, 1, 2, 3), _run_alone(model, ids, None)
    if _differ(counted, whole):
        model.first_position += 1  # of PaliGemma, say
        whole = run(0, 1, 2, 3)
    if _differ(counted, whole):
        raise ModelError(
            f"{name} counts the positions of a prompt otherwise than by one for each token, which is not supported"
        )
    if _differ(_run_alone(model, [ids[3], ids[1], ids[0], ids[3]], range(4))[3], whole[3]):
        raise ModelError(
            f"tokens of {name} reach each other outside attention (by a convolution or a recurrent state), which is "
            "not supported; run it with transformers"
        )
    if _differ(torch.cat([run(0, 1), run(2), run(3)]), whole):
        raise ModelError(f"what a token of {name} becomes depends on how its prompt is cut, which is not supported")
    if _differ(run(3, 0, 1, 2)[[1, 2, 3, 0]], whole):
        raise ModelError(f"sequences of {name} that are computed together reach each other, which is not supported")


@torch.inference_mode()
def check_cache(model: SplitModel) -> None:
    """Raise ModelError where transformers itself answers otherwise with its cache than without: which would be right?

    It computes the last of four tokens both ways, by its own attention.
    """
    name, device = type(model.model).__name__, model.model.device
    ids, positions = torch.tensor([5, 9, 17, 23], device=device), torch.arange(4, device=device)
    refusal = (
        f"{name} answers otherwise with transformers' cache than without{{}}, so there is no right answer to follow; "
        "run it with transformers"
    )
    name_attention(model.model, "eager")
    try:
        with _errors_as_refusals(refusal.format(" {}")):
            whole = model.run(ids, positions)[0][0, -1]
            before = model.run(ids[:3], positions[:3], use_cache=True)
            # The output has another name from transformers 5.24 on, and so has the argument, unless a class is late.
            name_of_kept = next((cache for cache in CACHES if before.get(cache) is not None), None)
            if name_of_kept is None:
                raise ValueError("it returns no cache")
            known = inspect.signature(model.layers.forward).parameters
            argument = next((cache for cache in CACHES if cache in known), name_of_kept)
            last = model.run(ids[3:], positions[3:], use_cache=True, **{argument: before[name_of_kept]})[0][0, -1]
    finally:
        name_attention(model.model, ATTENTION)
    if _differ(last, whole):
        raise ModelError(refusal.format(""))


@torch.inference_mode()
def check_head(model: SplitModel, method: str, hidden_size: int) -> None:
    """Raise ModelError where a classifier's head pools tokens otherwise than by `method`: see `PoolingConfig`."""
    name, weight = type(model.model).__name__, next(model.model.parameters())
    hidden = torch.randn(1, 3, hidden_size, dtype=weight.dtype, device=weight.device)
    pooled = {"cls": hidden[0, :1], "last": hidden[0, -1:], "mean": hidden.mean(1), "all": hidden[0]}[method]
    with _errors_as_refusals(f"the head of {name} needs more than hidden states {{}}; run it with transformers"):
        found, expected = model.run_head(hidden)[0].reshape(len(pooled), -1), model.score(pooled).to(weight.dtype)
        differs = _differ(found, expected)
    if differs:
        raise ModelError(f"{name} pools the tokens of a text in a way of its own; run it with transformers")


def _differ(found: Tensor, expected: Tensor) -> bool:
    """Return whether hidden states differ by more than rounding, measured by the largest one."""
    largest = expected.float().abs().max().item() + 1e-9
    return (found.float() - expected.float()).abs().max().item() > TOLERANCE[expected.dtype] * largest


@torch.inference_mode()
def why_not_captured(model: SplitModel) -> str | None:
    """Return why a CUDA graph of a model's step is not what the step itself is; None if it is.

    Two tokens are captured, and replayed as two others.
    """
    device = model.model.device
    token_ids, positions = torch.tensor([5, 9], device=device), torch.tensor([0, 1], device=device)

    def step() -> Tensor:
        with handling_attention(attend_alone):
            return model.compute_logits(model.run(token_ids, positions)[0][0])

    graph = torch.cuda.CUDAGraph()
    try:
        step()  # compiles and warms up outside the capture
        with capturing(graph, None):
            captured = step()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    token_ids.copy_(torch.tensor([17, 23]))
    positions.copy_(torch.tensor([3, 2]))
    graph.replay()
    logits = step()
    # Compiled experts may add up in another order each time. Then the two are compared as far as steps agree.
    is_same = torch.equal(captured, logits) or not (torch.equal(step(), logits) or _differ(captured, logits))
    return None if is_same else "its captured step gives other logits"


@torch.inference_mode()
def _run_alone(model: SplitModel, token_ids: Sequence[int], positions: Sequence[int] | None) -> Tensor:
    name, device = type(model.model).__name__, model.model.device
    places = None if positions is None else torch.tensor(positions, device=device)
    refusal = f"{name} fails when it runs a few tokens with nanoinfer's attention {{}}; run it with transformers"
    with handling_attention(attend_alone), _errors_as_refusals(refusal):
        return model.run(torch.tensor(token_ids, device=device), places)[0][0]


def attend_alone(_module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Return the value of each token alone, changed so that its query and its key show too."""
    size = query.mean(-1).mean(1) + key.mean(-1).mean(1)  # (1, num_tokens)
    return seen_alone(query, value) + size[:, :, None, None].to(value.dtype)
