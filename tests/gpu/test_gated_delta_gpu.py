"""The kernels of linear attention as compiled for a GPU, against their specifications; and hybrids in CUDA graphs."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.caches.recurrent_states import StateLayout
from nanoinfer.ops.delta_rule.spec import DeltaRuleWeights
from tests.kernels.test_delta_rule_lines import ALL_KERNELS, KERNELS, SPEC, History, Sizes, check_history
from tests.kernels.test_gated_delta import check_prefill, check_step, random_case
from tests.models.test_architectures import GREEDY, HYBRIDS, checkpoint, draw_prompts

__all__ = ["checkpoint"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 2, 128, 128, 4), (2, 3, 24, 12, 2)], ids=["Qwen3.5 9B", "odd sizes"])
def test_a_step_of_the_delta_rule_equals_its_specification(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_step(random_case(*sizes, dtype, "cuda"), 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lens", "starts", "sizes"),
    [((1, 300, 64, 2), (0, 0, 5, 3), (16, 2, 128, 128, 4)), ((3, 130), (2, 0), (1, 2, 24, 12, 2))],
    ids=["Qwen3.5 9B", "odd sizes"],
)
def test_a_prefill_step_of_the_delta_rule_equals_its_specification(
    lens: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_prefill(
        lens, starts, sizes, dtype, decay=0.5, tolerance=1e-3 if dtype == torch.float32 else 3e-2, device="cuda"
    )


@pytest.mark.parametrize("num_lines", [1, 2, 4, 8, None])
@pytest.mark.parametrize("sizes", [(16, 2, 128, 128, 4), (2, 3, 24, 12, 2)], ids=["Qwen3.5 9B", "odd sizes"])
def test_several_tokens_equal_single_steps_over_those_that_counted(sizes: Sizes, num_lines: int | None) -> None:
    check_history(sizes, num_lines, torch.float32, KERNELS, 1e-4, num_steps=12, device="cuda")


@pytest.mark.parametrize("num_lines", [2, 4, 8])
def test_several_tokens_in_16_bits_lose_no_more_than_the_kernel_of_one_token(num_lines: int) -> None:
    sizes = 16, 2, 128, 128, 4
    check_history(sizes, num_lines, torch.bfloat16, ALL_KERNELS, 3e-2, num_steps=12, device="cuda")


def test_many_rows_of_several_tokens_equal_the_specification_and_give_the_same_bits_each_time() -> None:
    """Programs of a key head share inputs that a step reads and others that it writes; nobody may overtake another."""
    num_rows, num_lines, heads, channels, device = 200, 8, 32, 8192, torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def randint(low: int, high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator, device=device).to(dtype)

    layout = StateLayout(1, (heads, 128, 128), (4, channels), torch.float32, num_lines)
    states = layout.allocate(num_rows, 0, device)
    assert states.pending is not None
    states.pending.num_counted[:-1] = randint(0, num_lines + 1)
    positions = randint(20, 5000, torch.int64)
    states.pending.first_positions[:-1] = positions - states.pending.num_counted[:-1]
    for tensor in (*states.pending[2:5], states.matrices, states.conv_inputs):
        tensor.copy_(randn(*tensor.shape))
    states.pending.decays.uniform_(0.5, 1, generator=generator)
    rows = torch.randperm(num_rows, generator=generator, device=device).int()
    inputs = (
        randn(num_rows * num_lines, channels + 4096),
        randn(num_rows * num_lines, 2 * heads),
        rows,
        positions[rows.long()].repeat_interleave(num_lines),
        randint(1, num_lines + 1),
    )
    weights = DeltaRuleWeights(randn(channels, 4), randn(heads), randn(heads), randn(128), 1e-6)
    found = []
    for lines, flush in (SPEC[1:], *[KERNELS[1:]] * 3):
        of_states = states.pending, states.matrices, states.conv_inputs
        pending, matrices, conv_inputs = (deepcopy(each) for each in of_states)
        of_layer = pending.layer(0), matrices[0], conv_inputs[0]
        out = lines(*inputs, *of_layer, weights)
        pending.num_counted[rows.long()] = inputs[-1]  # all count
        flush(matrices, conv_inputs, rows, pending)
        found.append([out, matrices[:, :-1], conv_inputs[:, :-1]])
    expected, first, *others = found
    for ours, theirs in zip(first, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_a_graph_of_several_tokens_reads_anew_how_many_counted() -> None:
    history = History((2, 2, 64, 64, 4), torch.float32, KERNELS, "cuda", seed=0)
    history.states.conv_inputs.zero_()
    states = history.states.layer(0)
    assert states.pending is not None
    lines = [x.clone() for x in history.inputs(2 * 4)[0]]
    rows, positions = history.tensor([2, 0]), history.tensor([0] * 8, torch.int64)
    of_rows = rows, positions, history.tensor([4, 3])
    of_states = states.pending, states.matrices, states.conv_inputs

    def step() -> torch.Tensor:
        return KERNELS.lines(*lines, *of_rows, *of_states, history.weights[0])

    step()  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    eager = deepcopy(states)
    for counts in ([2, 3], [4, 1], [1, 2]):
        for pending in (states.pending, eager.pending):
            assert pending is not None
            pending.num_counted[rows.long()] = history.tensor(counts)
        positions += history.tensor(counts, torch.int64).repeat_interleave(4)
        graph.replay()
        of_eager = eager.pending, eager.matrices, eager.conv_inputs
        expected = KERNELS.lines(*lines, *of_rows, *of_eager, history.weights[0])
        assert torch.equal(out, expected)
        assert out[:7].any()


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_graph_gives_the_tokens_of_steps_without_graphs(checkpoint: Callable[..., Path], architecture: str) -> None:
    folder, prompts = checkpoint(architecture, 0), draw_prompts(0)
    found = []
    for enforce_eager in (True, False):
        options = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 3, "num_kvcache_blocks": 40}
        with LLM(folder, enforce_eager=enforce_eager, max_num_batched_tokens=100, **options) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]
