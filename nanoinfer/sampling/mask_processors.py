"""Brings what the host decided about one step to where its logits are.

A grammar forbids tokens in the model's own 16-bit logits, so its rows are drawn as fast as any others. Token sets,
users' functions, and grammars of rows whose raw log-probabilities are wanted, are for rows that are copied: they are
processors of one step.

Under tensor parallelism rank 0 has the masks and the functions. The other ranks know which of the step's tokens have
any. They get the masks, and the logits that functions have changed, from rank 0's device.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device, why_not_plain
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.ops.logits.spec import forbid_tokens
from nanoinfer.sampling.logits_processors import LogitsProcessor, Stage


class MaskSender:
    """Copies masks to the device on a stream of its own, during the forward pass, and from there to the other ranks."""

    def __init__(self, vocab_size: int, device: torch.device, tp: TensorParallel) -> None:
        self.num_words = -(-vocab_size // 32)  # of a mask
        self._device = device
        self._tp = tp
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and tp.rank == 0 else None
        self._copies: list[tuple[Tensor, torch.cuda.Event]] = []  # masks on the host, kept until they are copied

    def send(self, masks: RowMasks) -> Tensor:
        """Return the bits on the device, (num_masks, num_words) int32; what is launched from now on can read them."""
        shape = len(masks.batch_indices), self.num_words
        if self._tp.rank > 0:
            return self._tp.broadcast(torch.empty(shape, dtype=torch.int32, device=self._device))
        assert masks.bits.shape[1] >= self.num_words, f"masks of {masks.bits.shape[1]} words are too narrow"
        on_host = torch.from_numpy(np.ascontiguousarray(masks.bits[:, : self.num_words]))
        if self._stream is None:
            return self._tp.broadcast(on_host)
        self._copies = [copy for copy in self._copies if not copy[1].query()]
        with torch.cuda.stream(self._stream):
            on_device = to_device(on_host, self._device)
            self._copies.append((on_host, self._stream.record_event()))
        main_stream = torch.cuda.current_stream(self._device)
        main_stream.wait_stream(self._stream)
        on_device.record_stream(main_stream)  # so that the memory is not used again before that has come to its end
        return self._tp.broadcast(on_device)


class UserFunctionProcessor(LogitsProcessor):
    """Runs users' functions on rank 0, each on a copy of its row's logits.

    by_row: the batch_idx. errors: by batch_idx, why a function failed. Its row becomes NaN, so that no token is drawn;
    the other rows are drawn as ever.
    """

    stage: ClassVar = Stage.USER_FUNCTIONS

    def __init__(self, masks: TokenMasks, host_rows: list[int], tp: TensorParallel) -> None:
        self.errors: dict[int, str] = {}
        self.by_row = {host_rows[batch_idx]: batch_idx for batch_idx in masks.functions}
        self._functions = masks.functions
        self._tp = tp

    def apply(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor:
        places = self.places(host_rows)
        on_device = numbers_to_device(places, logits.device)
        changed = logits[on_device].float()
        if self._tp.rank == 0:
            for place, its_logits in zip(places, changed, strict=True):
                self._change(self.by_row[host_rows[place]], its_logits)
        return logits.float().index_copy(0, on_device, self._tp.broadcast(changed))

    def _change(self, batch_idx: int, logits: Tensor) -> None:
        """Run a token's functions on its logits, (vocab_size,), and write the result in place; NaN if one fails.

        Errors in a function, or in what it returns, are caught here: later they would end the step of all rows.
        """
        functions, output_ids = self._functions[batch_idx]
        forbidden, name = logits == -torch.inf, ""
        try:
            for function in functions:
                name = str(getattr(function, "__name__", type(function).__name__))
                logits.copy_(_checked(function(list(output_ids), logits.clone()), logits))
            logits.masked_fill_(forbidden, -torch.inf)  # what a grammar forbids stays forbidden
        except Exception as error:
            self.errors[batch_idx] = f"logits processor {name} failed with {_describe(error)}"
            logits.fill_(torch.nan)


class TokenSetProcessor(LogitsProcessor):
    """Forbids what allowed_token_ids and bad_words leave out. by_row: which of the masks."""

    stage: ClassVar = Stage.TOKEN_SETS

    def __init__(self, masks: RowMasks | None, host_rows: list[int], sender: MaskSender) -> None:
        super().__init__()
        if masks is not None and masks.batch_indices:
            self.by_row = {host_rows[batch_idx]: mask for mask, batch_idx in enumerate(masks.batch_indices)}
            self._batch_indices, self._bits = masks.batch_indices, sender.send(masks)

    def apply(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor:
        places = self.places(host_rows)
        masks = [self.by_row[host_rows[place]] for place in places]
        on_device, masks_on_device = numbers_to_device([places, masks], logits.device)
        logits = logits.to(torch.float32, copy=True)  # raw log-probabilities are read off what was given
        forbid_tokens(logits, on_device, self._bits[masks_on_device])
        return logits


class GrammarProcessor(TokenSetProcessor):
    """Forbids what grammars forbid, of most rows in place."""

    stage: ClassVar = Stage.GRAMMARS

    def forbid_in_place(self, logits: Tensor, first_id: int, spared: set[int]) -> None:
        """Forbid it in logits (num_rows, vocab shard), from id `first_id` on; `apply` does it for spared rows."""
        if not self.by_row:
            return
        if not spared:
            forbid_tokens(logits, numbers_to_device(self._batch_indices, logits.device), self._bits, first_id)
            self.by_row = {}
            return
        others = [mask for row, mask in self.by_row.items() if row not in spared]
        if others:
            places = [others, [self._batch_indices[mask] for mask in others]]
            masks, batch_indices = numbers_to_device(places, logits.device)
            forbid_tokens(logits, batch_indices, self._bits[masks], first_id)
        self.by_row = {row: mask for row, mask in self.by_row.items() if row in spared}


def _checked(result: Any, logits: Tensor) -> Tensor:
    """Return what a user's function returned; raise if it is no plain floating-point tensor of the logits' shape."""
    shape = tuple(logits.shape)
    if not isinstance(result, Tensor):
        raise TypeError(f"it returned a {type(result).__name__}; return a tensor of shape {shape}")
    if why := why_not_plain(result):
        raise ValueError(f"it returned a tensor that {why}; return a plain dense one of shape {shape}")
    if result.shape != logits.shape or not result.is_floating_point():
        raise ValueError(f"it returned {result.dtype} of shape {tuple(result.shape)}; return float32 of shape {shape}")
    return result.detach()


def _describe(error: Exception) -> str:
    """Return the type of a user's error and what it says, if it can say it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
