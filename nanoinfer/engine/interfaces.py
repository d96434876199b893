"""What the parts of an engine know of each other: the base of engines, protocols of what they use, the Listener."""

import collections.abc as abc
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from nanoinfer.config import EngineConfig
from nanoinfer.engine.cache_groups.specs import CacheGroupSpec
from nanoinfer.engine.found import Found
from nanoinfer.engine.interrupts import StepGuard
from nanoinfer.engine.packet import Packet
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.token_masks import Constraint, TokenMasks
from nanoinfer.errors import NanoinferError
from nanoinfer.metrics import EngineMetrics
from nanoinfer.outputs import StreamChunk, failed_chunks
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import Errors
from nanoinfer.text.prompts import PreparedRequest


class Weights(Protocol):
    """Replaces weights of the model, by their names in its checkpoint."""

    def check(self, name: str, tensor: Any) -> object:
        """Raise ModelError unless a tensor can take the place of the weight of this name."""

    def update(self, name: str, tensor: Any, given: dict[Any, str] | None = None) -> None:
        """Check a tensor and copy it there. given: what the update has copied before; see `ModelWeights.check`."""


class Constraints(Protocol):
    """Compiles what limits the tokens of requests, and makes the masks of steps."""

    def compile(self, params: abc.Sequence[SamplingParams]) -> object:
        """Compile what these ask for, and keep it. Raises RequestError where that cannot be done."""

    def is_asked(self, params: abc.Sequence[SamplingParams]) -> bool:
        """Return whether any of these ask for something that `compile` or `add_constraints` makes."""

    def add_constraints(
        self, requests: abc.Mapping[int, PreparedRequest], errors: Errors, use_tqdm: bool = False
    ) -> None:
        """Give requests, by index, their constraints; add what is wrong with a constraint to `errors`."""

    def masks(self, constraints: abc.Sequence[Constraint | None]) -> TokenMasks:
        """Return which tokens a step may draw. constraints: of each token that it draws, or None."""


class SampledStep(Protocol):
    """Holds what a sampled step yields besides tokens."""

    @property
    def errors(self) -> abc.Mapping[int, str]:
        """Why a user's function failed, by the batch_idx of the token that could not be drawn."""

    @property
    def found(self) -> abc.Sequence[Found]:
        """What requests want beside tokens."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Holds the sizes that scheduler and block manager plan by, as a runner finds them. All ranks have the same."""

    max_model_len: int  # tokens of the longest sequence
    num_blocks: int  # of the KV cache
    max_num_seqs: int  # rows: as many as were asked for, or fewer where the memory for their states is short
    groups: tuple[CacheGroupSpec, ...]  # what the layers remember of a sequence, in the order of the block tables
    max_prefix_sharers: int  # the most decode rows for which attention can read a shared prefix once; 0 if it cannot
    whole_prompts: bool  # whether a prompt is computed in one step, as an encoder has to
    computes_beside_host: bool  # whether a launched step is computed while the host goes on; on a CPU it is not


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

    def sleep(self, level: int) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them."""

    def wake_up(self, tags: abc.Set[str]) -> None:
        """Take the memory of these tags again; awake ones stay as they are. Steps can run when all are awake."""

    def close(self) -> None:
        """Free the model and the cache."""


class Action(Enum):
    """What can be asked of a request at any moment. The step that comes next does it, as `Scheduler` says."""

    ABORT = auto()
    PAUSE = auto()
    RESUME = auto()


class ReservedIds:
    """Numbers the requests of an engine: a call reserves ids when it begins, and queues as its prompts are prepared.

    Requests that are not queued yet count as unfinished. What is asked of them meanwhile, such as an abort, is
    remembered until they are queued.
    """

    def __init__(self) -> None:
        self._next = 0
        self._deferred: dict[int, list[Action]] = {}  # by reserved id

    def __len__(self) -> int:
        return len(self._deferred)

    def reserve(self, count: int) -> range:
        """Return the ids of so many new requests, which follow each other."""
        first, self._next = self._next, self._next + count
        ids = range(first, self._next)
        self._deferred |= {request_id: [] for request_id in ids}
        return ids

    def release(self, ids: abc.Iterable[int]) -> None:
        """Forget the ids whose requests were never queued."""
        for request_id in ids:
            self._deferred.pop(request_id, None)

    def take(self, request_id: int) -> list[Action]:
        """Take out the id of a request that is queued, or has ended; return what was asked of it before."""
        return self._deferred.pop(request_id, [])

    def defer(self, action: Action, request_id: int) -> bool:
        """Remember an action on a request that is yet to be queued; False for any other. Safe at any moment."""
        deferred = self._deferred.get(request_id)
        if deferred is None:
            return False
        deferred.append(action)
        return request_id in self._deferred  # another thread may have queued it just now


class Recipient(NamedTuple):
    """Says where a step puts the output of a request, and what is new of its stream."""

    outputs: list[Any]
    chunks: deque[StreamChunk] | None = None  # None if it is not streamed
    prompt_index: int = 0  # in the stream


class Engine(ABC):
    """Takes requests and runs them in steps: the base of LLMEngine, and of several of them behind one.

    config: the user's options. guard: entered for each step. reserved_ids: of requests that are to be added.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.guard = StepGuard()
        self.reserved_ids = ReservedIds()
        self._requests: dict[int, Any] = {}  # by id, until they are handed over
        self._pending_actions: deque[tuple[Action, int]] = deque()  # what the next step is to do to which requests

    @abstractmethod
    def add_request(self, request_id: int, prepared: PreparedRequest, to: Recipient) -> None:
        """Queue a request under a reserved id, on which its draws depend; one with an error ends with it at once."""

    def _refuse(self, request_id: int, prepared: PreparedRequest, to: Recipient) -> None:
        """End a request that has an error."""
        to.outputs.append(prepared.refusal(request_id))
        if to.chunks is not None:
            to.chunks.extend(failed_chunks(request_id, to.prompt_index, range(prepared.sampling_params.n)))
        self.reserved_ids.take(request_id)

    def act_later(self, action: Action, request_ids: abc.Iterable[int]) -> None:
        """Have the next step begin with this action on what is unfinished of these requests.

        Safe at any moment, as in a callback, or where the garbage collector closes a stream.
        """
        for request_id in request_ids:
            if not self.reserved_ids.defer(action, request_id) and request_id in self._requests:
                self._pending_actions.append((action, request_id))

    def is_finished(self) -> bool:
        """Return whether every request has finished and was handed over."""
        return not (self.reserved_ids or self._requests)  # in this order: while a request is queued, it is in both

    def num_unfinished(self) -> int:
        """Return how many requests have not been handed over, including reserved ones."""
        return len(self._requests) + len(self.reserved_ids)

    @abstractmethod
    def step(self) -> None:
        """Compute, and hand over what has finished."""

    @abstractmethod
    def abort(self, request_ids: abc.Collection[int]) -> None:
        """Drop these requests and what they hold; finished ones are ignored."""

    @abstractmethod
    def num_only_paused(self) -> int:
        """Return how many requests are paused, if none but these are left; else 0."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return the work done so far, and what is held now."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""

    @abstractmethod
    def close(self) -> None:
        """Free the model and the cache. Closing twice is fine; other calls then raise EngineClosedError."""

    @abstractmethod
    def check_open(self, is_for_steps: bool = True) -> object:
        """Raise what has closed the engine, or EngineClosedError; EngineStateError where it cannot run steps."""


class Listener:
    """Is told what the engine and its scheduler do, and does nothing; `StepEventListener` overrides every method.

    All calls come from the thread that runs the step or queues the request. Times are those of time.perf_counter.
    """

    def arrived(self, seq: Sequence, time: float) -> None:
        """A sequence was queued for the first time."""

    def paused(self, seq: Sequence) -> None:
        """A sequence computes nothing from now on."""

    def resumed(self, seq: Sequence) -> None:
        """A paused sequence runs again, or waits if it has lost its row and blocks."""

    def preempted(self, seq: Sequence) -> None:
        """A running sequence gave up its row and blocks, and waits to be computed again."""

    def launching(self, batch: ScheduledBatch, started: float) -> None:
        """A step was scheduled, which began at `started`; its work is about to be given to the device."""

    def launched(self, batch: ScheduledBatch) -> None:
        """All its work was given to the device."""

    def collected(self, batch: ScheduledBatch, arrived: float) -> None:
        """Its tokens came, at `arrived`, and were added to their sequences."""

    def failed(self) -> None:
        """A step failed: all that were not collected are forgotten, and their sequences are queued again."""

    def finished(self, seq: Sequence) -> None:
        """A sequence finished and was handed over, or dropped."""

    def stepped(self) -> None:
        """`LLMEngine.step` has done its work."""


SILENT = Listener()
