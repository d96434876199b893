"""Holds the tokens of one sample of a request, and how far the engine has come with them."""

import struct
from array import array
from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any

import xxhash

from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.stopping import Stopping, StopTokens
from nanoinfer.engine.token_masks import Constraint
from nanoinfer.sampling_params import SamplingParams

NOT_QUEUED = Stopping(StopTokens(frozenset(), frozenset()), max_num_tokens=0, min_tokens=0)


class SequenceStatus(Enum):
    WAITING = auto()  # in the queue, holds no blocks and no row
    RUNNING = auto()  # admitted, not finished; holds row and blocks until `_release_ending` gives them to others
    PAUSED = auto()  # computes nothing; if it was running, it holds row and blocks until others need them
    FINISHED = auto()  # done or aborted, holds nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """Holds a prompt and one completion of it, as the scheduler and the block manager see it.

    `num_tokens` may run ahead of `token_ids`: a token that the device has sampled and the host has not collected is
    counted (in `num_pending_tokens`) before its id is known. `num_computed_tokens` counts the tokens whose keys and
    values are in the cache, or will be once every step launched so far has run. A sampled token gets its keys and
    values in the next step, so the last token of a sequence needs none.
    """

    seq_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int = 0  # of its random stream, an int64
    priority: int = 0  # higher runs first
    request_id: int = 0
    sample: int = 0  # which of the request's completions it is
    identity: Hashable = None  # what its keys and values depend on beside tokens; only equal identities share prefixes
    adapter: Any = None  # an Adapter of `lora/` that its layers add; None for none
    prompt_logprobs_start: int | None = None  # first prompt token whose log-probability is still wanted
    packed_ids: InitVar[bytes | None] = None  # prompt_token_ids as int32, where somebody has packed them
    constraint: Constraint | None = None  # such as a grammar, which limits its tokens
    hidden_states_request: HiddenStatesRequest | None = None  # which hidden states are wanted; None once all have come
    stopping: Stopping = NOT_QUEUED  # what ends it: `Scheduler.add` sets it
    num_prompt_tokens: int = field(init=False)
    token_ids: "array[int]" = field(init=False)  # prompt and collected completion, as int32
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    error: Any = None  # a RequestError: why the runner cannot draw a token
    row: int | None = None  # in the device's tables, while running
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission
    # Written by the block manager only:
    block_table: list[int] = field(default_factory=list)  # block i holds tokens [i * block_size, (i + 1) * block_size)
    num_slots: int = 0  # tokens that its blocks have room for, in all tables
    prefix_hashes: list[tuple[int, bytes]] = field(default_factory=list)  # (chained hash, tokens) of each full block
    prefix_serials: list[int] = field(default_factory=list)  # cache entry of each block computed so far

    def __post_init__(self, packed_ids: bytes | None) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.token_ids = array("i", self.prompt_token_ids if packed_ids is None else packed_ids)

    @property
    def prefix_root(self) -> tuple[Hashable]:
        """The parent of its first block in the prefix cache, where other blocks have an entry's serial."""
        return (self.identity,)

    @property
    def queue_key(self) -> tuple[int, int]:
        """Its place among all sequences: lower runs first."""
        return -self.priority, self.seq_id

    @property
    def held_row(self) -> int:
        """Its row, while it holds one."""
        assert self.row is not None, f"sequence {self.seq_id} has no row"
        return self.row

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def max_cached_tokens(self) -> int:
        """How many of its tokens may come from the prefix cache.

        The last token is always computed, since its logits are needed. The log-probability of a prompt token needs
        the logits of the token before it, and a hidden state needs its token: these and all later ones are computed.
        """
        most = (self.prompt_logprobs_start or len(self.token_ids)) - 1
        return most if self.hidden_states_request is None else min(most, self.hidden_states_request.first)

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()


def seed_of(params: SamplingParams, engine_seed: int, request_id: int, sample: int) -> int:
    """Return the seed of a sample's own random stream, so that equal prompts differ and batches do not matter."""
    source = (params.seed,) if params.seed is not None else (engine_seed, request_id)
    return xxhash.xxh64_intdigest(struct.pack(f"<{len(source) + 1}q", *source, sample)) >> 1
