"""`enable_return_routed_experts`: which experts computed each token, compared with the routers of transformers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nanoinfer import LLM, ConfigError, RequestOutput, SamplingParams, WorkerError, tiny_model_path
from nanoinfer.caches.routing_table import RoutingOnHost, RoutingTable
from tests.control.test_weight_control import save_random
from tests.sampling.test_sampling import prompts

ReferenceModel = Callable[[Path], Any]
PROMPTS = prompts(40, 3, 17, 33, vocab_size=100)
FREE = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
SIZES: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 32}
SIZES |= {"num_hidden_layers": 3, "mlp_only_layers": [1], "decoder_sparse_step": 1, "hidden_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, of which the second has no experts."""
    return save_random(tmp_path_factory.mktemp("moe") / "model", "Qwen3MoeForCausalLM", 0, **SIZES)


def make_llm(folder: Path, **options: Any) -> LLM:
    options = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64, "max_model_len": 128, **options}
    return LLM(folder, enable_return_routed_experts=True, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder) as llm:
        yield llm


def routed(output: RequestOutput, sample: int = 0) -> NDArray[Any]:
    found = output.outputs[sample].routed_experts
    assert found is not None
    return found


def check_routing(model: Any, output: RequestOutput, start: int = 0) -> None:
    """Compare with the experts that transformers chooses, in order, for all but the last token."""
    for completion in output.outputs:
        token_ids = output.prompt_token_ids + completion.token_ids
        with torch.inference_mode():
            router_logits = model(torch.tensor([token_ids[:-1]]), output_router_logits=True).router_logits
        found = routed(output, completion.index)
        assert found.shape == (len(token_ids) - 1 - start, 3, 3)
        for layer, logits in zip((0, 2), router_logits, strict=True):
            assert found[:, layer].tolist() == logits.topk(3, dim=-1).indices[start:].tolist()
        assert not found[:, 1].any(), "a layer without experts"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "overlap": False},
        {"num_kvcache_blocks": 8},  # too few for all: some are preempted
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_the_experts_are_those_that_transformers_chooses(
    folder: Path, reference_model: ReferenceModel, options: dict[str, Any]
) -> None:
    with make_llm(folder, **options) as llm:
        llm.engine.scheduler.reserved_tokens = 0
        long = replace(FREE, max_tokens=30)
        outputs = llm.generate(PROMPTS, [long, replace(FREE, n=3), long, long], use_tqdm=False)
        assert (llm.get_metrics().num_preemptions > 0) == ("num_kvcache_blocks" in options)
    for output in outputs:
        check_routing(reference_model(folder), output)


def test_prefix_hits_bring_their_routing_along(llm: LLM, folder: Path, reference_model: ReferenceModel) -> None:
    """Two blocks of 16 are shared, and 8 tokens of the third are copied."""
    outputs = [llm.generate(prompt, FREE, use_tqdm=False)[0] for prompt in (PROMPTS[0], [*PROMPTS[0], 7, 8, 9])]
    assert [output.num_cached_tokens for output in outputs] == [0, 40]
    for output in outputs:
        check_routing(reference_model(folder), output)


def test_blocks_that_windows_give_back_keep_the_routing(tmp_path: Path, reference_model: ReferenceModel) -> None:
    kinds = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}
    folder = save_random(tmp_path / "windows", "GptOssForCausalLM", 0, **kinds, max_position_embeddings=128)
    model, [prompt] = reference_model(folder), prompts(60, vocab_size=100)
    with make_llm(folder) as llm:
        assert llm.engine.block_manager.num_tables > 1
        for given in (prompt, prompt, [*prompt[:50], 1, 2, 3]):
            [output] = llm.generate(given, replace(FREE, max_tokens=30), use_tqdm=False)
            ids = torch.tensor([(given + output.token_ids)[:-1]])
            with torch.inference_mode():
                router_logits = model(ids, output_router_logits=True).router_logits
            for layer, logits in enumerate(router_logits):
                expected = logits.view(ids.shape[1], -1).topk(2).indices.sort(dim=1).values
                assert np.sort(routed(output)[:, layer], axis=1).tolist() == expected.tolist()
        assert (output.num_cached_tokens or 0) > 0


def test_the_routing_of_the_prompt_can_be_left_out(llm: LLM, folder: Path, reference_model: ReferenceModel) -> None:
    for start in (1, 39, 40):
        params = replace(FREE, routed_experts_prompt_start=start)
        check_routing(reference_model(folder), llm.generate(PROMPTS[0], params, use_tqdm=False)[0], start)
    [output] = llm.generate(PROMPTS[0], replace(FREE, routed_experts_prompt_start=1000), use_tqdm=False)
    assert len(routed(output)) == 7, "all of the prompt, and no more"


def test_a_stop_string_and_an_abort_leave_what_was_computed(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], replace(FREE, max_tokens=1), use_tqdm=False)
    assert len(routed(output)) == 40
    request_id = llm.add_request(PROMPTS[0], replace(FREE, max_tokens=50))
    for _ in range(5):
        assert llm.step() == []
    llm.abort(request_id)
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert 40 <= len(routed(outputs[0])) == 40 + len(outputs[0].token_ids) - 1
    request_id = llm.add_request(PROMPTS[0], FREE)
    llm.abort(request_id)
    [waiting] = llm.step()
    assert len(routed(waiting)) == 0, "nothing of it was computed"


@pytest.mark.parametrize("layers", [[0, 1], [1]], ids=["all layers", "some"])
def test_outputs_do_not_hold_the_memory_that_their_ids_came_in(layers: list[int]) -> None:
    ids = torch.ones(4, len(layers), 3, dtype=torch.uint8)
    found = RoutingOnHost(ids, None, layers, num_layers=2).to_array()
    assert found[:, layers].tolist() == ids.tolist()
    assert not np.shares_memory(found, ids.numpy())


def test_an_error_that_closes_the_engine_is_the_one_that_is_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(folder) as llm:
        runner = llm.engine.runner

        def fail(_handle: Any) -> list[int]:
            runner.close()
            raise WorkerError("rank 1 was ended")

        monkeypatch.setattr(runner, "wait", fail)
        with pytest.raises(WorkerError, match="rank 1 was ended"):
            llm.generate(PROMPTS, FREE, use_tqdm=False)
        assert llm.is_finished()


def test_nothing_is_returned_unless_it_is_asked_for(folder: Path) -> None:
    with LLM(folder, device="cpu", num_kvcache_blocks=4, max_model_len=128) as llm:
        [output] = llm.generate([1, 2], FREE, use_tqdm=False)
        assert output.outputs[0].routed_experts is None
        assert llm.engine.runner.model_runner.state.routing_table is None  # type: ignore[union-attr]


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts=True, and .* has no experts; leave it out"):
        LLM(tiny_model_path(), device="cpu", enable_return_routed_experts=True)


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.int16)])
def test_ids_are_as_small_as_they_can_be_and_padding_is_written_beside_the_cache(
    llm: LLM, num_experts: int, dtype: Any
) -> None:
    moe = llm.engine.runner.setup.model_config.moe  # type: ignore[union-attr]
    assert moe is not None
    kv_cache: Any = SimpleNamespace(num_blocks=2, block_size=4, device=torch.device("cpu"), id_strides=[1])
    table = RoutingTable(replace(moe, num_experts=num_experts), kv_cache)
    largest = torch.tensor([[num_experts - 1, 1, 2], [3, 4, 5], [9, 9, 9]], dtype=torch.int32)
    table.write(torch.tensor([6, 0, -1]), [largest, largest + 0])
    found = table.read([1, 0], 2, 6).to_array()
    assert found.dtype == dtype
    assert found[0].tolist() == [[num_experts - 1, 1, 2], [0, 0, 0], [num_experts - 1, 1, 2]]
    assert found[2].tolist() == [[3, 4, 5], [0, 0, 0], [3, 4, 5]]
    assert not found[[1, 3]].any()
