"""Sends images from rank 0 to the other ranks: each encodes them itself, and needs the model's inputs for it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.executor.shm_ring import RingReader, RingWriter

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)


def send_image(
    writer: RingWriter, command: int, image_id: int, token_ids: Sequence[int], tensors: Mapping[str, Tensor]
) -> None:
    """Send an image: a command, and two messages for each tensor, which say what it is and what it holds."""
    writer.send(np.array([command, image_id, len(tensors), *token_ids], np.int32))
    for name, tensor in tensors.items():
        numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *name.encode()]
        writer.send(np.array(numbers, np.int32))
        writer.send_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def receive_image(message: NDArray[np.int32], reader: RingReader) -> tuple[int, list[int], dict[str, Tensor]]:
    """Return the id, the token ids and the tensors of an image, whose command was received."""
    _, image_id, num_tensors, *token_ids = message.tolist()
    tensors: dict[str, Tensor] = {}
    for _ in range(num_tensors):
        dtype, num_dims, *numbers = reader.receive().tolist()
        tensor = torch.empty(numbers[:num_dims], dtype=DTYPES[dtype])
        values = tensor.view(-1).view(torch.uint8)
        values.copy_(torch.from_numpy(reader.receive_bytes(len(values))))
        tensors[bytes(numbers[num_dims:]).decode()] = tensor
    return image_id, token_ids, tensors
