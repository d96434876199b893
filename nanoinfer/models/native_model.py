"""Holds what our own decoders and encoders share towards the runner: see `Model` in `interface.py`."""

from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.distributed.tensor_parallel import VocabShard
from nanoinfer.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanoinfer.models import execution
from nanoinfer.models.config_fields import Reader
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.execution import PrefillGraphs
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.images import ImageEncoder


class NativeModel(nn.Module):
    """Gives the runner what it asks of a model, from a decoder (or an encoder) and its head.

    config_defaults: what config.json may leave out, by the values that transformers then takes. config_readers: by
    field of ModelConfig, what reads it, where that is not as in COMMON_READERS of `config_fields.py`.
    unsupported_unless: more of UNSUPPORTED_UNLESS in `native_config.py`. renamed_modules: name of a module in the
    checkpoint -> ours, where they differ. packed_modules_mapping: name in the checkpoint -> our packed module, and the
    shard of it that the weight fills.
    """

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    config_readers: ClassVar[Mapping[str, Reader]] = {}
    unsupported_unless: ClassVar[Mapping[str, Any]] = {}
    renamed_modules: ClassVar[Mapping[str, str]] = {}
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]] = {}
    model: Decoder
    lm_head: ParallelLMHead
    generates: bool
    captures_decode = True
    packs_lines = False
    image_encoder: ImageEncoder | None = None

    @property
    def has_token_types(self) -> bool:
        return self.model.has_second_types

    @property
    def vocab(self) -> VocabShard:
        return self.lm_head.vocab

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(self, step: ForwardStep) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) of the step's tokens."""
        return execution.forward(self.model, step)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits (num_rows, vocab.size) of (num_rows, hidden_size) in the model's dtype; in `out` if given."""
        return self.finish_logits(self.lm_head(hidden, out))

    def logits_of_tokens(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return float32 logits of these tokens alone, (num_rows, num_ids). token_ids: (num_ids,)."""
        weights = VocabParallelEmbedding.forward(self.lm_head, token_ids)  # of all ranks
        return self.finish_logits(F.linear(hidden.float(), weights.float()))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Turn the output of the head's product, (num_rows, size), into logits, in place."""
        return logits

    def forward_with_hidden_states(self, step: ForwardStep, layers: Set[int]) -> tuple[Tensor, dict[int, Tensor]]:
        return self.model.forward_with_hidden_states(step, layers)

    def prefill_graphs(self, max_step_tokens: int, captures_largest: bool) -> PrefillGraphs:
        return PrefillGraphs.of(self.model, max_step_tokens, not self.generates, captures_largest)

    def compiling_few_rows(self, sizes: list[int]) -> AbstractContextManager[None]:
        return execution.compiling_few_rows(self.model, sizes)
