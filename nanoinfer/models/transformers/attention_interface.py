"""Gives models of transformers an attention function, which hands each call to whoever runs the model.

transformers has a registry of attention functions by name. A model whose config names ours calls it in each layer, in
the same order in each step. Masks are not made then, unless the config names the function of probes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from nanoinfer.models.transformers.tower_attention import TOWER_ATTENTION, packs_images

ATTENTION, PROBED_ATTENTION = "nanoinfer", "nanoinfer_probe"

# (module, query, key, value, mask, options) -> the heads' outputs (1, num_tokens, num_heads, head_dim of the values).
# query, key, value: (1, their number of heads, num_tokens, head_dim). module: None in compiled layers.
AttentionHandler = Callable[[nn.Module | None, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
MaskFunction = Callable[..., Any]  # (batch, head, query's position, key's position) -> whether the query sees the key
MaskHandler = Callable[[MaskFunction, int, int, torch.device], Tensor]

# Who handles the calls of the model that this thread runs: transformers passes no argument of ours to all its layers.
_attention_handler: ContextVar[AttentionHandler] = ContextVar("attention_handler")
_mask_handler: ContextVar[MaskHandler] = ContextVar("mask_handler")


@contextmanager
def handling_attention(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` compute the attention of models that run within the block."""
    token = _attention_handler.set(handler)
    try:
        yield
    finally:
        _attention_handler.reset(token)


@contextmanager
def probing_masks(model: PreTrainedModel, handler: MaskHandler) -> Iterator[None]:
    """Let `handler` make the masks of `model`, which asks for none otherwise."""
    token = _mask_handler.set(handler)
    name_attention(model, PROBED_ATTENTION)
    try:
        yield
    finally:
        _mask_handler.reset(token)
        name_attention(model, ATTENTION)


def name_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention function of a model's text part; towers for images or sound keep transformers' own."""
    for config in _text_configs(model):
        config._attn_implementation_internal = name


def name_attention_of_towers(model: PreTrainedModel) -> None:
    """Let towers compute their attention as `tower_attention.py` does, by PyTorch's function, or eagerly."""
    texts = {id(config) for config in _text_configs(model)}
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if config is not None and id(config) not in texts and isinstance(part, PreTrainedModel):
            usual = "sdpa" if part._supports_sdpa else "eager"
            config._attn_implementation_internal = TOWER_ATTENTION if packs_images(part) else usual


def _text_configs(model: PreTrainedModel) -> Iterator[Any]:
    of_parts = (getattr(part, "config", None) for part in text_part(model).modules())
    return filter(None, (model.config, model.config.get_text_config(), *of_parts))


def text_part(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that reads token ids; of one for texts alone, the model without its head."""
    base = base_model(model)
    return getattr(base, "language_model", None) or getattr(base, "text_model", None) or base


def base_model(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. `get_decoder` finds other parts in some classes."""
    found = (getattr(model, name, None) for name in (model.base_model_prefix, "model") if name)
    return next((part for part in found if isinstance(part, nn.Module)), model)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    if torch.compiler.is_compiling():
        assert attention_mask is None, "a mask was made, though none was asked for"
        return torch.ops.nanoinfer.attend(query, key, value, options.get("s_aux")), None
    return _attention_handler.get()(module, query, key, value, attention_mask, options), None


# The same as an operator, which torch.compile does not look into. It reads who handles it when it runs.
_operators = torch.library.Library("nanoinfer", "FRAGMENT")
_operators.define("attend(Tensor query, Tensor key, Tensor value, Tensor? sinks) -> Tensor")


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    return _attention_handler.get()(None, query, key, value, None, {"s_aux": sinks}).contiguous()


def _attend_without_values(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_operators.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("nanoinfer::attend", _attend_without_values, lib=_operators)


def _mask(
    *,
    kv_length: int,
    mask_function: MaskFunction,
    q_length: int | None = None,
    cache_position: Tensor | None = None,  # of the queries; transformers 4 has it instead of their number and device
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    if cache_position is not None:
        q_length, device = len(cache_position), cache_position.device
    assert q_length is not None, "a mask for no queries"
    return _mask_handler.get()(mask_function, q_length, kv_length, torch.device(device))


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBED_ATTENTION, _attention)
AttentionMaskInterface.register(PROBED_ATTENTION, _mask)
