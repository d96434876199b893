"""Brings what the host decided about one step to where its logits are.

A grammar forbids tokens in the model's own 16-bit logits, so its lines are drawn as fast as any others. Token sets,
users' functions, and grammars of lines whose raw log-probabilities are wanted, are for lines that are copied: they are
logits processors of one step.

Under tensor parallelism rank 0 has the masks and the functions. The other ranks know which of the step's tokens have
any. They get the masks, and the logits that functions have changed, from rank 0's device.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device, why_not_plain
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.integers import ceil_div
from nanoinfer.ops.logits.spec import forbid_tokens
from nanoinfer.sampling.logits_processors import Lines, LogitsProcessor


class MaskSender:
    """Copies masks to the device on a stream of its own, during the forward pass, and from there to the other ranks."""

    def __init__(self, vocab_size: int, device: torch.device, tp: TensorParallel) -> None:
        self.num_words = ceil_div(vocab_size, 32)  # of a mask
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


class LineProcessor(LogitsProcessor):
    """Changes the logits of some lines of one step. by_line: what is known of each (by its batch_idx)."""

    def __init__(self) -> None:
        self.by_line: dict[int, Any] = {}

    def places(self, lines: Lines) -> list[int]:
        return [place for place, index in enumerate(lines.indices) if index in self.by_line]


class UserFunctions(LineProcessor):
    """Runs users' functions on rank 0, each on a copy of its line's logits.

    errors: by batch_idx, why a function failed. Its line becomes NaN, so that no token is drawn; the other lines are
    drawn as ever.
    """

    def __init__(self, masks: TokenMasks, tp: TensorParallel) -> None:
        self.errors: dict[int, str] = {}
        self.by_line = masks.functions
        self._tp = tp

    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        on_device = numbers_to_device(places, logits.device)
        changed = logits[on_device].float()
        if self._tp.rank == 0:
            for place, its_logits in zip(places, changed, strict=True):
                self._change(lines.indices[place], its_logits)
        return logits.float().index_copy(0, on_device, self._tp.broadcast(changed))

    def _change(self, batch_idx: int, logits: Tensor) -> None:
        """Run a line's functions on its logits, (vocab_size,), and write the result in place; NaN if one fails.

        Errors in a function, or in what it returns, are caught here: later they would end the step of all rows.
        """
        functions, output_ids = self.by_line[batch_idx]
        forbidden, name = logits == -torch.inf, ""
        try:
            for function in functions:
                name = str(getattr(function, "__name__", type(function).__name__))
                logits.copy_(_checked(function(list(output_ids), logits.clone()), logits))
            logits.masked_fill_(forbidden, -torch.inf)  # what a grammar forbids stays forbidden
        except Exception as error:
            self.errors[batch_idx] = f"logits processor {name} failed with {_describe(error)}"
            logits.fill_(torch.nan)


class TokenSets(LineProcessor):
    """Forbids the tokens that allowed_token_ids and bad_words leave out. by_line: which of the masks."""

    def __init__(self, masks: RowMasks | None, sender: MaskSender) -> None:
        super().__init__()
        if masks is not None and masks.batch_indices:
            self.by_line = {batch_idx: mask for mask, batch_idx in enumerate(masks.batch_indices)}
            self._bits = sender.send(masks)

    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        logits = logits.to(torch.float32, copy=True)  # raw log-probabilities are read off what was given
        self._forbid(logits, places, [lines.indices[place] for place in places])
        return logits

    def _forbid(self, logits: Tensor, places: list[int], indices: list[int], first_id: int = 0) -> None:
        """Forbid it in place, at some places of logits (num_lines, vocab shard) from id `first_id` on."""
        masks, bits = [self.by_line[index] for index in indices], self._bits
        if masks != [*range(len(bits))]:
            bits = bits[numbers_to_device(masks, logits.device)]
        forbid_tokens(logits, numbers_to_device(places, logits.device), bits, first_id)


class Grammars(TokenSets):
    """Forbids the tokens that grammars forbid, in place for most lines."""

    def forbid_in_place(self, logits: Tensor, first_id: int, spared: set[int]) -> None:
        """Forbid it in the logits of all lines, (num_lines, vocab shard), from id `first_id` on.

        spared: lines that `apply` is to serve.
        """
        if indices := [index for index in self.by_line if index not in spared]:
            self._forbid(logits, indices, indices, first_id)
            self.by_line = {index: mask for index, mask in self.by_line.items() if index in spared}


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
