"""Wraps a model of transformers as the runner runs it: see `Model` in `models/interface.py`."""

import inspect
import logging
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.loader import iterate_weights
from nanoinfer.checkpoint.weights import listed
from nanoinfer.device import cpu_threads, default_dtype
from nanoinfer.distributed.tensor_parallel import VocabShard
from nanoinfer.errors import ModelError
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.models.execution import PrefillGraphs
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.prefill_graphs import sizes_that_pay
from nanoinfer.models.transformers.attention_interface import ATTENTION, handling_attention, name_attention
from nanoinfer.models.transformers.cached_attention import attend_in_order, by_tokens, cached_attentions
from nanoinfer.models.transformers.captured_prefill import TransformersPrefillGraphs
from nanoinfer.models.transformers.compilation import CompiledLayers, compile_layers, layers_of
from nanoinfer.models.transformers.fast_norms import use_norm_kernel
from nanoinfer.models.transformers.guards import check_cache, check_head, check_mixing, why_not_captured
from nanoinfer.models.transformers.image_encoder import TransformersImageEncoder
from nanoinfer.models.transformers.split_model import SplitModel
from nanoinfer.models.transformers.transformers_config import (
    TransformersConfig,
    attention_option,
    dtype_option,
    find_class,
    make_config,
    shortened,
)
from nanoinfer.step_threads import num_step_threads

logger = logging.getLogger("nanoinfer")

# What transformers reports of weights, and what it means.
FAULTS = {
    "missing_keys": "lacks weights for",
    "unexpected_keys": "has weights that the model does not know:",
    "mismatched_keys": "has weights of other shapes than config.json implies:",
}


class TransformersModel(nn.Module):
    """Runs the layers of a model of transformers with our attention, and its own head.

    max_positions: the longest sequence. backends: how attention is computed, call by call.
    """

    is_tied = False  # what is tied has one name that is read
    unused_prefixes: tuple[str, ...] = ()
    packs_lines = False

    def __init__(
        self, model: SplitModel, config: TransformersConfig, max_positions: int, backends: AttentionBackends
    ) -> None:
        super().__init__()
        self.hf_model, self._split = model.model, model
        self.generates = config.head is None or config.head.kind == "vocabulary"
        self.score = model.score if config.head is not None and config.head.kind in ("sequence", "tokens") else None
        self.captures_decode = config.captures_decode
        self.has_token_types = "token_type_ids" in inspect.signature(model.layers.forward).parameters
        self.vocab = VocabShard(0, config.vocab_size if self.generates else 0)
        self.logits_dtype = next(self.parameters()).dtype
        self._attentions = cached_attentions(config, max_positions, backends)
        self.compiled_layers: CompiledLayers | None = None
        self.image_encoder: TransformersImageEncoder | None = None
        self._config = config
        self._has_prefill_graphs: bool | None = None  # None: not asked yet
        stored = {name for name, _ in self.named_parameters()}
        self.ignored_weights = tuple(  # a weight that is tied has its own name once
            name for name in model.model.state_dict() if f"hf_model.{name}" not in stored
        )

    @classmethod
    def load(
        cls,
        config: BaseModelConfig,
        folder: Path,
        max_positions: int,
        backends: AttentionBackends,
        random_seed: int | None,
        compiles: bool,
        sees_images: bool = False,
    ) -> "TransformersModel":
        """Return the model on its device, with its weights, or random ones if there is a seed.

        compiles: whether its layers are compiled. sees_images: whether steps will have images. Raises ModelError for
        weights that are missing, left over or of another shape, and for a model that `guards.py` refuses; ConfigError
        where layers cannot be compiled.
        """
        assert isinstance(config, TransformersConfig), f"{config.architecture} was not read as a model of transformers"
        model_class, device, dtype = find_class(config.fields), backends.device, backends.dtype
        if random_seed is None:
            model = _load_weights(model_class, config, folder, dtype).to(device)
        else:
            model = draw_weights(model_class, make_config(model_class, config.fields), device, dtype, random_seed)
        name_attention(model, ATTENTION)
        keep_buffers_as_weights(model)
        freeze_rope(model, max_positions)
        model.eval().requires_grad_(False)
        if device.type == "cuda":
            use_norm_kernel(model)
        split = SplitModel(model)
        check_mixing(split, config.vocab_size)
        if not config.is_encoder:
            check_cache(split)
        if config.pooling is not None and config.pooling.is_classifier and not config.pooling.token_ids:
            check_head(split, config.pooling.method, config.hidden_size)
        loaded = cls(split, config, max_positions, backends).eval()
        if sees_images:
            loaded.image_encoder = TransformersImageEncoder(model)
        if compiles:
            with cpu_threads(num_step_threads(model, device)):  # for whose number it compiles
                loaded.compiled_layers = compile_layers(split, config.calls)
        if loaded.captures_decode and loaded.generates and device.type == "cuda" and (why := why_not_captured(split)):
            loaded.captures_decode = False
            logger.info("%s decodes without CUDA graphs: %s", config.architecture, why)
        return loaded

    def untie(self) -> None:
        """Do nothing: transformers has decided which weights are one."""

    def locate(self, name: str) -> tuple[str, str | None]:
        return f"hf_model.{name}", None

    def checkpoint_name(self, place: tuple[str, str | None]) -> str:
        return place[0].removeprefix("hf_model.")

    def forward(self, step: ForwardStep) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) of the step's tokens."""
        return self._run(step)[0][0]

    def _run(self, step: ForwardStep, **options: Any) -> Any:
        """Return what `SplitModel.run` returns of a step."""
        if step.token_types is not None:
            options["token_type_ids"] = step.token_types[None].long()
        with handling_attention(by_tokens(attend_in_order(self._attentions, step))):
            if step.images is not None:
                return self._split.run_with_images(step.token_ids, step.positions, step.images, **options)
            positions = step.positions if step.rotary_positions is None else step.rotary_positions
            return self._split.run(step.token_ids, positions, **options)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits (num_rows, vocab.size) of (num_rows, hidden_size), in `out` if it is given."""
        logits = self._split.compute_logits(hidden)
        return logits if out is None else out.copy_(logits)

    def logits_of_tokens(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return float32 logits of these tokens alone, (num_rows, num_ids). token_ids: (num_ids,)."""
        return self._split.compute_logits(hidden)[:, token_ids].float()

    def forward_with_hidden_states(self, step: ForwardStep, layers: Set[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Return what `forward` does, and the hidden states of some layers, (num_tokens, hidden_size) each."""
        plain = nullcontext() if self.compiled_layers is None else self.compiled_layers.switched_off()
        with plain:
            output = self._run(step, output_hidden_states=True)
        return output[0][0], {layer: output.hidden_states[layer][0] for layer in layers}

    def prefill_graphs(self, max_step_tokens: int, captures_largest: bool) -> PrefillGraphs:
        layers = [layer for layer, _ in layers_of(self._split.model, self._config.calls)]
        if not (layers and self._config.captures_decode):
            return PrefillGraphs()
        sizes, always_served = sizes_that_pay(layers, max_step_tokens, not self.generates)
        if not sizes:
            return PrefillGraphs()
        graphs = TransformersPrefillGraphs(self._split, self._attentions, self.forward, sizes, always_served)
        if self._has_prefill_graphs is None:
            why_not = graphs.why_not()
            self._has_prefill_graphs = why_not is None
            if why_not is not None:
                logger.info("%s prefills without CUDA graphs: %s", type(self.hf_model).__name__, why_not)
        return PrefillGraphs(graphs if self._has_prefill_graphs else None)

    def compiling_few_rows(self, sizes: list[int]) -> AbstractContextManager[None]:
        return nullcontext()


def _load_weights(
    model_class: type[PreTrainedModel], config: TransformersConfig, folder: Path, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a model with the weights of a folder, on the CPU: transformers knows what to rename and to merge."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in iterate_weights(folder):
        if name in tensors:
            raise ModelError(f"{folder} has {name} in two of its files; remove the file that is not of this checkpoint")
        tensors[name] = tensor
    whole_config = make_config(model_class, config.fields)
    options = {"output_loading_info": True, **attention_option(whole_config), **dtype_option(dtype)}
    try:
        # Without ignore_mismatched_sizes, the error for a weight of another shape names none.
        with without_progress_bars():
            model, found = model_class.from_pretrained(
                None,
                config=whole_config,
                state_dict=tensors,
                ignore_mismatched_sizes=True,
                **options,
            )
    except Exception as error:  # what converts weights fails in its own ways
        raise ModelError(f"transformers cannot load the weights of {folder}: {shortened(error)}") from error
    for kind, what in FAULTS.items():
        if names := sorted(str(name) for name in found.get(kind) or ()):
            raise ModelError(f"{folder} {what} {listed(names)}; is this config.json that of the checkpoint?")
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Let transformers show no bars in a scope: loading is reported by our log alone."""
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()


def draw_weights(
    model_class: type[PreTrainedModel], config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Return a model on its device with the random weights that transformers begins to train with."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device), default_dtype(dtype):
        torch.manual_seed(seed)
        drawn: PreTrainedModel = model_class._from_config(config, **attention_option(config), **dtype_option(dtype))
    return drawn


def keep_buffers_as_weights(model: nn.Module) -> None:
    """Make parameters of the buffers that checkpoints hold, so that they sleep and are updated as other weights.

    And let each weight have memory of its own: those of a file may be views of it, which cannot be freed.
    """
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    for param in model.parameters():
        if not param.untyped_storage().resizable() or param.untyped_storage().nbytes() != param.nbytes:
            param.data = param.data.clone()


def freeze_rope(model: nn.Module, max_positions: int) -> None:
    """Fix rotations that depend on the longest position of a step, as for the longest sequence.

    Keys of one sequence must agree whatever runs beside it, and finding the longest position waits for the device.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        by_type = kinds if isinstance(kinds, dict) else {None: kinds}
        changing = [layer_type for layer_type, kind in by_type.items() if kind in ("dynamic", "longrope")]
        for layer_type in changing:
            buffer = next(module.buffers())
            positions = torch.tensor([[max_positions - 1]], device=buffer.device)
            options = {} if layer_type is None else {"layer_type": layer_type}
            module.forward(buffer, positions, **options)
        if changing:
            unchanging = dict.fromkeys(by_type, "default")
            module.__dict__["rope_type"] = unchanging if isinstance(kinds, dict) else "default"
