"""New weights from another process on the same GPU, by CUDA IPC handles: the only copy is the one into the engine.

    handles = weight_handles(model.named_parameters())   # in the trainer; a pipe, a queue or Ray brings them over
    llm.update_weights(open_weights(handles))            # in the engine's process

The trainer keeps its tensors as they are until `update_weights` has returned. Handles are those of
`torch.multiprocessing`, and can be pickled by anything.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from nanoinfer.errors import ModelError

DEVICE = 6  # index of the argument of `rebuild_cuda_tensor` that is the GPU's number in this process


class WeightHandle(NamedTuple):
    """Says where a tensor lies. gpu: its UUID, since each process may number GPUs in its own way."""

    name: str
    gpu: str
    arguments: tuple[Any, ...]  # of torch.multiprocessing.reductions.rebuild_cuda_tensor


def weight_handles(named_tensors: Iterable[tuple[str, Tensor]]) -> list[WeightHandle]:
    """Return a handle of each tensor, for `open_weights` in another process.

    Tensors that are gathered one by one, as from FSDP, are gone before the other process opens them: send those with
    `send_weights`. Raises ModelError for a tensor that is not on a GPU.
    """
    handles = []
    for name, tensor in named_tensors:
        if tensor.device.type != "cuda":
            raise ModelError(
                f"{name} is on {tensor.device}, and only a GPU's memory has handles; move it to the engine's GPU, or "
                "send it with send_weights"
            )
        _, arguments = reductions.reduce_tensor(tensor.detach())
        handles.append(WeightHandle(name, _uuid(tensor.device.index), arguments))
    return handles


def open_weights(handles: Iterable[WeightHandle]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of another process, for `LLM.update_weights`; each is let go when the next one comes.

    Raises ModelError for one on a GPU that this process does not see.
    """
    numbers = {_uuid(index): index for index in range(torch.cuda.device_count())}
    for name, gpu, arguments in handles:
        if gpu not in numbers:
            seen = ", ".join(numbers) or "none"
            raise ModelError(
                f"{name} is on the GPU {gpu}, which this process does not see (it sees {seen}); start it with "
                "CUDA_VISIBLE_DEVICES of the trainer's GPU, or send the weights with send_weights"
            )
        local = *arguments[:DEVICE], numbers[gpu], *arguments[DEVICE + 1 :]
        yield name, reductions.rebuild_cuda_tensor(*local)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
