"""Adapters on a GPU: compiled kernels against their specification, graphs that serve any adapters, whole engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, LoRARequest, SamplingParams
from nanoinfer.device import capturing
from nanoinfer.ops.lora.spec import LoRARows, add_lora
from tests.lora.adapters import merge, random_products, request, write_adapter
from tests.models.test_architectures import draw_prompts

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ALL = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_slots", "max_rank"), [(1, 16), (8, 16), (64, 8), (4, 64), (2, 256), (3, 5)])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 200, 256, 2000])
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


@pytest.fixture(scope="module")
def adapters(random_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The base model, and (request, merged checkpoint) of three adapters."""
    base, folder = random_checkpoint(hidden_size=256, intermediate_size=512), tmp_path_factory.mktemp("adapters")
    found = []
    for seed in range(3):
        adapter = write_adapter(base, folder / f"{seed}", seed, ALL, std=0.1)
        found.append((request(adapter, seed + 1), merge(base, adapter, folder / f"merged {seed}")))
    return [base, *found]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_loras": 1}], ids=str)
def test_sequences_have_the_tokens_of_their_merged_checkpoints(adapters: list[Any], options: dict[str, Any]) -> None:
    """In float32, in decode graphs of several sizes, with steps without adapters between those with some."""
    base, *pairs = adapters
    common: dict[str, Any] = {"dtype": "float32", "gpu_memory_utilization": 0.3, "max_model_len": 128}
    prompts = draw_prompts(0, (29, 30, 1, 16, 40, 63))
    wanted = []
    for folder in (base, *(merged for _, merged in pairs)):
        with LLM(folder, **common) as llm:
            wanted.append([output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
    given: list[LoRARequest | None] = [None, *(one for one, _ in pairs)]
    with LLM(base, enable_lora=True, **{"max_loras": 3, **options}, **common) as llm:
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
        state: Any = llm.engine.runner.model_runner.state  # type: ignore[union-attr]
        graphs = state.graphs_by_use[1]
        assert (graphs is None) == bool(options.get("enforce_eager"))
        assert graphs is None or graphs._graphs
