"""Launches steps on the device, and samples their tokens.

It knows nothing of requests: a packet comes in, token ids go out. A step is two launches, `launch` for the forward pass
and `sample` for the tokens, so that the host can still decide in between which tokens a row may draw. Neither waits for
the device, except where a CUDA graph is captured. `DeviceRunner.wait` does, usually while the next step runs.

How the model gets to the device, sleeps and wakes up is in `device_runner.py`.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.device import computing, record_event, to_device
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import AllSections, Header, Packet, UploadedSections, column, read_header
from nanoinfer.engine.side_outputs import SideOutput
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.interface import Model
from nanoinfer.runner.device_state import DeviceState
from nanoinfer.sampling.proposals import Proposals
from nanoinfer.sampling.sampler import Sampled


class LaunchedStep(NamedTuple):
    """Describes a step whose logits are being computed. It must be sampled before the next one is launched."""

    rows: Tensor  # (num_sampled,) int64
    host_rows: list[int]  # the same on the host
    side_outputs: list[SideOutput]  # what prompts yield beside tokens
    proposals: Proposals | None = None  # the tokens that were computed behind the newest ones


class StepHandle(NamedTuple):
    """Holds a sampled step: its results on their way to host memory, and the event that says they have come."""

    token_ids: Tensor  # (num_sampled,) int32, or with proposals (num_sampled, num_tokens)
    side_outputs: list[SideOutput]
    errors: dict[int, str]  # by batch_idx: why a logits processor failed; that sample gets no token
    event: torch.cuda.Event | None  # None on a CPU, where a sampled step is done

    def is_done(self) -> bool:
        return self.event is None or self.event.query()


class ModelRunner:
    """Runs packets on one device, while the model is awake.

    state: the buffers, cache and tables of its steps. backends: compute attention. num_threads: how many CPU threads
    steps have; None leaves the user's own number.
    """

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        backends: AttentionBackends,
        tp: TensorParallel,
        device: torch.device,
        num_threads: int | None,
    ) -> None:
        self.model, self.state, self.tp, self.device = model, state, tp, device
        self._backends, self._num_threads = backends, num_threads

    def launch(self, packet: Packet) -> LaunchedStep:
        """Start the forward pass of a step, up to its logits."""
        with computing(self.device, self._num_threads):
            header = read_header(packet)
            on_host = self.state.read(header, packet)
            on_device = header.on_device(to_device(torch.from_numpy(header.uploaded(packet)), self.device))
            self.state.enter(header, on_host, on_device)
            if header.counts["chunks"]:
                return self._launch_prefill(header, on_host, on_device)
            return self._launch_decode(header, on_host, on_device)

    def _launch_prefill(self, header: Header, on_host: AllSections, on_device: UploadedSections) -> LaunchedStep:
        assert not header.counts["decode_rows"], "both prefill and decode would write the first logits"
        chunks, num_samples = on_host.chunks.tolist(), header.num_prefill_samples
        step = self.planned(self.state.prefill_step(header, on_device.chunks, chunks))
        forward = self.state.prefill_graph(step, len(chunks)) or self.model
        hidden, side_outputs = self.state.pooler.run(forward, step, chunks)
        self._write_logits(step, hidden)
        side_outputs = side_outputs + self.state.sampler.read_prompts(self.model, hidden, chunks)
        return LaunchedStep(
            rows=column(on_device, "chunks", "row")[:num_samples].long(),
            host_rows=[row for row, _, _ in chunks[:num_samples]],
            side_outputs=side_outputs,
        )

    def _launch_decode(self, header: Header, on_host: AllSections, on_device: UploadedSections) -> LaunchedStep:
        rows, num_shared_blocks, num_sharers = on_device.decode_rows.unbind(1)
        shares = column(on_host, "decode_rows", "num_shared_blocks").any()
        batch = DecodeBatch(rows, SharedPrefixes(num_shared_blocks, num_sharers) if shares else None)
        proposals = None
        if header.counts["proposals"]:
            proposals = self.state.enter_proposals(header, on_host, on_device, self.model.packs_lines and not shares)
            has_graphs = self.state.decode_graphs is not None
            batch = proposals.added_to(batch, has_graphs, self.state.sampler.max_row_tokens)
        elif self.state.tables.recurrent_states is not None:
            self.state.tables.recurrent_states.flush(rows)  # a step of one token a row does not add pending tokens
        forward = self.state.decode_graphs.replay if self.state.decode_graphs else self.decode
        forward(batch)
        host_rows = column(on_host, "decode_rows", "row").tolist()
        return LaunchedStep(rows.long(), host_rows, [], proposals)

    def sample(self, launched: LaunchedStep, masks: TokenMasks | None = None) -> StepHandle:
        """Draw the tokens of a launched step, as the masks allow, and start their copy to the host.

        They come in the packet's order: chunks that sample, or decode rows. With proposals, a token that does not count
        is NOT_COUNTED.
        """
        with computing(self.device, self._num_threads):
            if self.model.generates:
                rows, host_rows, _, proposals = launched
                num_lines = len(host_rows) if proposals is None else proposals.num_lines
                logits, first_id = self.state.buffers.logits[:num_lines], self.model.vocab.start
                sampled = self.state.sampler.sample(logits, first_id, rows, host_rows, masks, proposals)
            else:
                sampled = Sampled(torch.empty(0, dtype=torch.int32), [], {})
            return StepHandle(
                token_ids=sampled.token_ids.to("cpu", non_blocking=True),  # into pinned memory
                side_outputs=[*launched.side_outputs, *sampled.logprobs],
                errors=sampled.errors,
                event=record_event(self.device),
            )

    def decode(self, batch: DecodeBatch) -> None:
        """Compute the tokens of a batch, from the tables to the logits: a CUDA graph captures it."""
        self.forward(self.planned(self.state.decode_step(batch)))

    def forward(self, step: ForwardStep) -> Tensor:
        """Compute a planned step up to its logits; return its hidden states (num_tokens, hidden_size)."""
        hidden = self.model(step)
        self._write_logits(step, hidden)
        return hidden

    def planned(self, step: ForwardStep) -> ForwardStep:
        """Return the step with its adapters, and with what attention backends prepare once for all layers."""
        plan, routed = self._backends.plan, None if self.state.routing_table is None else list[Tensor]()
        planned = (plan(metadata, step.kv_cache, table) for table, metadata in enumerate(step.metadata))
        adapters = self.state.adapters.of_tokens(step) if self.state.adapters else None
        return replace(step, metadata=tuple(planned), routed=routed, adapters=adapters)

    def _write_logits(self, step: ForwardStep, hidden: Tensor) -> None:
        if self.tp.symmetric_memory is not None:
            self.tp.symmetric_memory.check_even()
        if step.routed and self.state.routing_table is not None:
            self.state.routing_table.write(step.attention.slot_mapping, step.routed)
        hidden = hidden if step.outputs is None else hidden[step.outputs]
        if self.model.generates:
            self.model.compute_logits(hidden, out=self.state.buffers.logits[: len(hidden)])

    def close(self) -> None:
        """Let go of model and memory, even if the traceback of an error keeps this object. Call it once."""
        del self.model, self.state
