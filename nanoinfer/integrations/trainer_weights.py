"""A trainer's weights, whole and under the names of its checkpoint, however the trainer has split or wrapped them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nanoinfer.errors import ConfigError

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpointing, of torch.compile


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors for `LLM.update_weights`, each gathered when its turn comes, and freed afterwards.

    Tensors that FSDP 2 or DeepSpeed ZeRO-3 has split are gathered, which takes every process of the trainer: all must
    go through all weights. Adapters of PEFT are merged meanwhile. Raises ConfigError for FSDP 1, and for adapters of a
    model that is split.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError("the trainer's model is split by FSDP 1, which is not gathered; use fsdp_version=2")
    if hasattr(model, "merge_adapter"):
        yield from _merged_weights(model)
        return
    for name, param in model.named_parameters():
        with _whole(param) as tensor:
            yield _unwrapped(name), tensor


def _merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model with adapters, which are merged into them, under the base model's names."""
    if any(map(_is_split, model.parameters())):
        raise ConfigError("adapters of a model that is split are not merged; train it whole, or without adapters")
    model.merge_adapter()
    try:
        for name, param in model.named_parameters():
            if model.prefix not in name and "original_module" not in name:
                name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                yield _unwrapped(name.replace("modules_to_save.default.", "")), param.detach()
    finally:
        model.unmerge_adapter()


@contextmanager
def _whole(param: Any) -> Iterator[Tensor]:
    """Give a parameter whole while the block runs."""
    if hasattr(param, "full_tensor"):  # a DTensor, of FSDP 2
        device = param.device_mesh.device_type
        yield (param if param.device.type == device else param.to(device)).detach().full_tensor()
    elif hasattr(param, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            yield param.detach()
    else:
        yield param.detach()


def _is_split(param: Any) -> bool:
    return hasattr(param, "full_tensor") or hasattr(param, "ds_id")


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
