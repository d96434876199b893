"""Runs a model of transformers once, without weights, and records its attention calls.

A cache layer is an attention *call*, in order, not a module: some models call one module several times. What a call
sees is read off its mask: the function that transformers would fill the mask by is asked instead.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, masking_utils

from nanoinfer.errors import ModelError
from nanoinfer.models.transformers.attention_interface import MaskFunction, handling_attention, probing_masks
from nanoinfer.models.transformers.split_model import SplitModel

NUM_PROBED_TOKENS = 259  # more than any model compresses into one key
MAX_PROBED_POSITIONS = 2**17  # where masks are asked at most
# Options of attention calls that are followed, or that change nothing when one model computes one step.
KNOWN_OPTIONS = frozenset(
    (
        *("scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout", "position_ids", "use_cache"),
        *("cache_position", "layer_idx", "past_key_values", "cache", "position_embeddings", "input_ids"),
        *("inputs_embeds", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("logits_to_keep", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "mm_token_type_ids"),
        *("visual_pos_masks", "deepstack_visual_embeds", "token_type_ids"),
    )
)


class Sight(NamedTuple):
    """Says which tokens a token attends to.

    causal: none after it. window: so many, itself included; None for all. chunk: only those in its own of the chunks of
    so many positions that a text is cut into; None for all.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Describes one attention call of a model's forward pass.

    head_dim, value_dim: sizes of queries and keys, and of values. scale: the factor of the scores. See `AttentionSpec`.
    """

    name: str  # of the module that makes it
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sight: Sight
    soft_cap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class Probed:
    """Holds what a probe saw.

    hidden: the model's hidden states, (num_tokens, hidden_size), on meta. vocab_size: how many logits its head has;
    None without one. reads_host: whether the model reads values back from its device, so that no CUDA graph can hold
    its steps.
    """

    calls: tuple[AttentionCall, ...]
    hidden: Tensor
    vocab_size: int | None
    reads_host: bool


class Probe:
    """Answers the attention calls of one forward pass, as if each token saw itself alone, and records them.

    max_positions: of the model; what a window or a chunk of so many tokens leaves out is nothing.
    """

    def __init__(self, model: PreTrainedModel, max_positions: int) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._max_positions = max(64, min(max_positions, MAX_PROBED_POSITIONS))
        self._masks: dict[int, tuple[Tensor, MaskFunction]] = {}  # by the id of the mask, which is held to keep its id
        self._sights: dict[int, Sight] = {}  # of masks, by the same ids
        self.calls: list[AttentionCall] = []

    def make_mask(self, function: MaskFunction, q_length: int, kv_length: int, device: torch.device) -> Tensor:
        """Return a mask by which the function is found again."""
        mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        self._masks[id(mask)] = mask, function
        return mask

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        name = self._names.get(id(module), type(module).__name__)
        self._check(name, query, key, options)
        scale = options.get("scaling")
        if isinstance(scale, Tensor):
            raise ModelError(f"the scale of scores in {name} is a tensor, which the kernels do not take")
        self.calls.append(
            AttentionCall(
                name=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                sight=self._sight(name, module, mask, options),
                soft_cap=options.get("softcap"),
                has_sinks=options.get("s_aux") is not None,
            )
        )
        return seen_alone(query, value)

    def _check(self, name: str, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> None:
        """Raise ModelError for a call that asks for more than attention of a step's tokens."""
        unknown = {option for option, value in options.items() if value is not None and value is not False}
        if unknown := unknown - KNOWN_OPTIONS:
            raise ModelError(f"attention of {name} is given {', '.join(sorted(unknown))}, which is not supported")
        if query.shape[0] != 1 or key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise ModelError(
                f"attention of {name} has queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}; "
                "supported is one key for each token"
            )

    def _sight(self, name: str, module: nn.Module | None, mask: Tensor | None, options: Mapping[str, Any]) -> Sight:
        window = options.get("sliding_window")
        window = window if window is not None and window < self._max_positions else None
        if mask is None:
            causal = options.get("is_causal")
            return Sight(bool(getattr(module, "is_causal", True) if causal is None else causal), window)
        whole = mask._base if mask._base is not None and mask._base.shape == mask.shape else mask
        if id(whole) not in self._masks:
            raise ModelError(f"attention of {name} has a mask that its model changed, which is not supported")
        if id(whole) not in self._sights:
            self._sights[id(whole)] = sight_of(self._masks[id(whole)][1], self._max_positions, name)
        sight = self._sights[id(whole)]
        if sight.causal and window is not None and sight.window != window:
            raise ModelError(f"attention of {name} has a window of {window}, and a mask of {sight}")
        return sight


def probe(model: SplitModel, max_positions: int, has_head: bool) -> Probed:
    """Run a few tokens through a model; return what is seen. Raises ModelError for a call that is not supported.

    has_head: whether the model has a language-model head.
    """
    probing, reads = Probe(model.model, max_positions), HostReads()
    ids = torch.arange(min(NUM_PROBED_TOKENS, max_positions), device="meta")
    with (
        reads,
        _on_meta(),
        probing_masks(model.model, probing.make_mask),
        handling_attention(probing.attend),
        torch.no_grad(),
    ):
        hidden = model.run(ids, ids)[0][0]
        vocab_size = model.compute_logits(hidden[:1]).shape[-1] if has_head else None
    if not probing.calls:
        raise ModelError(f"{type(model.model).__name__} calls no attention")
    return Probed(tuple(probing.calls), hidden, vocab_size, reads.found)


class HostReads(TorchFunctionMode):
    """Answers where a model on meta reads values back, and remembers that it does.

    Numbers are zeros, a mask selects nothing, and of parts whose sizes were read the first is the whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = HOST_READS[func](*args, **kwargs) if func in HOST_READS and args[0].is_meta else NotImplemented
        if answer is NotImplemented:
            return func(*args, **kwargs)
        self.found = True
        return answer


def _no_indices(x: Tensor, as_tuple: bool = False, **_: Any) -> Any:
    found = torch.empty(0, x.dim(), dtype=torch.long, device=x.device)
    return found.unbind(1) if as_tuple else found


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.is_meta


def _split(x: Tensor, sizes: Any, dim: int = 0) -> Any:
    were_read = isinstance(sizes, list) and sizes and not any(sizes)
    return (x, *(x.narrow(dim, 0, 0) for _ in sizes[1:])) if were_read else NotImplemented


# What these functions return on meta; NotImplemented where arguments are such that nothing is read back.
HOST_READS: Mapping[Any, Callable[..., Any]] = {
    Tensor.__getitem__: lambda x, i: x.new_empty(0, *x.shape[i.dim() :]) if _is_mask(i) else NotImplemented,
    Tensor.__setitem__: lambda x, i, value: None if _is_mask(i) else NotImplemented,
    Tensor.split: _split,
    Tensor.item: lambda x: 0,
    Tensor.tolist: lambda x: torch.zeros(x.shape, dtype=torch.long).tolist(),
    Tensor.__bool__: lambda x: False,
    Tensor.__int__: lambda x: 0,
    Tensor.__index__: lambda x: 0,
    Tensor.__float__: lambda x: 0.0,
    Tensor.nonzero: _no_indices,
    torch.nonzero: _no_indices,
    torch.where: lambda x, *values, **named: NotImplemented if values or named else _no_indices(x, as_tuple=True),
    Tensor.__contains__: lambda x, _: False,
}


def seen_alone(query: Tensor, value: Tensor) -> Tensor:
    """Return the output of attention in which each token sees only itself: its value, for each query head."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()


def sight_of(function: MaskFunction, num_positions: int, name: str) -> Sight:
    """Return which tokens a mask shows, from a function of positions. Raises ModelError for any other shape.

    Whole rows of some queries are asked, among `num_positions` positions.
    """
    keys = torch.arange(num_positions)
    visible = _on_cpu(function)

    def row(query: int) -> list[int]:
        """Return the first and the last visible position, between which all must be."""
        zero = torch.zeros((), dtype=torch.long)
        seen = torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(num_positions).nonzero().flatten()
        if not len(seen) or len(seen) != seen[-1] - seen[0] + 1:
            raise ModelError(f"the mask of {name} has gaps, which is not supported")
        return seen[[0, -1]].tolist()

    last, middle = num_positions - 1, num_positions // 2
    rows = {query: row(query) for query in (last, last - 1, last - 5, middle, middle + 1, 1)}

    def all_begin_at(start: Callable[[int], int]) -> bool:
        return all(begin == start(query) for query, (begin, _) in rows.items())

    if all(end == query for query, (_, end) in rows.items()):  # causal
        # A window or a chunk has as many positions as there are queries that see the first key.
        size = bisect_left(range(num_positions), True, lo=1, key=lambda query: row(query)[0] > 0)
        if all_begin_at(lambda query: max(0, query - size + 1)):
            return Sight(True, size if size < num_positions else None)
        if all_begin_at(lambda query: query // size * size):
            return Sight(True, chunk=size)
    else:
        ahead = rows[middle][1] - middle + 1
        if all(seen == [max(0, query - ahead + 1), min(last, query + ahead - 1)] for query, seen in rows.items()):
            return Sight(False, ahead)
        if all(seen == [0, last] for seen in rows.values()):
            return Sight(False)
    raise ModelError(f"the mask of {name} is neither causal nor bidirectional, a window or chunks")


def _on_cpu(function: MaskFunction) -> MaskFunction:
    """Return a mask function without tensors on meta: no padding is on the left, and no token belongs to an image."""
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return function

    def moved(name: str, content: Any) -> Any:
        if isinstance(content, Tensor) and content.is_meta and name == "left_padding":
            return torch.zeros(content.shape, dtype=content.dtype)
        if isinstance(content, Tensor) and content.is_meta and name == "block_sequence_ids":
            return torch.full((1, MAX_PROBED_POSITIONS), -1)
        if isinstance(content, tuple):
            return tuple(_on_cpu(part) for part in content)
        return _on_cpu(content)

    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    closure = tuple(type(cell)(moved(name, cell.cell_contents)) for name, cell in cells)
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)


@contextmanager
def _on_meta() -> Iterator[None]:
    """Let models run on meta: masks are of one text, without a look at positions for several, and nothing autocasts."""
    find, autocast = masking_utils.find_packed_sequence_indices, torch.autocast
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[misc, assignment]  # transformers 4 asks for meta
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, torch.autocast = find, autocast  # type: ignore[misc]
