"""The runner's interface: what the engine needs of whatever runs its steps, on one device or on several."""

from typing import Any, Protocol

from nanoinfer.constraints.rules import StepRules
from nanoinfer.engine.batch import Packet


class Weights(Protocol):
    """Replaces weights of the model, by their names in its checkpoint."""

    def check(self, name: str, tensor: Any) -> object:
        """Raise ModelError unless a tensor can take the place of the weight of this name."""

    def update(self, name: str, tensor: Any) -> None:
        """Check a tensor and copy it there."""


class Runner(Protocol):
    """Runs steps: a ModelRunner, a ParallelRunner, or a fake one in tests."""

    closed: bool
    max_model_len: int  # tokens of the longest sequence
    num_blocks: int  # of the KV cache
    max_group_rows: int  # the most decode rows that attention can read a shared prefix for at once; 0 where it cannot

    @property
    def sleep_level(self) -> int | None:
        """1 or 2, as in `sleep`; None while awake."""

    @property
    def weights(self) -> Weights:
        """What replaces the model's weights."""

    @property
    def unready(self) -> str | None:
        """Why no step can run now, and what to do; None if one can."""

    def launch(self, packet: Packet) -> Any:
        """Start the forward pass of a step, up to its logits."""

    def sample(self, pending: Any, rules: StepRules | None = None) -> Any:
        """Draw the tokens of the step that was just launched, as the rules that it awaits allow."""

    def wait(self, handle: Any) -> list[int]:
        """Return the token ids of a sampled step, once they are there."""

    def sleep(self, level: int) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them."""

    def wake_up(self) -> None:
        """Take the memory again, and be ready for steps."""

    def close(self) -> None:
        """Free the model and the cache."""
