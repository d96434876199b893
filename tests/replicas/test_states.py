"""Embeddings, classes, rewards and hidden states of two replicas on a CPU are those of one engine."""

import asyncio
import logging
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import LLM, PoolingParams, RequestError, SamplingParams, tiny_model_path
from nanoinfer.engine.hidden_states_request import ChunkStates, HiddenStatesRequest
from nanoinfer.engine.request_queue import Inbox
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.pooling_calls.pooled_output import PooledEmbedding
from nanoinfer.pooling_outputs import PoolingRequestOutput
from nanoinfer.replicas.packed_outputs import keep_states, unpack_states
from tests.pooling.test_decoders import assert_close, embeddings
from tests.pooling.test_encoders import ENCODERS, PAIRS, save_encoder, write_tokenizer
from tests.pooling.test_ways_to_call import run as run_job

# The first outgrows a step of 48 tokens; the texts have token ids of their own.
PROMPTS: list[Any] = [[*range(5, 70)], "12+34=", *([index] * length for index, length in enumerate(range(1, 20)))]
CHUNKED: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=3)
TWICE = SamplingParams(temperature=0.8, max_tokens=3, n=2, seed=1)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM("tiny", num_kvcache_blocks=32, **CHUNKED) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("tiny", num_kvcache_blocks=32, data_parallel_size=2, **CHUNKED) as llm:
        yield llm
        assert llm.is_finished()


def assert_same_states(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [*ours.hidden_states] == [*theirs.hidden_states]
        for layer, states in theirs.hidden_states.items():
            assert ours.hidden_states[layer].dtype == states.dtype
            assert_close(ours.hidden_states[layer], states)


def test_embeddings_come_in_the_order_of_the_prompts_from_both_replicas(one: LLM, two: LLM) -> None:
    params = [PoolingParams(dimensions=4 + index) for index in range(len(PROMPTS))]
    before = two.get_metrics()
    found, expected = (llm.embed(PROMPTS, params, use_tqdm=False) for llm in (two, one))
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, PoolingRequestOutput)
        assert (ours.prompt, ours.prompt_token_ids) == (theirs.prompt, theirs.prompt_token_ids)
        assert_close(ours.embedding, theirs.embedding)
        assert ours.metrics.queue_time is not None
    for now, then in zip(two.get_metrics().replicas, before.replicas, strict=True):
        assert now.num_prompt_tokens > then.num_prompt_tokens


@pytest.mark.parametrize("positions", ["prompt", "last"])
def test_hidden_states_come_with_completions_and_with_embeddings(one: LLM, two: LLM, positions: str) -> None:
    options: Any = {"hidden_states": [0, 1, -1], "hidden_state_positions": positions, "use_tqdm": False}
    prompts = PROMPTS[:8]
    for params in (GREEDY, TWICE):
        found, expected = (llm.generate(prompts, params, **options) for llm in (two, one))
        assert [output.text for output in found] == [output.text for output in expected]
        assert_same_states(found, expected)
    pooled, alone = (llm.embed(prompts, **options) for llm in (two, one))
    assert_same_states(pooled, alone)
    assert_close(np.stack([output.embedding for output in pooled]), np.stack(embeddings(one, prompts)))


def test_classes_and_rewards_of_pairs_are_those_of_one_engine(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    texts = [*PAIRS, "the sky"] * 5
    found = []
    for num_replicas in (1, 2):
        with LLM(tmp_path, data_parallel_size=num_replicas, **ENCODERS) as llm:
            rewards = [output.reward for output in llm.reward(texts, use_tqdm=False)]
            classes = [output.outputs for output in llm.classify(texts, use_tqdm=False)]
            [alone] = asyncio.run(llm.areward(texts[0]))
            found.append(np.stack([np.float32(rewards), np.concatenate([one.probs for one in classes])]))
            assert alone.reward == pytest.approx(rewards[0], rel=1e-5)
            assert {one.label for one in classes} == {"LABEL_0"}
    assert_close(found[1], found[0])


def test_values_of_each_token_come_whole(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertForTokenClassification", num_labels=2)
    prompts = [[5] * length for length in range(1, 40)]
    found = []
    for num_replicas in (1, 2):
        with LLM(tmp_path, data_parallel_size=num_replicas, **ENCODERS) as llm:
            found.append([output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_tasks_and_jobs_embed_beside_requests_that_generate(one: LLM, two: LLM, tmp_path: Path) -> None:
    texts = ["12+34=", "7*8=", "What is 3 + 4?"]
    expected = embeddings(one, texts)
    alone = [output.text for output in one.generate(texts, GREEDY, use_tqdm=False)]

    async def main() -> list[Any]:
        return await asyncio.gather(two.aembed(texts), two.agenerate(texts, GREEDY), two.aembed(texts[1]))

    together, generated, [single] = asyncio.run(main())
    assert [output.text for output in generated] == alone
    assert_close(np.stack([output.embedding for output in together]), np.stack(expected))
    assert_close(single.embedding, expected[1])
    [record] = run_job(two, tmp_path, {"input": texts})
    data = record["response"]["body"]["data"]
    assert_close(np.float32([entry["embedding"] for entry in data]), np.stack(expected))


def test_what_cannot_be_served_is_refused(two: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        two.embed(["1", []])
    with pytest.raises(RequestError, match="classify needs a classification head"):
        two.classify(["1"])
    with pytest.raises(RequestError, match="hidden_states has layer 99"):
        two.generate(["1"], hidden_states=[99])
    for call in (two.generate, two.embed):
        with pytest.raises(RequestError, match=r"on_hidden_states with data_parallel_size=2.*take output\.hidden"):
            call(["1"], hidden_states=[0], on_hidden_states=print)


def test_aborted_texts_have_values_of_nan(two: LLM) -> None:
    inbox = Inbox()
    ids = two.queue.add_requests(two.pooling_calls.prepare(PooledEmbedding, ["1", "2"], at_once=True).take(), inbox)
    two.abort(ids[:1])
    while not inbox.is_complete:
        two.queue.step()
    outputs: list[Any] = sorted(inbox.outputs, key=lambda output: output.request_id)
    assert [bool(np.isnan(output.embedding).all()) for output in outputs] == [True, False]


def test_a_model_whose_values_are_nan_says_so_for_each_request(two: LLM, caplog: pytest.LogCaptureFixture) -> None:
    norm = load_file(tiny_model_path() / "model.safetensors")["model.norm.weight"]
    two.update_weights({"model.norm.weight": torch.full_like(norm, torch.nan)})
    with caplog.at_level(logging.WARNING):
        outputs = two.embed(["1", "2"], use_tqdm=False)
    two.update_weights({"model.norm.weight": norm})
    assert all(np.isnan(output.embedding).all() for output in outputs)
    for output in outputs:
        assert f"request {output.request_id}: the model's values are NaN or infinite" in caplog.messages
    assert np.isfinite(np.stack(embeddings(two, ["1", "2"]))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states_of_every_dtype_come_out_of_a_message_as_they_went_in(dtype: torch.dtype) -> None:
    states = HiddenStatesRequest(pools=True, first=0, make_output=partial(pytest.fail, "made in the parent"))
    values = torch.arange(12.0).view(3, 4)
    states.add(ChunkStates(0, 2, 0, values[:2].to(dtype)))
    states.add(ChunkStates(0, 2, 2, values[2:].to(dtype)))  # the second chunk
    states.add(ChunkStates(0, None, 0, values[:1]))
    output = keep_states(RequestOutput(0, None, [], 0, [CompletionOutput(0, "", [], "stop")]), states)
    found = unpack_states(pickle.loads(pickle.dumps(output.hidden_states, pickle.HIGHEST_PROTOCOL)))
    assert torch.equal(torch.cat([*found[2].values()]), values.to(dtype))
    assert torch.equal(found[None][0], values[:1])
