"""Engines in processes that somebody else has started: gloo on a CPU, as torchrun would start them."""

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from nanoinfer import LLM, ConfigError, SamplingParams, StructuredOutputsParams, WorkerError, tiny_model_path
from nanoinfer.checkpoint.loader import iterate_weights
from nanoinfer.executor.external_runner import join_group, own_device
from nanoinfer.text.prompts import PromptProcessor

HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
FREE = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, logprobs=1)
PARAMS = [FREE, replace(FREE, temperature=0), replace(FREE, top_p=0.8, presence_penalty=1.0, n=2)]
PARAMS += [replace(FREE, bad_words=["1"], logits_processors=[lambda _, logits: -logits]), FREE, FREE]
PROMPTS = ["Sort 3, 1", "What is 2", "Spell eagle", "Count", [5, 6, 7] * 20, [5, 6, 7] * 22]
OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64, "max_model_len": 128}
EXTERNAL: dict[str, Any] = {**OPTIONS, "distributed_executor_backend": "external_launcher"}


def said(llm: LLM, prompts: list[Any] = PROMPTS, params: list[SamplingParams] = PARAMS) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def in_processes(target: Callable[..., Any], folder: Path, count: int = 2) -> list[Any]:
    """Run `target(rank)` in so many processes of one process group, and return what each has returned."""
    arguments = (count, str(folder), target)
    torch.multiprocessing.start_processes(run_rank, arguments, nprocs=count, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def run_rank(rank: int, count: int, folder: str, target: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(target(rank)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def one_model_on_all_ranks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with LLM(tiny_model_path(), tensor_parallel_size=2, **EXTERNAL) as llm:
        found["said"] = said(llm)
        weights = dict(iterate_weights(tiny_model_path()))
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.update_weights(
            {name: -tensor if name.endswith("norm.weight") else tensor for name, tensor in weights.items()}
        )
        llm.wake_up(tags=["kv_cache"])
        found["changed"] = said(llm)
        llm.update_weights(weights)
        found["again"] = said(llm)
        mine = llm.engine.runner.model.model.layers[0].self_attn.o_proj.weight.shape  # type: ignore[union-attr]
        found["shape"] = list(mine)
    with LLM(tiny_model_path(), tensor_parallel_size=2, **EXTERNAL) as llm:  # a second one, in a group of its own
        found["second"] = said(llm, PROMPTS[:1], PARAMS[:1])
    return found


def test_ranks_that_make_the_same_calls_share_one_model(tmp_path: Path) -> None:
    with LLM(tiny_model_path(), **OPTIONS) as llm:
        expected = said(llm)
        whole = [*llm.engine.runner.model.model.layers[0].self_attn.o_proj.weight.shape]  # type: ignore[union-attr]
    for found in in_processes(one_model_on_all_ranks, tmp_path):
        assert found["said"] == expected
        assert found["changed"] != expected
        assert found["again"][1] == expected[1], "the greedy one, since the others draw by the request's number too"
        assert found["second"] == expected[:1]
        assert found["shape"] == [whole[0], whole[1] // 2]


def many_prompts(rank: int) -> list[list[int]]:
    """Tokens of prompts that one rank takes longer to prepare."""
    prepare = PromptProcessor.prepare

    def prepare_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(rank)
        return prepare(*args, **options)

    PromptProcessor.prepare = prepare_slowly  # type: ignore[method-assign]
    with LLM(tiny_model_path(), tensor_parallel_size=2, **EXTERNAL) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        prompts = [[5 + index % 100, 6] for index in range(600)]
        return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_ranks_schedule_the_same_steps_however_long_each_prepares(tmp_path: Path) -> None:
    first, second = in_processes(many_prompts, tmp_path)
    assert first == second
    assert len(first) == 600


def several_engines(rank: int) -> dict[str, Any]:
    """What the tests below look at, in one pair of processes."""
    found: dict[str, Any] = {}
    with LLM(tiny_model_path(), **EXTERNAL) as llm:
        found["own prompts"] = said(llm, PROMPTS[rank : rank + 1], PARAMS[1:2])
    form = StructuredOutputsParams(regex="[0-9]{4}")
    params = [replace(FREE, ignore_eos=False, structured_outputs=form), replace(FREE, allowed_token_ids=[7, 9])]
    with LLM(tiny_model_path(), tensor_parallel_size=2, **EXTERNAL) as llm:
        outputs = llm.generate(PROMPTS[:2], params if HAS_GRAMMARS else params[1:] * 2, use_tqdm=False)
        found["constrained"] = [[output.text, output.token_ids] for output in outputs]
        try:
            said(llm, [[1, 2, 3 + rank]], [FREE])
        except WorkerError as error:
            found["different prompts"] = str(error)
    try:
        join_group(3, torch.device("cpu"))
    except ConfigError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(several_engines, tmp_path_factory.mktemp("pair"))


def test_each_process_can_have_an_engine_and_prompts_of_its_own(pair: list[dict[str, Any]]) -> None:
    with LLM(tiny_model_path(), **OPTIONS) as llm:
        for rank, found in enumerate(pair):
            assert found["own prompts"] == said(llm, PROMPTS[rank : rank + 1], PARAMS[1:2])


def test_ranks_that_make_different_calls_say_so(pair: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(pair):
        message = f"the 2 ranks of this engine make different calls, and rank {rank} cannot go on; give all of them"
        assert found["different prompts"].startswith(message)


def test_masks_are_those_of_rank_0_on_all_ranks(pair: list[dict[str, Any]]) -> None:
    (text, _), (_, token_ids) = pair[0]["constrained"]
    assert pair[0]["constrained"] == pair[1]["constrained"]
    assert {*token_ids} <= {7, 9}
    if HAS_GRAMMARS:
        assert text.isdigit()
        assert len(text) == 4


def test_a_group_that_the_processes_do_not_fill_is_refused(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert found["refused"] == "tensor_parallel_size=3 does not divide the 2 processes of the group; use a divisor"


def test_without_a_process_group_several_ranks_are_refused_and_one_runs() -> None:
    with pytest.raises(ConfigError, match=r"needs a process group; call torch.distributed.init_process_group first"):
        LLM(tiny_model_path(), tensor_parallel_size=2, **EXTERNAL)
    with LLM(tiny_model_path(), **EXTERNAL) as llm:
        assert len(said(llm)) == len(PROMPTS)
    with pytest.raises(
        ConfigError, match="distributed_executor_backend='ray' is not known; use one of mp, external_la"
    ):
        LLM(tiny_model_path(), distributed_executor_backend="ray", **OPTIONS)  # type: ignore[arg-type]


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("auto") == own_device("cuda") == torch.device("cuda", 3)
    monkeypatch.delenv("LOCAL_RANK")
    assert own_device("auto") == torch.device("cuda", 0)
