"""What the workers are told of a step's rules: for which lines there are any.

That is all they need to do the same as rank 0, which has the masks and the users' functions. It sends them the masks,
and the logits that functions have changed, from device to device: masks can be larger than the whole ring.
"""

import numpy as np
from numpy.typing import NDArray

from nanoinfer.constraints.rules import RowMasks, StepRules

Message = NDArray[np.int32]  # how many lines grammars, token sets and functions are for, then these lines


def pack_rules(rules: StepRules) -> Message:
    of_grammars, of_token_sets = (masks.lines if masks else [] for masks in (rules.grammars, rules.token_sets))
    lists = of_grammars, of_token_sets, list(rules.functions)
    return np.array([*map(len, lists), *of_grammars, *of_token_sets, *rules.functions], np.int32)


def read_rules(message: Message) -> StepRules:
    """Return the rules without the masks' bits and without functions."""
    numbers = message.tolist()
    num_grammars, num_token_sets = numbers[:2]
    lines, no_bits = numbers[3:], np.empty((0, 0), np.int32)
    of_grammars, lines = lines[:num_grammars], lines[num_grammars:]
    of_token_sets, of_functions = lines[:num_token_sets], lines[num_token_sets:]
    return StepRules(
        RowMasks(of_grammars, no_bits), RowMasks(of_token_sets, no_bits), {line: ((), []) for line in of_functions}
    )
