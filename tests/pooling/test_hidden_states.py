"""Hidden states against transformers' output_hidden_states, for random small models in float32 on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from nanoinfer import LLM, RequestError, SamplingParams
from nanoinfer.engine.hidden_states_request import ChunkStates
from nanoinfer.engine.preparer import Portions
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.pooling_calls import hidden_states as module
from nanoinfer.text.prompts import PreparedRequest
from tests.models.test_architectures import ARCHITECTURES, HYBRIDS, checkpoint, draw_prompts
from tests.pooling.test_decoders import CHUNKED, SMALL, assert_close, write_modules

__all__ = ["checkpoint"]  # a fixture
Checkpoint = Callable[..., Path]
PROMPTS = draw_prompts(0, (63, 29, 1, 16, 49, 17))  # 49 is a step of 48 tokens and one
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@torch.inference_mode()
def reference(folder: Path, prompts: list[list[int]]) -> list[tuple[torch.Tensor, ...]]:
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").float().eval()
    outputs = [model(torch.tensor([ids]), output_hidden_states=True, use_cache=False) for ids in prompts]
    return [tuple(states[0] for states in output.hidden_states) for output in outputs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_are_those_of_transformers(checkpoint: Checkpoint, architecture: str) -> None:
    """Of all layers, in chunks, and a second time, when a prefix cache knows the prompts."""
    folder = checkpoint(architecture, 1)
    expected = reference(folder, PROMPTS)
    layers = list(range(-1, len(expected[0]) - 1))  # the last one is -1
    # Hybrids add in another order. A Gemma of random weights amplifies the rounding of each layer.
    error = 5e-5 if architecture in HYBRIDS else 3e-5 if architecture.startswith(("Gemma3", "Gemma4")) else 1e-5
    with LLM(folder, **CHUNKED) as llm:
        plain = [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, hidden_states=layers)
            assert [output.token_ids for output in outputs] == plain
            for output, theirs in zip(outputs, expected, strict=True):
                assert output.hidden_states is not None
                assert [*output.hidden_states] == layers
                for layer, ours in output.hidden_states.items():
                    assert_close(ours, theirs[layer], error)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_states_of_the_last_token_leave_the_prefix_cache_its_use(checkpoint: Checkpoint, num_ranks: int) -> None:
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    folder = checkpoint("Qwen3ForCausalLM", 0, **even)
    expected = reference(folder, PROMPTS)
    with LLM(folder, tensor_parallel_size=num_ranks, **CHUNKED) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        options: dict[str, Any] = {"hidden_states": [1, -1], "hidden_state_positions": "last", "use_tqdm": False}
        outputs = llm.generate(PROMPTS, GREEDY, **options)
    assert [output.num_cached_tokens for output in outputs][:2] == [62, 28]
    for output, theirs in zip(outputs, expected, strict=True):
        assert output.hidden_states is not None
        for layer in (1, -1):
            assert_close(output.hidden_states[layer], theirs[layer][-1:])


@pytest.mark.parametrize("method", ["lasttoken", "mean"])
def test_embeddings_come_with_hidden_states(checkpoint: Checkpoint, method: str) -> None:
    folder = checkpoint("Qwen3ForCausalLM", 0)
    write_modules(folder, "Pooling", Pooling={"pooling_mode": method})
    expected = reference(folder, PROMPTS)
    with LLM(folder, **CHUNKED) as llm:
        plain = llm.embed(PROMPTS, use_tqdm=False)
        for positions in ("last", "prompt"):
            outputs = llm.embed(PROMPTS, use_tqdm=False, hidden_states=[0, -1], hidden_state_positions=positions)
            for output, alone, theirs in zip(outputs, plain, expected, strict=True):
                assert_close(output.embedding, alone.embedding)
                assert output.hidden_states is not None
                for layer in (0, -1):
                    wanted = theirs[layer][-1:] if positions == "last" else theirs[layer]
                    assert_close(output.hidden_states[layer], wanted)


def test_preempted_prompts_have_whole_states(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Qwen3ForCausalLM", 0)
    expected = reference(folder, PROMPTS)
    options = {**SMALL, "num_kvcache_blocks": 7, "max_model_len": 112, "max_num_batched_tokens": 48}
    with LLM(folder, **options) as llm:
        llm.engine.scheduler.reserved_tokens = 0
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, hidden_states=[1])
        assert llm.get_metrics().num_preemptions
    for output, theirs in zip(outputs, expected, strict=True):
        assert output.hidden_states is not None
        assert_close(output.hidden_states[1], theirs[1])


def test_a_function_gets_the_states_of_each_chunk_and_nothing_is_kept(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Qwen3ForCausalLM", 0)
    expected = reference(folder, PROMPTS)
    taken: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}

    def take(index: int, layer: int, start: int, states: torch.Tensor) -> None:
        taken.setdefault((index, layer), []).append((start, states.clone()))

    with LLM(folder, **CHUNKED) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, hidden_states=[1, -1], on_hidden_states=take)
        assert all(output.hidden_states is None for output in outputs)
    assert [start for start, _ in taken[0, 1]] == [0, 48], "the first prompt takes two steps"
    for index, theirs in enumerate(expected):
        for layer in (1, -1):
            assert_close(torch.cat([states for _, states in taken[index, layer]]), theirs[layer])


@pytest.mark.parametrize("method", ["generate", "embed"])
def test_what_a_function_raises_ends_its_own_call_whoever_runs_the_step(
    checkpoint: Checkpoint, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(*_: Any) -> None:
        raise ValueError("no more room")

    with LLM(checkpoint("Qwen3ForCausalLM", 0), **CHUNKED) as llm:
        steps: list[int] = []
        inbox_id = llm.add_request(PROMPTS[1], GREEDY)
        queue_step = llm.queue.step
        monkeypatch.setattr(llm.queue, "step", lambda: (queue_step(), steps.append(0)))
        options = {"hidden_states": [-1], "on_hidden_states": take, "use_tqdm": False}
        with pytest.raises(ValueError, match="no more room"):
            getattr(llm, method)(PROMPTS[0], **options)
        assert steps, "the step itself goes on"
        outputs = llm.step()
        while not outputs:
            outputs = llm.step()
        assert [output.request_id for output in outputs] == [inbox_id]
        assert llm.is_finished()
        assert llm.get_metrics().num_used_blocks == 0


def test_layers_may_be_numpys_integers(checkpoint: Checkpoint) -> None:
    with LLM(checkpoint("Qwen3ForCausalLM", 0), **SMALL) as llm:
        [output] = llm.embed(PROMPTS[:1], use_tqdm=False, hidden_states=[*np.arange(2)])  # type: ignore[list-item]
    assert output.hidden_states is not None
    assert [type(layer) for layer in output.hidden_states] == [int, int]


def test_states_are_held_once_when_their_output_is_made() -> None:
    request = PreparedRequest(prompt=None, token_ids=[1, 2], sampling_params=GREEDY)
    wanted = module.HiddenStatesOptions({0: 0}, only_last=False, callback=None, row_bytes=8)
    wanted.add_to(Portions.of([request]))
    states = request.hidden_states_request
    for start in (0, 1):
        states.add(ChunkStates(0, 0, start, torch.full((1, 4), float(start))))
    output = states.to_output(RequestOutput(0, None, [], 0, [CompletionOutput(0, "", [], "stop")]))
    assert output.hidden_states[0][:, 0].tolist() == [0, 1]
    assert states.received == {}


def test_what_memory_cannot_hold_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(checkpoint("Qwen3ForCausalLM", 0), **SMALL) as llm:
        monkeypatch.setattr(module, "free_host_bytes", lambda: 1000)
        with pytest.raises(RequestError, match=r"hidden_states of these prompts take 0\.0 GiB, and .* by on_hidden_"):
            llm.generate(PROMPTS, GREEDY, hidden_states=[0])


def test_memory_that_file_caches_take_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:   90000 kB\nMemFree:      10 kB\nMemAvailable:   70000 kB\nCached: 5 kB\n"
    )
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
    assert module.free_host_bytes() == 70000 * 1024
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "nothing")
    monkeypatch.setattr(module.os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 100}.__getitem__)
    assert module.free_host_bytes() == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_states": [3]}, r"has layer 3, and this model has 0 \(the embedding\) to 2 \(after"),
        ({"hidden_states": [-4]}, r"has layer -4, .* or -3 to -1"),
        ({"hidden_states": []}, r"hidden_states=\[\] must be a list of layers"),
        ({"hidden_states": [True]}, r"hidden_states=\[True\] must be a list of layers"),
        ({"hidden_states": 1}, "hidden_states=1 must be a list of layers"),
        ({"hidden_states": [0], "hidden_state_positions": "all"}, "hidden_state_positions='all' is not known"),
        ({"on_hidden_states": print}, "on_hidden_states is given without hidden_states"),
        ({"hidden_states": [0], "on_hidden_states": 1}, "on_hidden_states=1 cannot be called"),
    ],
)
def test_wrong_arguments_are_refused(checkpoint: Checkpoint, options: dict[str, Any], message: str) -> None:
    with LLM(checkpoint("Qwen3ForCausalLM", 0, num_hidden_layers=2), **SMALL) as llm:
        for call in (llm.generate, llm.embed):
            with pytest.raises(RequestError, match=message):
                call(PROMPTS, **options)
