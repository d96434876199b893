"""Remembers which experts computed each token: trainers replay it, so that both models are the same network.

The ids lie by slot of the KV cache, beside the keys and values of the same token, so a prefix that is found in the
cache is found with its routing. All layers' ids of a step are written at once, after the forward pass.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.device import record_event, to_device
from nanoinfer.ops.block_tables.spec import copy_tokens


class RoutingTable:
    """Remembers the experts of every token in the cache.

    moe: of the model. kv_cache: by whose first block table tokens have their slots.
    """

    def __init__(self, moe: MoEConfig, kv_cache: KVCache) -> None:
        self._layers = [index for index, has_experts in enumerate(moe.has_experts) if has_experts]
        self._num_layers = len(moe.has_experts)
        self._block_size, self._id_stride = kv_cache.block_size, kv_cache.id_strides[0]
        # One block more than the cache has: tokens that the cache does not store, at slot -1, are written there.
        shape = len(self._layers), kv_cache.num_blocks + 1, 1, kv_cache.block_size, moe.num_experts_per_tok
        self._ids = torch.zeros(shape, dtype=_id_dtype(moe), device=kv_cache.device)
        self._by_slot = self._ids.view(len(self._layers), -1, moe.num_experts_per_tok)

    @staticmethod
    def num_bytes(moe: MoEConfig, block_size: int) -> int:
        """Return the bytes that a block takes."""
        return sum(moe.has_experts) * block_size * moe.num_experts_per_tok * _id_dtype(moe).itemsize

    def write(self, slots: Tensor, routed: list[Tensor]) -> None:
        """Enter the experts of a step's tokens. slots: (num_tokens,) int64. routed: (num_tokens, k) of each layer."""
        if self._id_stride > 1:
            blocks = slots // self._block_size // self._id_stride
            slots = torch.where(slots < 0, slots, blocks * self._block_size + slots % self._block_size)
        self._by_slot[:, slots] = torch.stack(routed).to(self._by_slot.dtype)

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy the experts of a block's first tokens to other blocks. copies: (num_copies, 3), as `BlockCopy`."""
        copy_tokens(self._ids, copies)

    def read(self, block_ids: list[int], start: int, end: int) -> "RoutingOnHost":
        """Start to copy the experts of positions [start, end) to the host, for the sequence that has these blocks."""
        positions = np.arange(start, max(start, end))
        blocks = np.array(block_ids, np.int64)[positions // self._block_size] if len(positions) else positions
        slots = to_device(torch.from_numpy(blocks * self._block_size + positions % self._block_size), self._ids.device)
        ids = self._by_slot[:, slots].transpose(0, 1).contiguous().to("cpu", non_blocking=True)
        return RoutingOnHost(ids, record_event(self._ids.device), self._layers, self._num_layers)


class RoutingOnHost:
    """Holds the routing of a sequence on its way to the host."""

    def __init__(self, ids: Tensor, event: torch.cuda.Event | None, layers: list[int], num_layers: int) -> None:
        self._ids, self._event, self._layers, self._num_layers = ids, event, layers, num_layers

    def to_array(self) -> NDArray[Any]:
        """Wait for the expert ids and return them, (num_positions, num_layers, k); zeros for layers without experts.

        The array is a copy, so that a user who keeps many outputs does not keep pinned memory.
        """
        if self._event is not None:
            self._event.synchronize()
        ids = self._ids.numpy()
        if len(self._layers) == self._num_layers:
            return ids.copy()
        found = np.zeros((len(ids), self._num_layers, ids.shape[2]), ids.dtype)
        found[:, self._layers] = ids
        return found


def _id_dtype(moe: MoEConfig) -> torch.dtype:
    return torch.uint8 if moe.num_experts <= 256 else torch.int16
