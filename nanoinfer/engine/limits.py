"""What a runner tells the engine when it is made: how much it takes, and how it computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The sizes that scheduler and block manager plan by. All ranks have the same."""

    max_model_len: int  # tokens of the longest sequence
    num_blocks: int  # of the KV cache
    max_num_seqs: int  # rows: as many as were asked for, or fewer where the memory for their states is short
    num_snapshots: int  # recurrent states that can be kept for prefix hits; 0 where the model has none, or caches none
    window: int | None  # tokens that a token attends to in windowed groups; None if there are no such groups
    num_windowed_groups: int  # groups of layers with a window, each with its own block tables; 0 if there are none
    max_prefix_group_rows: int  # the most decode rows for which attention can read a shared prefix once; 0 if it cannot
    whole_prompts: bool  # whether a prompt is computed in one step, as an encoder has to
    computes_beside_host: bool  # whether a launched step is computed while the host goes on; on a CPU it is not
