"""Small prefill steps of a model of transformers, with what lies between two attentions as CUDA graphs.

The model's code is no list of pieces, as our own decoder is. So a forward pass is captured while it runs: where it
calls attention, it leaves queries, keys and values in buffers, one graph ends, and the next begins with the heads'
outputs, from a buffer too. A replay launches graphs and attentions in turns.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoinfer.device import capturing
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.prefill_graphs import SmallPrefillGraphs
from nanoinfer.models.transformers.attention_interface import handling_attention
from nanoinfer.models.transformers.cached_attention import Attend, CachedAttention, attend_in_order, by_tokens
from nanoinfer.models.transformers.guards import attend_alone
from nanoinfer.models.transformers.split_model import SplitModel


@dataclass(frozen=True, slots=True)
class KeptCall:
    """Holds what goes into an attention call and what comes out, in buffers of (size, heads, dimensions) each.

    sinks: (num_heads,), if the call has them: the model's own, which each replay writes anew or leaves.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    heads: Tensor

    def compute(self, attend: Attend, num_tokens: int) -> None:
        """Attend from the step's own tokens, which padding follows."""
        q, k, v = (x[:num_tokens] for x in (self.query, self.key, self.value))
        self.heads[:num_tokens].copy_(attend(q, k, v, self.sinks))


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """Holds a step of so many tokens as graphs, one more than attention calls. hidden: (size, hidden_size), its result.

    The graphs hold the addresses of the weights, so others are captured when an engine wakes up.
    """

    graphs: list[torch.cuda.CUDAGraph]
    calls: list[KeptCall]
    hidden: Tensor
    pool: Any

    def replay(self, attend: Attend, num_tokens: int) -> Tensor:
        first, *others = self.graphs
        first.replay()
        for call, graph in zip(self.calls, others, strict=True):
            call.compute(attend, num_tokens)
            graph.replay()
        return self.hidden


class TransformersPrefillGraphs(SmallPrefillGraphs):
    """Computes small prefill steps of a model of transformers.

    forward: computes steps with second texts, for which there are no graphs.
    """

    def __init__(
        self,
        model: SplitModel,
        attentions: list[CachedAttention],
        forward: Callable[[ForwardStep], Tensor],
        sizes: list[int],
        always_served: int,
    ) -> None:
        super().__init__(sizes, always_served)
        self._model, self._attentions, self._forward = model, attentions, forward
        device = model.model.device
        self._token_ids = torch.zeros(sizes[-1], dtype=torch.int32, device=device)
        self._positions = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._buffers: dict[tuple[Any, ...], Tensor] = {}  # that all calls use in turns, by what they hold

    def capture(self, size: int, pool: Any) -> CapturedStep:
        self._run(size, lambda call: None)  # compiles and warms up outside the capture, and makes the buffers
        graphs: list[torch.cuda.CUDAGraph] = []
        calls: list[KeptCall] = []
        with ExitStack() as open_graph:

            def next_graph() -> None:
                nonlocal pool
                open_graph.close()
                pool = pool or (graphs[-1].pool() if graphs else None)
                graphs.append(torch.cuda.CUDAGraph())
                open_graph.enter_context(capturing(graphs[-1], pool))

            def keep(call: KeptCall) -> None:
                calls.append(call)
                next_graph()

            next_graph()
            hidden = self._run(size, keep)
        return CapturedStep(graphs, calls, hidden, pool or graphs[-1].pool())

    def compute(self, step: ForwardStep, size: int, graphs: CapturedStep | None) -> Tensor:
        if step.token_types is not None:
            return self._forward(step)
        num_tokens, attend = len(step.token_ids), attend_in_order(self._attentions, step)
        self._token_ids[:num_tokens].copy_(step.token_ids)
        self._positions[:num_tokens].copy_(step.positions)
        if graphs is not None:
            return graphs.replay(attend, num_tokens)[:num_tokens]
        return self._run(size, lambda call: call.compute(attend, num_tokens))[:num_tokens]

    def why_not(self) -> str | None:
        """Return why graphs of a step are not what the step itself is; None if they are.

        The smallest size is captured, and replayed with other tokens, each of which sees itself alone.
        """
        size = self.sizes[0]

        def attend(query: Tensor, key: Tensor, value: Tensor, _sinks: Tensor | None) -> Tensor:
            return attend_alone(None, *(x.transpose(0, 1)[None] for x in (query, key, value)))[0]

        try:
            captured = self.capture(size, None)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        vocab_size = self._model.model.get_input_embeddings().weight.shape[0]
        self._token_ids[:size].copy_((5 + 7 * torch.arange(size)) % vocab_size)
        self._positions[:size].copy_(torch.arange(size))
        found = captured.replay(attend, size).clone()
        expected = self._run(size, lambda call: call.compute(attend, size))
        return None if torch.equal(found, expected) else "its captured step gives other hidden states"

    def _run(self, size: int, compute: Callable[[KeptCall], None]) -> Tensor:
        """Run the step in the inputs; return hidden states (size, hidden_size). compute: computes an attention call."""

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            call = KeptCall(
                query=self._buffer("query", q.shape, v.dtype).copy_(q),
                key=self._buffer("key", k.shape, v.dtype).copy_(k),
                value=self._buffer("value", v.shape, v.dtype).copy_(v),
                sinks=sinks,
                heads=self._buffer("heads", (size, q.shape[1], v.shape[2]), v.dtype),
            )
            compute(call)
            return call.heads.clone()

        with handling_attention(by_tokens(attend)):
            hidden: Tensor = self._model.run(self._token_ids[:size], self._positions[:size])[0][0]
        return hidden

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory filled with zeros, so that padding holds numbers from the first step on."""
        size, *others = shape
        key = name, *others, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self.sizes[-1], *others, dtype=dtype, device=self._token_ids.device)
        return self._buffers[key][:size]
