"""Defines what the parts of an engine know of each other: protocols, and the Listener."""

import collections.abc as abc
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nanoinfer.engine.cache_groups.specs import CacheGroupSpec
from nanoinfer.engine.packet import Packet
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.side_outputs import SideOutput
from nanoinfer.engine.token_masks import Constraint, TokenMasks
from nanoinfer.errors import NanoinferError
from nanoinfer.integers import ceil_div
from nanoinfer.metrics import StepEvent
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import Errors
from nanoinfer.text.prompts import PreparedRequest


class Weights(Protocol):
    """Replaces weights of the model, by their names in its checkpoint."""

    def check(self, name: str, tensor: Any) -> object:
        """Raise ModelError unless a tensor can take the place of the weight of this name."""

    def update(self, name: str, tensor: Any, given: dict[Any, str] | None = None) -> None:
        """Check a tensor and copy it there. given: what the update has copied before; see `ModelWeights.check`."""


class ConstraintManager(Protocol):
    """Compiles the constraints of requests, and makes the masks of steps."""

    def compile(self, params: abc.Sequence[SamplingParams]) -> object:
        """Compile the constraints that these ask for, and keep them. Raises RequestError if one cannot be compiled."""

    def is_asked(self, params: abc.Sequence[SamplingParams]) -> bool:
        """Return whether any of these ask for something that `compile` or `add_constraints` makes."""

    def takes_time(self, params: abc.Sequence[SamplingParams]) -> bool:
        """Return whether compiling takes time for any of these, and should be done for all of them at once."""

    def add_constraints(
        self, requests: abc.Mapping[int, PreparedRequest], errors: Errors, use_tqdm: bool = False
    ) -> None:
        """Give requests, by index, their constraints; add the error of a wrong constraint to `errors`."""

    def masks(
        self,
        constraints: abc.Sequence[Constraint | None],
        proposals: abc.Sequence[abc.Sequence[int]] = (),
        num_tokens: int = 1,
    ) -> TokenMasks:
        """Return which tokens a step may draw. constraints: of each sequence that it draws for, or None.

        proposals: of each sequence, where the step draws `num_tokens` tokens of each as if these were right.
        """


class SampledStep(Protocol):
    """Holds what a sampled step yields besides tokens."""

    @property
    def errors(self) -> abc.Mapping[int, str]:
        """Why a user's function failed, by the batch_idx of the token that could not be drawn."""

    @property
    def side_outputs(self) -> abc.Sequence[SideOutput]:
        """What requests want beside tokens."""


class FailedImages(NamedTuple):
    """Says why images could not be encoded, by their ids, and why positions could not be counted, by prompts' rows."""

    images: abc.Mapping[int, str] = {}
    rows: abc.Mapping[int, str] = {}


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Holds the sizes that scheduler and block manager plan by, as a runner finds them. All ranks have the same."""

    max_model_len: int  # tokens of the longest sequence
    num_blocks: int  # of the KV cache
    max_num_seqs: int  # rows: as many as were asked for, or fewer where memory is short
    max_num_batched_tokens: int  # of a prefill step: as many as were asked for, or fewer where memory is short
    cache_specs: tuple[CacheGroupSpec, ...]  # what the layers remember of a sequence, in the order of the block tables
    max_prefix_sharers: int  # the most decode rows for which attention can read a shared prefix once; 0 if it cannot
    whole_prompts: bool  # no chunked prefill: a prompt is computed in one step, as an encoder has to
    computes_beside_host: bool  # whether a launched step is computed while the host goes on; on a CPU it is not
    whole_images: bool = False  # whether an image is computed in one step, because its tokens see all of it
    max_row_tokens: int = 1  # the most tokens of a decode row: the newest one, and proposals
    packs_lines: bool = False  # whether decode rows of several tokens need no padding between them

    @property
    def max_chunk_tokens(self) -> int:
        """The most tokens of a sequence that one step computes, in prefill or in decode."""
        return max(self.max_num_batched_tokens, self.max_row_tokens)


FEW_ROWS = 16  # up to so many, padding between rows of several tokens costs a GPU nothing


def packed_step(num_rows: int) -> int:
    """Return of what number decode steps of so many rows compute a multiple of packed lines.

    Their numbers of lines are few, because each has a CUDA graph of its own.
    """
    return ceil_div(num_rows, 128) * 128


def row_sizes(max_row_tokens: int) -> list[int]:
    """Return how many tokens a row may have in decode steps with proposals: the newest one, and 1, 2, 4, ... others.

    These are few numbers, because each has CUDA graphs of its own.
    """
    most = max_row_tokens - 1
    return [1 + number for number in sorted({*(1 << n for n in range(most.bit_length())), most} - {0})]


class Runner(Protocol):
    """Runs steps, on one device or on several: a DeviceRunner, a ParallelRunner, or a fake one in tests."""

    closed: bool
    failure: NanoinferError | None  # what calls raise if an error has closed it (`closed_by`)
    limits: RunnerLimits

    @property
    def sleeping_tags(self) -> abc.Set[str]:
        """Which of SLEEP_TAGS sleep: none, both, or "kv_cache" alone, since the weights wake up first."""

    @property
    def weights(self) -> Weights:
        """What replaces the model's weights."""

    @property
    def unready_reason(self) -> str | None:
        """Why no step can run now, and what to do; None if one can."""

    def launch(self, packet: Packet) -> Any:
        """Start the forward pass of a step, up to its logits."""

    def sample(self, launched: Any, masks: TokenMasks | None = None) -> SampledStep:
        """Draw the tokens of the step that was just launched, as the masks that it awaits allow."""

    def wait(self, handle: Any) -> list[int]:
        """Return the token ids of a sampled step, once they are there."""

    def read_routed_experts(self, block_ids: list[int], start: int, end: int) -> Any:
        """Start to copy the experts of positions [start, end) of the sequence with these blocks; `to_array` waits."""

    def hold_image(
        self, image_id: int, token_ids: abc.Sequence[int], tensors: abc.Mapping[str, Any], make_tensors: Any = None
    ) -> None:
        """Keep an image that packets will name by this id: what stands in its place, and a model's inputs for it.

        make_tensors: makes the inputs once more, so that they may be let go; None where nothing can.
        """

    def drop_images(self, image_ids: abc.Sequence[int]) -> None:
        """Forget images that packets will not name any more."""

    def take_failed_images(self) -> FailedImages:
        """Return where the model failed with images in launched steps; each failure once.

        What is computed of their requests is of no use.
        """

    def sleep(self, level: int) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them."""

    def wake_up(self, tags: abc.Set[str]) -> None:
        """Take the memory of these tags again; awake ones stay as they are. Steps can run when all are awake."""

    def close(self) -> None:
        """Free the model and the cache."""


class Listener:
    """Hears what the engine and its scheduler do, and ignores it; `StepEventListener` overrides every method.

    All calls come from the thread that runs the step or queues the request. Times are those of time.perf_counter.
    """

    def arrived(self, seq: Sequence, time: float) -> None:
        """Hear that a sequence was queued for the first time."""

    def paused(self, seq: Sequence) -> None:
        """Hear that a sequence computes nothing from now on."""

    def resumed(self, seq: Sequence) -> None:
        """Hear that a paused sequence runs again, or waits if it has lost its row and blocks."""

    def preempted(self, seq: Sequence) -> None:
        """Hear that a running sequence gave up its row and blocks, and waits to be computed again."""

    def launching(self, batch: ScheduledBatch, started: float) -> None:
        """Hear that a step was scheduled, which began at `started`; its work is about to be given to the device."""

    def launched(self, batch: ScheduledBatch) -> None:
        """Hear that all work of a step was given to the device."""

    def collected(self, batch: ScheduledBatch, arrived: float) -> None:
        """Hear that the tokens of a step came, at `arrived`, and were added to their sequences."""

    def failed(self) -> None:
        """Hear that a step failed: all steps in flight are forgotten, and their sequences are queued again."""

    def finished(self, seq: Sequence) -> None:
        """Hear that a sequence finished and was handed over, or dropped."""

    def stepped(self) -> abc.Iterable[StepEvent]:
        """Return the events of the steps that `LLMEngine.step` has collected, now that it has done its work."""
        return ()


SILENT = Listener()
