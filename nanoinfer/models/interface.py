"""Defines what the runner, its CUDA graphs, the pooler, the sampler and the loader ask of a model.

Our own models give it by `NativeModel`, those of transformers by `TransformersModel`. Nobody asks which kind one is.
"""

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.weights import CheckpointNames
from nanoinfer.distributed.tensor_parallel import VocabShard
from nanoinfer.models.execution import PrefillGraphs
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.images import ImageEncoder


class Model(CheckpointNames, Protocol):
    """Computes steps. It is an nn.Module, whose parameters `CheckpointNames` names.

    generates: whether steps have logits to sample from. captures_decode: whether a CUDA graph of its decode steps
    computes what the steps themselves do. packs_lines: whether layers take decode rows of several tokens without
    padding between them (`PackedLines`). has_token_types: whether it reads `ForwardStep.token_types`. vocab: the ids
    whose logits this rank computes. logits_dtype: that of its logits. score: the head of a classifier, if it is one.
    image_encoder: None unless the engine is to see images.
    """

    @property
    def generates(self) -> bool: ...
    @property
    def captures_decode(self) -> bool: ...
    @property
    def packs_lines(self) -> bool: ...
    @property
    def has_token_types(self) -> bool: ...
    @property
    def vocab(self) -> VocabShard: ...
    @property
    def logits_dtype(self) -> torch.dtype: ...
    @property
    def score(self) -> Callable[[Tensor], Tensor] | None: ...

    @property
    def image_encoder(self) -> ImageEncoder | None: ...

    def __call__(self, step: ForwardStep) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) of the step's tokens."""

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits (num_rows, vocab.size) of (num_rows, hidden_size) in `logits_dtype`; in `out` if given."""

    def logits_of_tokens(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return float32 logits of these tokens alone, (num_rows, num_ids). token_ids: (num_ids,)."""

    def forward_with_hidden_states(self, step: ForwardStep, layers: Set[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Return what a call does, and the hidden states of some layers, (num_tokens, hidden_size) each.

        layers: counted as in transformers' output_hidden_states.
        """

    def prefill_graphs(self, max_step_tokens: int, captures_largest: bool) -> PrefillGraphs:
        """Return the CUDA graphs of prefill steps that pay. captures_largest: see `PrefillGraphs.of`."""

    def compiling_few_rows(self, sizes: list[int]) -> AbstractContextManager[None]:
        """Compile what steps of so many rows need while the block runs."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
