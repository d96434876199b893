"""Holds a decoder and its head: the class that architectures are subclasses of."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.checkpoint.quantization_config import TEXT_PREFIXES
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.embed_head import NoHead, ParallelLMHead, ScoreHead, score_head
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.native_model import NativeModel
from nanoinfer.ops.logits.spec import cap_logits

# How names begin in checkpoints of models for text and images -> how they begin here.
TEXT_MODELS = (*((prefix, "model.") for prefix in TEXT_PREFIXES), ("language_model.lm_head.", "lm_head."))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# How the names of tensors begin that belong to what sees; without images they are not needed.
TOWERS = tuple(
    f"{prefix}{name}."
    for prefix in ("", "model.")
    for name in ("vision_tower", "multi_modal_projector", "visual", "embed_vision", "vision_embedder")
)
BARE_PARTS = ("embed_tokens", "layers", "norm")  # how names begin in checkpoints of the decoder alone


def of_all_experts(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return how names end in the checkpoint -> in ours, of tensors that hold all experts.

    kinds: what follows "_proj" in the checkpoint -> what follows "_proj." in ours.
    """
    return {
        f"experts.{name}_proj{theirs}": f"experts.{name}_proj.{ours}"
        for name in ("gate_up", "down")
        for theirs, ours in kinds.items()
    }


class DecoderForCausalLM(NativeModel):
    """Holds a decoder and its head: the whole model, or a rank's share. The head may score texts, or be absent.

    An architecture is a subclass that says what is special: in its layers by a `spec`, in its config.json by
    `config_defaults` and `config_readers`, in the names of its weights by what `CheckpointNames` in `weights.py` lists.

    max_positions: positions that the rotary tables cover. backends: how attention is computed, layer by layer.
    """

    spec: ClassVar[DecoderSpec] = DecoderSpec()
    decoder: ClassVar[type[Decoder]] = Decoder
    unused_prefixes: ClassVar[tuple[str, ...]] = TOWERS
    # How names of parameters end in the checkpoint -> in ours, where the last part is no module's own: all experts in
    # one tensor.
    renamed_endings: ClassVar[Mapping[str, str]] = of_all_experts(
        {"": "weight", "_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale"}
    )
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(
        self, config: ModelConfig, max_positions: int, backends: AttentionBackends, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.model = self.decoder(config, self.spec, max_positions, backends, tp)
        self.generates = config.head is None  # else steps sample nothing
        self.packs_lines = self.spec.attention is None and config.linear_attention is None
        has_logits = config.head is None or config.head.kind == "vocabulary"
        head = ParallelLMHead if has_logits else NoHead
        self.lm_head = head(config.vocab_size, config.hidden_size, tp)
        self.score: ScoreHead | None = score_head(config.head, config.hidden_size)
        self.ignored_weights = () if has_logits else ("lm_head.weight", "language_model.lm_head.weight")
        self.logits_scaling, self.logits_soft_cap = config.logits_scaling, config.logits_soft_cap
        self.is_tied = config.tie_word_embeddings and has_logits
        if self.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def add_towers(self, parts: Mapping[str, nn.Module]) -> None:
        """Make the towers for images a part of the model, whose weights are updated and sleep with the others."""
        self.towers = nn.ModuleDict(parts)
        unneeded = tuple(prefix for prefix in self.unused_prefixes if prefix not in TOWERS)
        self.unused_prefixes = unneeded  # type: ignore[misc]

    def untie(self) -> None:
        """Give the head a weight of its own."""
        self.is_tied = False
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.model.embed_tokens.weight), requires_grad=False)

    def locate(self, name: str) -> tuple[str, str | None]:
        """Return which parameter a checkpoint's tensor belongs to, and which shard of it; None where it is whole.

        All experts of a layer are packed in one parameter, so that "experts.7.gate_proj.weight" is the shard "7.gate".
        A tensor of all of them, as transformers 5 has in memory, is "experts.gate_up_proj". A head that is tied to the
        embedding is another name of it.
        """
        if "." not in name:
            return name, None
        if name.startswith(TOWERS):
            return f"towers.{name.removeprefix('model.')}", None
        for theirs, ours in TEXT_MODELS:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if name == HEAD and self.is_tied:
            return EMBEDDING, None
        if name.partition(".")[0] in BARE_PARTS:
            name = f"model.{name}"
        for theirs, ours in self.renamed_endings.items():
            if name.endswith(theirs):
                name = name.removesuffix(theirs) + ours
        *path, part, kind = (self.renamed_modules.get(part, part) for part in name.split("."))
        packed, shard = self.packed_modules_mapping.get(part, (part, None))
        if len(path) > 1 and path[-2] == "experts":  # the last part is the expert's number
            shard = f"{path.pop()}.{shard or part.removesuffix('_proj')}"
        return ".".join((*path, packed, kind)), shard

    def checkpoint_name(self, place: tuple[str, str | None]) -> str:
        """Return the checkpoint's name of the tensor that fills a place: the inverse of `locate`."""
        name, shard = place
        if name.startswith("towers."):
            return name.replace("towers.", "model.", 1)
        packed_names = {packed: name for name, packed in self.packed_modules_mapping.items()}
        given_names = {ours: name for name, ours in self.renamed_modules.items()}
        for theirs, ours in self.renamed_endings.items():
            if shard is None and name.endswith(ours):
                name = name.removesuffix(ours) + theirs
        *path, packed, kind = name.split(".")
        if shard is not None:
            expert, _, shard = shard.rpartition(".")
            packed = packed_names.get((packed, shard), packed)
            path += [expert] if expert else []
        return ".".join(given_names.get(part, part) for part in (*path, packed, kind))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Scale and cap the output of the head's product, (num_rows, size), in place."""
        if self.logits_scaling != 1:
            logits.div_(self.logits_scaling)
        return logits if self.logits_soft_cap is None else cap_logits(logits, self.logits_soft_cap)
