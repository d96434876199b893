"""What is run: loads, which say how many requests of which sizes, and the random requests drawn from them."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests, and their sizes in tokens; lengths are uniform from their least to their most, both included.

    shared_prefix: random tokens that all prompts of a run begin with, before those that `input_len` counts.
    """

    num_seqs: tuple[int, ...]  # one run for each number
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    max_num_seqs: int = 512  # the most that run at once; 512 is nano-vllm's, given to every engine that takes it
    shared_prefix: int = 0

    @property
    def longest(self) -> int:
        """The most tokens that a request can have at its end."""
        return self.shared_prefix + self.input_len[1] + self.output_len[1]


LOADS = {
    "default": Load((256,), input_len=(100, 1024), output_len=(100, 1024)),  # nano-vllm's
    "long": Load((8,), input_len=(32768, 32768), output_len=(512, 512)),
    "small": Load((1, 4, 16), input_len=(128, 512), output_len=(256, 256)),
    "steady": Load((4096,), input_len=(100, 1024), output_len=(100, 1024)),
}
# The same kinds of work, in seconds with the tiny checkpoint.
CPU_LOADS = {
    "default": Load((16,), input_len=(64, 64), output_len=(64, 64)),
    "long": Load((2,), input_len=(2048, 2048), output_len=(32, 32)),
    "small": Load((1, 4, 16), input_len=(32, 128), output_len=(32, 32)),
    "steady": Load((64,), input_len=(8, 64), output_len=(8, 64), max_num_seqs=8),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run: token ids of each prompt, and how many tokens each is to be continued by.

    shared_prefix: how many tokens all prompts begin with.
    """

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]
    shared_prefix: int = 0

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


def draw_workload(seed: int, num_seqs: int, load: Load, vocab_size: int) -> Workload:
    """Requests of the sizes of `load`, drawn as nano-vllm's benchmark draws its own, so that figures compare.

    A shared prefix comes last out of the generator, so the rest is the same without it. Ids stay inside the vocabulary.
    """
    randint = random.Random(seed).randint
    max_id = min(10000, vocab_size - 1)
    prompts = [[randint(0, max_id) for _ in range(randint(*load.input_len))] for _ in range(num_seqs)]
    max_tokens = [randint(*load.output_len) for _ in range(num_seqs)]
    prefix = [randint(0, max_id) for _ in range(load.shared_prefix)]
    return Workload(seed, [prefix + prompt for prompt in prompts], max_tokens, load.shared_prefix)
