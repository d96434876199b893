"""Adapters on a GPU: compiled kernels against their specification, graphs that serve any adapters, whole engines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, LoRARequest, SamplingParams
from nanoinfer.device import capturing
from nanoinfer.models.prefill_graphs import STEPS_BEFORE_CAPTURE
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve, few_rows_product
from nanoinfer.ops.lora.spec import LoRARows, add_lora, gated_with_lora
from tests.gpu.test_engine_gpu import assert_part_at_near_ties
from tests.lora.adapters import merge, random_products, request, write_adapter
from tests.models.test_architectures import draw_prompts

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ALL = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"


@pytest.mark.parametrize(
    ("dtype", "num_slots", "max_rank", "num_tokens"),
    [
        *((torch.bfloat16, *slots, number) for slots in ((1, 16), (64, 8)) for number in (1, 3, 16, 256, 2000, 9000)),
        *((torch.bfloat16, *slots, number) for slots in ((4, 64), (2, 256), (3, 5)) for number in (3, 200)),
        *((dtype, 8, 16, number) for dtype in (torch.float16, torch.float32) for number in (1, 200, 2000)),
    ],
    ids=str,
)
def test_compiled_products_equal_their_specification(
    dtype: torch.dtype, num_slots: int, max_rank: int, num_tokens: int
) -> None:
    for num_inputs, sizes in ((1024, (2048, 1024, 1024)), (3072, (1000,)), (100, (70, 70))):
        slots = [(7 * token) % (num_slots + 1) for token in range(num_tokens)]
        x, out, rows, matrices = random_products(slots, num_slots, num_inputs, sizes, max_rank, dtype, "cuda")
        wide = type(matrices)(matrices.a.float(), matrices.b.float(), sizes)
        wanted = out.float()
        add_lora.__wrapped__(wanted, x.float(), rows, wide)  # type: ignore[attr-defined]
        before = out.clone()
        add_lora(out, x, rows, matrices)
        scale = wanted.abs().max() if num_tokens else 1.0
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(out.float() / scale, wanted / scale, atol=tolerance, rtol=0)
        has_none = rows.slots == num_slots
        assert torch.equal(out[has_none], before[has_none])
        if len(sizes) == 2:
            a = random_products(slots, num_slots, sizes[0], (8,), max_rank, dtype, "cuda")[3].a
            activated, shrunk = gated_with_lora(before, x, rows, matrices, silu_and_mul, a)
            torch.testing.assert_close(activated, silu_and_mul(out), atol=tolerance * float(scale), rtol=0)
            assert shrunk is None or max_rank <= 64
            if shrunk is not None:
                of_token = a[rows.slots.clamp(max=num_slots - 1).long()].float()  # (num_tokens, max_rank, inputs)
                inner = (of_token @ activated.float().unsqueeze(2)).squeeze(2)
                torch.testing.assert_close(
                    shrunk.sum(0)[~has_none], inner[~has_none], atol=tolerance * float(inner.abs().max()), rtol=0
                )


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_captured_product_serves_whichever_adapters_its_rows_have(num_tokens: int) -> None:
    x, out, rows, matrices = random_products([0] * num_tokens, 3, 512, (256, 64), 16, torch.bfloat16, "cuda")
    first, graph = out.clone(), torch.cuda.CUDAGraph()
    add_lora(out, x, LoRARows(rows.slots), matrices)  # compiles
    with capturing(graph, None):
        add_lora(out, x, LoRARows(rows.slots), matrices)
    for shift in range(4):
        slots = (torch.arange(num_tokens, device="cuda") + shift) % 4  # 3: none
        rows.slots.copy_(slots)
        out.copy_(first)
        graph.replay()
        wanted = first.clone()
        add_lora(wanted, x, LoRARows(slots.int()), matrices)
        torch.testing.assert_close(out, wanted, atol=0, rtol=0)


def test_outputs_are_awaited_from_a_kernel_that_lets_the_next_one_start_early() -> None:
    """Where the inputs are shrunk already, the product itself comes right before the expansion of its adapters."""
    x, first, rows, matrices = random_products([0, 1], 2, 4096, (8192,), 16, torch.bfloat16, "cuda")
    weight, shrunk = torch.randn(8192, 4096, device="cuda").bfloat16(), torch.randn(3, 2, 16, device="cuda")
    if not few_rows_kernels_serve(2, weight):
        pytest.skip("this GPU has no kernels that start early")

    def product() -> torch.Tensor:
        out = few_rows_product(x, weight)
        add_lora(out, x, rows, matrices, shrunk)
        return out

    wanted = first.copy_(few_rows_product(x, weight)).float()
    inner = shrunk.sum(0).bfloat16().float()  # (2, 16)
    wanted += torch.stack([matrices.b[row].float() @ inner[row] for row in range(2)])
    product()  # compiles
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, None):
        outs = [product() for _ in range(8)]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            torch.testing.assert_close(out.float(), wanted, atol=0.02 * float(wanted.abs().max()), rtol=0)


@pytest.fixture(scope="module")
def adapters(random_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The base model, and (request, merged checkpoint) of three adapters."""
    base, folder = random_checkpoint(hidden_size=256, intermediate_size=512), tmp_path_factory.mktemp("adapters")
    found = []
    for seed in range(3):
        adapter = write_adapter(base, folder / f"{seed}", seed, ALL, std=0.1)
        found.append((request(adapter, seed + 1), merge(base, adapter, folder / f"merged {seed}")))
    return [base, *found]


@pytest.mark.parametrize("max_loras", [3, 1])
def test_sequences_have_the_tokens_of_their_merged_checkpoints(adapters: list[Any], max_loras: int) -> None:
    """In float32, whose attention has no graphs, with steps without adapters between those with some."""
    base, *pairs = adapters
    common: dict[str, Any] = {"dtype": "float32", "gpu_memory_utilization": 0.3, "max_model_len": 128}
    prompts = draw_prompts(0, (29, 30, 1, 16, 40, 63))
    wanted = []
    for folder in (base, *(merged for _, merged in pairs)):
        with LLM(folder, **common) as llm:
            wanted.append([output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
    given: list[LoRARequest | None] = [None, *(one for one, _ in pairs)]
    with LLM(base, enable_lora=True, max_loras=max_loras, **common) as llm:
        for num_prompts in (1, 2, 6):
            plain = llm.generate(prompts[:num_prompts], GREEDY, use_tqdm=False)
            assert [output.token_ids for output in plain] == wanted[0][:num_prompts]
            mixed = llm.generate(
                [prompt for prompt in prompts[:num_prompts] for _ in given],
                GREEDY,
                use_tqdm=False,
                lora_request=given * num_prompts,
            )
            for index, its in enumerate(wanted):
                assert [output.token_ids for output in mixed[index :: len(given)]] == its[:num_prompts]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_graphs_and_eager_steps_with_adapters_give_the_same_tokens(
    adapters: list[Any], quantization: str | None
) -> None:
    """In bfloat16, as many rows as a graph has, so that products have the same shape; each adapter has its own."""
    base, *pairs = adapters
    prompts, params = draw_prompts(1, [20] * 16), replace(GREEDY, logprobs=5)
    given: list[LoRARequest | None] = [None, *(one for one, _ in pairs)] * 4
    common: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "max_model_len": 128}
    answers = []
    for eager in (False, True):
        with LLM(base, enable_lora=True, max_loras=3, enforce_eager=eager, quantization=quantization, **common) as llm:
            plain = llm.generate(prompts, params, use_tqdm=False)
            mixed = llm.generate(prompts, params, use_tqdm=False, lora_request=given)
            answers.append([*plain, *mixed])
            state: Any = llm.engine.runner.model_runner.state  # type: ignore[union-attr]
            graphs = state.graphs_by_use[1]
            assert (graphs is None) == eager
            assert graphs is None or graphs._graphs
    num_equal = sum(assert_part_at_near_ties(one, other) for one, other in zip(*answers, strict=True))
    assert num_equal >= 28, f"{num_equal} of 32 answers agree"
    for one, without, its in zip(given, answers[0][:16], answers[0][16:], strict=True):
        if one is None:
            assert_part_at_near_ties(without, its)
        else:
            assert without.token_ids != its.token_ids


def test_adapters_that_change_places_while_others_run_have_their_own_tokens(adapters: list[Any]) -> None:
    """Two slots and three adapters, of which one always waits: each is copied while steps with another one run."""
    base, *pairs = adapters
    common: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "max_model_len": 128}
    prompts = draw_prompts(2, [20] * 24)
    params = [replace(GREEDY, max_tokens=4 + 5 * (index % 4), logprobs=5) for index in range(24)]
    given = [pairs[(index // 2) % 3][0] for index in range(24)]
    with LLM(base, enable_lora=True, max_loras=2, max_num_seqs=4, **common) as llm:
        mixed = llm.generate(prompts, params, use_tqdm=False, lora_request=given)
    with LLM(base, enable_lora=True, max_loras=3, max_num_seqs=4, overlap=False, **common) as llm:
        wanted = llm.generate(prompts, params, use_tqdm=False, lora_request=given)
    num_equal = sum(assert_part_at_near_ties(one, other) for one, other in zip(wanted, mixed, strict=True))
    assert num_equal >= 20, f"{num_equal} of 24 answers agree"


def test_graphs_of_small_prefill_steps_serve_whichever_adapters_the_tokens_have(adapters: list[Any]) -> None:
    """The first steps of a size run without graphs, on as many rows, so later ones give the same tokens."""
    base, *pairs = adapters
    common: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "max_model_len": 128}
    prompts, given = draw_prompts(3, (20, 31, 9, 40)), [None, *(one for one, _ in pairs)]
    with LLM(base, enable_lora=True, max_loras=3, enable_prefix_caching=False, **common) as llm:
        answers = []
        for turn in range(2 * STEPS_BEFORE_CAPTURE):
            first = turn % STEPS_BEFORE_CAPTURE
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=given[first:] + given[:first])
            answers.append([output.token_ids for output in outputs])
        state: Any = llm.engine.runner.model_runner.state  # type: ignore[union-attr]
        assert state.adapters.prefill_graphs.small._graphs
    assert answers[:STEPS_BEFORE_CAPTURE] == answers[STEPS_BEFORE_CAPTURE:]
    assert answers[0] != answers[1] != answers[2]
