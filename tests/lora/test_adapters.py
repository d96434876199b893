"""Adapters, many in one batch: each sequence has the tokens of the checkpoint that its adapter is merged into."""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import LLM, ConfigError, EngineStateError, LoRARequest, ModelError, RequestError, SamplingParams
from nanoinfer.errors import EngineClosedError
from nanoinfer.lora import adapter_slots
from nanoinfer.lora.adapted_prefill import AdaptedPrefillGraphs
from nanoinfer.lora.adapter_weights import ShardMatrices, _kept, read_adapter
from nanoinfer.lora.slot_memory import SlotLayout, SlotMemory
from nanoinfer.models.execution import PrefillGraphs, small_prefill_graphs
from nanoinfer.models.prefill_graphs import DecoderPrefillGraphs
from tests.lora.adapters import merge, request, write_adapter
from tests.models.test_architectures import draw_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPTS = draw_prompts(0, (29, 30, 1, 16, 40, 63))
ALL = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 112}
Trio = dict[str, tuple[Path, Path]]  # the folders of an adapter and of the checkpoint with it merged, by name


@pytest.fixture(scope="module")
def base(random_checkpoint: Callable[..., Path]) -> Path:
    return random_checkpoint(attention_bias=True)


@pytest.fixture(scope="module")
def trio(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    """Three adapters: of all layers; of one of the packed q, k, v and one of gate, up; with patterns and rslora."""
    folder = tmp_path_factory.mktemp("adapters")
    written = {
        "all": (write_adapter(base, folder / "all", 1, ALL), lambda _: 2.0),
        "some": (
            write_adapter(
                base, folder / "some", 2, r".*\.1\..*(k_proj|up_proj)", lambda _: 1, r=1,
                target_modules=["k_proj", "up_proj"], layers_to_transform=[1],
            ),
            lambda _: 8.0,
        ),
        "patterns": (
            write_adapter(
                base, folder / "patterns", 3, r".*(v_proj|down_proj|o_proj)",
                lambda module: 8 if "v_proj" in module else 4, use_rslora=True,
                rank_pattern={"v_proj": 8}, alpha_pattern={r"layers\.0\.mlp\.down_proj": 2},
            ),
            lambda module: (2 if module.endswith("0.mlp.down_proj") else 8) / (8 if "v_proj" in module else 4) ** 0.5,
        ),
    }  # fmt: skip
    return {
        name: (adapter, merge(base, adapter, folder / f"{name} merged", factor))
        for name, (adapter, factor) in written.items()
    }


@pytest.fixture(scope="module")
def requests(trio: Trio) -> list[LoRARequest | None]:
    """None, and the three adapters."""
    return [None, *(request(adapter, index + 1) for index, (adapter, _) in enumerate(trio.values()))]


@pytest.fixture(scope="module")
def merged(base: Path, trio: Trio) -> list[list[Any]]:
    """The outputs of PROMPTS by the base model, and by each merged checkpoint."""
    outputs = []
    for folder in (base, *(checkpoint for _, checkpoint in trio.values())):
        with LLM(folder, **OPTIONS) as llm:
            outputs.append([*llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    tokens = [[output.token_ids for output in its] for its in outputs]
    assert all(tokens.count(its) == 1 for its in tokens), "the adapters change too little to be told apart"
    return outputs


@pytest.fixture(scope="module")
def shared(base: Path) -> Iterator[LLM]:
    with LLM(base, enable_lora=True, max_loras=2, max_lora_rank=8, **OPTIONS) as llm:
        yield llm


def logprobs(output: Any) -> list[float]:
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.outputs[0].logprobs, strict=True)]


def check(outputs: Any, wanted: list[Any]) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    for output, its in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(logprobs(output), logprobs(its), atol=1e-4)


@pytest.mark.parametrize("num_slots", [3, 1])
@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
def test_each_sequence_has_the_tokens_of_its_merged_checkpoint(
    base: Path, requests: list[LoRARequest | None], merged: list[list[Any]], num_slots: int, size: int
) -> None:
    """In batches of several adapters and none, with chunks, preemption and, with one slot, adapters that wait."""
    options: dict[str, Any] = {**OPTIONS, "max_num_batched_tokens": 48, "num_kvcache_blocks": 12}
    with LLM(base, enable_lora=True, max_loras=num_slots, max_lora_rank=8, tensor_parallel_size=size, **options) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in requests]
        given = [one for _ in PROMPTS for one in requests]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=given)
        assert llm.list_loras() == {1, 2, 3}
        assert llm.get_metrics().num_preemptions > 0
    for index, wanted in enumerate(merged):
        check(outputs[index :: len(requests)], wanted)


def test_a_prefix_is_found_by_requests_with_the_same_adapter_alone(
    llm: LLM, requests: list[LoRARequest | None], merged: list[list[Any]]
) -> None:
    cached = []
    for index in (0, 1, 0, 1, 3, 1):
        [output] = llm.generate([PROMPTS[5]], GREEDY, use_tqdm=False, lora_request=requests[index])
        check([output], merged[index][5:])
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 62, 62, 0, 62]


def test_all_ways_to_call_take_an_adapter(
    llm: LLM, trio: Trio, requests: list[LoRARequest | None], merged: list[list[Any]]
) -> None:
    wanted, one, prompt = merged[1][4].token_ids, requests[1], PROMPTS[4]
    streamed = [token for chunk in llm.stream(prompt, GREEDY, lora_request=one) for token in chunk.token_ids]

    async def ask() -> tuple[Any, list[int]]:
        answer = await llm.agenerate([prompt], GREEDY, lora_request=[one])
        return answer, [
            token async for chunk in llm.astream(prompt, GREEDY, lora_request=one) for token in chunk.token_ids
        ]

    [answer], astreamed = asyncio.run(ask())
    llm.add_request(prompt, GREEDY, lora_request=one)
    while not (finished := llm.step()):
        pass
    assert [streamed, answer.token_ids, astreamed, finished[0].token_ids] == [wanted] * 4
    samples = SamplingParams(n=2, seed=3, max_tokens=8)
    with LLM(trio["all"][1], **OPTIONS) as other:
        drawn = other.generate([prompt], samples, use_tqdm=False)[0].outputs
        scores = other.score([prompt], [wanted, [5]], use_tqdm=False)
        embedding = other.embed([prompt], use_tqdm=False)[0].outputs.embedding
        [states] = other.generate([prompt], GREEDY, use_tqdm=False, hidden_states=[1])
    ours = llm.generate([prompt], samples, use_tqdm=False, lora_request=one)[0].outputs
    assert [sample.token_ids for sample in ours] == [sample.token_ids for sample in drawn]
    for score, its in zip(llm.score([prompt], [wanted, [5]], use_tqdm=False, lora_request=one), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, its.logprobs, atol=1e-4)
    [embedded, plain] = llm.embed([prompt, prompt], use_tqdm=False, lora_request=[one, None])
    np.testing.assert_allclose(embedded.outputs.embedding, embedding, atol=1e-4)
    assert abs(plain.outputs.embedding - embedding).max() > 0.01
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False, hidden_states=[1], lora_request=one)
    torch.testing.assert_close(output.hidden_states[1], states.hidden_states[1], atol=1e-4, rtol=1e-4)


def test_requests_that_wait_for_a_slot_can_be_aborted_paused_and_resumed(
    base: Path, requests: list[LoRARequest | None], merged: list[list[Any]]
) -> None:
    with LLM(base, enable_lora=True, max_lora_rank=8, **OPTIONS) as llm:
        ids = [llm.add_request(PROMPTS[0], GREEDY, lora_request=requests[index]) for index in (1, 2, 3, 2)]
        llm.abort(ids[1])
        llm.pause(ids[2])
        finished = {}
        while len(finished) < 3:
            finished |= {output.request_id: output for output in llm.step()}
        assert finished[ids[1]].outputs[0].finish_reason == "abort"
        check([finished[ids[0]]], merged[1][:1])
        check([finished[ids[3]]], merged[2][:1])
        llm.resume(ids[2])
        while not (last := llm.step()):
            pass
        check(last, merged[3][:1])
        assert llm.is_finished()
        # What a call leaves behind keeps no slot.
        for chunk in llm.stream(PROMPTS[0], GREEDY, lora_request=requests[1]):
            assert chunk.token_ids
            break
        [output] = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=requests[2])
        check([output], merged[2][:1])


def test_a_hundred_adapters_by_turns_leave_nothing_behind(llm: LLM, base: Path, tmp_path: Path) -> None:
    drawn = set()
    for seed in range(100):
        one = request(write_adapter(base, tmp_path / "one", seed, r".*0\.mlp\.down_proj", std=1.0), 7)
        assert llm.add_lora(one)
        assert not llm.add_lora(one)
        [output] = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=2), use_tqdm=False, lora_request=one)
        assert output.num_cached_tokens == 0, "the adapter that had this id before has cached this prompt"
        drawn.add(logprobs(output)[0])
        assert llm.remove_lora(7)
        assert not llm.remove_lora(7)
    assert len(drawn) == 100
    assert 7 not in llm.list_loras()
    engine: Any = llm.engine
    assert len(engine.runner.adapters.by_number) == len(llm.list_loras())
    assert len(engine.scheduler._idle) <= 2, "as many as there are slots"


def test_steps_with_an_adapter_replay_graphs_of_their_own(
    llm: LLM, requests: list[Any], merged: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in the place of CUDA graphs here compute a step as without; so do those of small prefill steps."""
    engine: Any = llm.engine
    runner, used = engine.runner.model_runner, list[str]()

    def graphs(name: str) -> Any:
        return SimpleNamespace(replay=lambda batch: (used.append(name), runner.decode(batch)))

    monkeypatch.setattr(runner.state, "graphs_by_use", (graphs("plain"), graphs("adapted")))
    small = SimpleNamespace(choose=lambda *_: lambda step: (used.append("small"), runner.model(step))[1])
    monkeypatch.setattr(runner.state.buffers, "prefill_graphs", small)
    try:
        for given, names in (([None] * 2, {"plain", "small"}), ([None, requests[1]], {"adapted"})):
            used.clear()
            llm.reset_prefix_cache()
            outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=given)
            assert {*used} == names
            check(outputs, [merged[0][0], merged[0 if given[1] is None else 1][1]])
    finally:
        runner.state.decode_graphs = None


def test_padded_prefill_steps_give_the_tokens_of_whole_ones(
    llm: LLM, requests: list[Any], merged: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What graphs of small prefill steps compute: the tokens in buffers, and padding after them, without adapters."""
    monkeypatch.setattr("nanoinfer.models.prefill_graphs.STEPS_BEFORE_CAPTURE", 100)
    engine: Any = llm.engine
    state = engine.runner.model_runner.state
    small = small_prefill_graphs(engine.runner.model.model, 128, only_pools=False)
    assert isinstance(small, DecoderPrefillGraphs)
    graphs = AdaptedPrefillGraphs(small, state.adapters._no_slot, torch.device("cpu"))
    monkeypatch.setattr(state.adapters, "prefill_graphs", PrefillGraphs(graphs))
    llm.reset_prefix_cache()
    for index in (1, 2, 0):
        outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[requests[index], requests[1]])
        check(outputs, [merged[index][0], merged[1][1]])
    assert graphs._num_steps == {64: 3}


def test_an_adapter_that_a_thread_reads_is_read_once(
    llm: LLM, trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = llm.engine
    adapters, threads = engine.runner.adapters, list[str]()

    def read(folder: Path, *others: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read_adapter(folder, *others)

    monkeypatch.setattr("nanoinfer.lora.adapter_slots.read_adapter", read)
    folder, other = trio["all"][0], trio["some"][0]
    adapters.begin_reading(folder)
    assert len(adapters.read(folder)) == len(adapters.layers)
    assert threads == ["nanoinfer adapter"]
    adapters.begin_reading(folder)
    assert len(adapters.read(other)) == 2
    assert threads.count("MainThread") == 1
    adapters.begin_reading(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        adapters.read(tmp_path)


def test_a_slot_is_filled_beside_the_adapter_that_steps_may_still_read(llm: LLM, trio: Trio) -> None:
    engine: Any = llm.engine
    adapters = engine.runner.adapters
    memory = SlotMemory(SlotLayout(adapters.layers, 8), 2, torch.float32, torch.device("cpu"))
    name, first, second = "model.layers.1.mlp.gate_up_proj", *(adapters.read(trio[one][0]) for one in ("all", "some"))
    memory.fill(0, first)
    device_slot, a = memory.device_slot(0), memory.matrices[name].a
    before = a[device_slot].clone()
    assert torch.equal(before[:4], first[name]["gate"].a)
    for one in (second, first, second):
        memory.fill(0, one)
        assert {memory.device_slot(0), memory.device_slot(1)} < {0, 1, 2}
        if one is second:  # of rank 1, and of the half alone that comes last
            its = a[memory.device_slot(0)]
            assert torch.equal(its[8:9], second[name]["up"].a)
            assert not its[:8].any()
            assert not its[9:].any()
    memory.fill(0, first)
    device_slot = memory.device_slot(0)
    memory.fill(0, second)
    assert torch.equal(a[device_slot], before), "as it was, until another one comes"


def test_an_id_stands_for_one_folder_until_it_is_removed(llm: LLM, trio: Trio, requests: list[Any]) -> None:
    llm.add_lora(requests[1])
    other = LoRARequest("all", 1, str(trio["some"][0]))
    with pytest.raises(RequestError, match=r"lora_int_id=1 stands for LoRARequest\(lora_name='all', .* call remove"):
        llm.generate([[1]], GREEDY, use_tqdm=False, lora_request=other)
    llm.add_request([1, 2], GREEDY, lora_request=requests[1])
    with pytest.raises(EngineStateError, match=r"is used by unfinished requests \(1 samples\); wait for them"):
        llm.remove_lora(1)
    stream = llm.stream([1, 2], GREEDY, lora_request=requests[1])
    while not llm.step():
        pass
    llm.remove_lora(1)
    with pytest.raises(RequestError, match="was removed; name it again"):
        next(stream)
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False, lora_request=other)[0].token_ids) == 8
    llm.abort(llm.add_request([1, 2], GREEDY, lora_request=other))
    assert llm.remove_lora(1), "what was aborted uses it no more"
    assert [output.outputs[0].finish_reason for output in llm.step()] == ["abort"]


def test_adapters_stay_when_the_engine_sleeps_and_when_its_weights_change(
    base: Path, trio: Trio, requests: list[Any], merged: list[list[Any]]
) -> None:
    with LLM(base, enable_lora=True, max_loras=3, max_lora_rank=8, **OPTIONS) as llm:
        for level in (1, 2):
            check(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests[1]), merged[1])
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.update_weights(load_file(trio["some"][1] / "model.safetensors"))
        check(llm.generate(PROMPTS, GREEDY, use_tqdm=False), merged[2])
        llm.update_weights(load_file(base / "model.safetensors"))
        check(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests[3]), merged[3])
    for call in (lambda: llm.add_lora(requests[3]), lambda: llm.remove_lora(3)):
        with pytest.raises(EngineClosedError, match="this engine was closed"):
            call()


def test_replicas_have_each_adapter(
    base: Path, trio: Trio, requests: list[Any], merged: list[list[Any]], tmp_path: Path
) -> None:
    prompts, given = [prompt for prompt in PROMPTS for _ in requests], requests * len(PROMPTS)
    with LLM(base, enable_lora=True, max_lora_rank=8, data_parallel_size=2, **OPTIONS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=given)
        for index, wanted in enumerate(merged):
            check(outputs[index :: len(requests)], wanted)
        bad = write_adapter(base, tmp_path / "bad", 0, r".*q_proj", target_modules=["k_proj"])
        with pytest.raises(ModelError, match=r"it has matrices, and adapter_config\.json does not"):
            llm.add_lora(request(bad, 9))
        assert llm.list_loras() == {1, 2, 3}
        llm.add_request([1, 2], GREEDY, lora_request=requests[1])
        with pytest.raises(EngineStateError, match="is used by unfinished requests"):
            llm.remove_lora(1)
        while not llm.step():
            pass
        assert llm.remove_lora(1)
        other = LoRARequest("all", 1, str(trio["patterns"][0]))
        check(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=other), merged[3][:2])
        new = write_adapter(
            base, tmp_path / "new", 7, r".*v_proj|.*down_proj|.*o_proj", lambda m: 8 if "v_proj" in m else 4
        )
        old = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=requests[3])
        llm.update_weights(load_file(new / "adapter_model.safetensors"), lora="patterns")
        assert (
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=requests[3])[0].token_ids != old[0].token_ids
        )


def test_a_trainer_gives_new_matrices_by_pefts_names(
    base: Path, trio: Trio, requests: list[Any], merged: list[list[Any]], tmp_path: Path
) -> None:
    """In place of those of a folder, whose config stays; what others have cached stays too."""
    start = write_adapter(base, tmp_path / "policy", 9, ALL)
    tensors = load_file(trio["all"][0] / "adapter_model.safetensors")
    in_memory = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    for size in (1, 2):
        with LLM(base, enable_lora=True, max_lora_rank=8, tensor_parallel_size=size, **OPTIONS) as llm:
            policy = LoRARequest("policy", 5, str(start))
            before = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[policy] * 5 + [None])
            assert before[4].token_ids != merged[1][4].token_ids
            for given in (tensors, iter(in_memory.items())):
                llm.update_weights(given, lora="policy")
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[policy] * 5 + [None])
                check(outputs, merged[1][:5] + merged[0][5:])
                assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0, 0, 62]
            engine: Any = llm.engine
            assert len(engine.runner.adapters.by_number if size == 1 else llm.list_loras()) == 1
            name = next(iter(tensors))
            with pytest.raises(
                ModelError, match=r"the new matrices of LoRARequest\(lora_name='policy', .* do not fit: .* lacks"
            ):
                llm.update_weights({key: tensors[key] for key in tensors if "layers.1.mlp" not in key}, lora="policy")
            with pytest.raises(ModelError, match="cannot be updated: it is a int; give a tensor"):
                llm.update_weights({name: 1}, lora="policy")
            with pytest.raises(ModelError, match=r"named_tensors cannot be read \(.*\); give a dict of peft's names"):
                llm.update_weights([1], lora="policy")  # type: ignore[list-item]
            with pytest.raises(RequestError, match="lora='other' is no loaded adapter; use add_lora first; loaded"):
                llm.update_weights(tensors, lora="other")
            llm.add_request(PROMPTS[0], GREEDY, lora_request=policy)
            with pytest.raises(EngineStateError, match="is used by unfinished requests"):
                llm.update_weights(tensors, lora="policy")
            while not (finished := llm.step()):
                pass
            check(finished, merged[1][:1])


def test_what_a_call_cannot_have_is_refused(llm: LLM, base: Path, requests: list[Any]) -> None:
    for given, message in (
        ("all", "lora_request='all' is a str; use LoRARequest('name', 1, 'path/to/folder'), say, or a list of these"),
        ([requests[1]], "1 lora_request for 2 prompts; give one for all, or one for each"),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            llm.generate([[1], [2]], GREEDY, use_tqdm=False, lora_request=given)  # type: ignore[arg-type]
    for wrong in (("", 1, "p"), ("n", 0, "p"), ("n", True, "p"), ("n", 1, ""), ("n", 1, None)):
        with pytest.raises(RequestError, match="use LoRARequest"):
            LoRARequest(*wrong)  # type: ignore[arg-type]
    with LLM(base, **OPTIONS) as plain:
        with pytest.raises(RequestError, match="and this LLM was made without enable_lora=True; give that"):
            plain.generate([[1]], GREEDY, use_tqdm=False, lora_request=requests[1])
        with pytest.raises(ConfigError, match="this LLM was made without enable_lora=True; give that"):
            plain.add_lora(requests[1])
    with pytest.raises(RequestError, match="lora_request=None is a NoneType; use LoRARequest"):
        llm.add_lora(None)  # type: ignore[arg-type]
    assert LoRARequest("n", 1, "folder/") == LoRARequest("n", 1, "folder")
    with pytest.raises(ConfigError, match="enable_lora=True with distributed_executor_backend='external_launcher' is"):
        LLM(base, enable_lora=True, distributed_executor_backend="external_launcher", **OPTIONS)


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        (ALL, {"r": 8}, r"down_proj: A has shape \(4, 160\) and B \(96, 4\), and adapter_config.json has rank 8"),
        (ALL, {"r": 32}, "down_proj: it has rank 32, above max_lora_rank=8; raise that"),
        (r"lm_head|.*q_proj", {}, "it changes lm_head, which is not supported for this model; merge the adapter"),
        (r".*q_proj", {"target_modules": ["k_proj"]}, "it has matrices, and adapter_config.json does not name it"),
        (
            r".*q_proj",
            {"target_modules": ["q_proj", "o_proj"]},
            r"lacks the matrices of model.layers.0.self_attn.o",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    llm: LLM, base: Path, tmp_path: Path, modules: str, config: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(base, tmp_path / "one", 0, modules, **config)
    with pytest.raises(ModelError, match=message):
        llm.add_lora(request(adapter, 9))
    assert 9 not in llm.list_loras()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_b_is_multiplied_by_the_factor_in_float32_and_rounded_once(given: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 8, generator=generator).to(given) for _ in range(2))
    for factor in (2.0, 2 / 3, 1.0):
        share = ShardMatrices(a.clone()[:, :5], b.clone())
        kept = _kept(share, factor, dtype)
        for matrix in share:
            matrix.zero_()
        assert torch.equal(kept.a, a[:, :5].to(dtype))
        assert kept.a.is_contiguous()
        assert torch.equal(kept.b, (b.float() * factor).to(dtype))


def test_kernels_are_compiled_for_one_layer_of_each_shape(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapters' product, and its own: steps of few rows without adapters compute that on the way."""
    launched = Counter[tuple[Any, ...]]()

    def note(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def noting(out: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
            launched[(name, *out.shape, x.shape[1])] += 1
            return launch(out, x, *others)

        return noting

    def note_own(product: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        launched[("own", len(x), *layer.full_shape)] += 1

    for name in ("add_lora", "gated_with_lora"):
        monkeypatch.setattr(adapter_slots, name, note(name, getattr(adapter_slots, name)))
    with LLM(base, enable_lora=True, **OPTIONS) as llm:
        engine: Any = llm.engine
        monkeypatch.setattr(adapter_slots, "few_rows_kernels_serve", lambda num_rows, _weight: num_rows <= 2)
        monkeypatch.setattr(adapter_slots.AdaptedProduct, "apply", note_own)
        engine.runner.model_runner.state.adapters.compile_ahead(5)
        layers = engine.runner.adapters.layers
    names = {layer.full_shape: "gated_with_lora" if "gate_up" in path else "add_lora" for path, layer in layers.items()}
    wanted = {(name, tokens, *size) for size, name in names.items() for tokens in (1, 2, 4)}
    assert wanted | {("own", tokens, *size) for size in names for tokens in (1, 2)} == launched.keys()
    down = next(layer.full_shape for path, layer in layers.items() if "down" in path)
    twice = {launch for launch, count in launched.items() if count > 1}
    assert twice == {("add_lora", tokens, *down) for tokens in (1, 2, 4)}, "alone, and after its activation"
