"""What goes through the pipe: what requests have in common goes once, and comes out as it was."""

import pickle
from typing import Any

import numpy as np
import pytest

from nanoinfer import tiny_model_path
from nanoinfer.engine.engine import Recipient
from nanoinfer.engine.request_logprobs import PromptLogprobs
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.replicas.dispatcher import PREFIX_TOKENS, QueuedRequest
from nanoinfer.replicas.packed_outputs import pack_outputs, unpack_outputs
from nanoinfer.replicas.replica_messages import common_prefixes, pack_requests, unpack_requests
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.prompts import PreparedRequest, pack_ids
from nanoinfer.text.tokenizer import load_tokenizer

ONE, OTHER = [7] * (PREFIX_TOKENS + 10), [8] * PREFIX_TOKENS
PROMPTS = [[*ONE, 1, 2], [3], [*OTHER, 4], [*ONE, 1, 5, 6], ONE[:PREFIX_TOKENS], OTHER[:-1], OTHER[:-1], [9] * 200]


def queued_requests(prompts: list[list[int]], params: list[SamplingParams]) -> list[QueuedRequest]:
    return [
        QueuedRequest(index, PreparedRequest(prompt=None, token_ids=ids, sampling_params=one), Recipient([]), work=1)
        for index, (ids, one) in enumerate(zip(prompts, params, strict=True))
    ]


def sent(queued: list[QueuedRequest]) -> tuple[Any, list[PreparedRequest]]:
    message = pickle.loads(pickle.dumps(pack_requests(queued)))
    return message, [received.prepared for received in unpack_requests(message, print)]


def test_the_texts_of_a_prompts_tokens_do_not_go_through_the_pipe() -> None:
    """The parent makes them, when somebody looks."""
    tokenizer = load_tokenizer(tiny_model_path())
    assert tokenizer is not None
    token_ids, made = tokenizer.hf("Sort 4")["input_ids"], []
    of_prompt = PromptLogprobs(len(token_ids), 0, lambda: made.append(1))  # type: ignore[arg-type, func-returns-value]
    values = np.zeros((len(token_ids) - 1, 1), np.float32)
    of_prompt.fill(1, np.ones(len(values), np.int32), np.array(token_ids[1:])[:, None], values)
    output = RequestOutput(0, None, [], 0, [CompletionOutput(0, "", [], "stop")], prompt_logprobs=of_prompt)
    message = pickle.loads(pickle.dumps(pack_outputs([output])))
    queued = queued_requests([token_ids], [SamplingParams(prompt_logprobs=0)])
    [(_, found)] = unpack_outputs(message, dict(enumerate(queued)), tokenizer)
    assert made == []
    entries = found.prompt_logprobs
    assert entries is not None
    assert [entry and entry[token_id].decoded_token for entry, token_id in zip(entries, token_ids, strict=True)] == [
        None,
        *map(tokenizer.decode, ([token_id] for token_id in token_ids[1:])),
    ]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[::-1], [[1], [1]], [ONE, ONE]])
def test_prompts_come_out_as_they_were_as_a_list_and_packed(prompts: list[list[int]]) -> None:
    _, prepared = sent(queued_requests(prompts, [SamplingParams()] * len(prompts)))
    assert [one.token_ids for one in prepared] == prompts
    assert [one.packed_ids for one in prepared] == [pack_ids(prompt) for prompt in prompts]


def test_a_prefix_of_several_prompts_is_sent_once_to_its_last_token() -> None:
    common = [*ONE, 1]
    message, _ = sent(queued_requests([[*common, 2], [3], [*common, 4, 5]], [SamplingParams()] * 3))
    assert message.prefixes == [b"", pack_ids(common)]
    assert message.token_ids.tolist() == [2, 3, 4, 5]


def test_what_one_prompt_begins_with_or_too_few_tokens_are_no_prefix() -> None:
    short = [pack_ids(OTHER[:-1]) or b""] * 2
    assert common_prefixes([pack_ids(ONE) or b"", *short]) == ([b""], [0, 0, 0])


def test_equal_sampling_params_are_sent_once() -> None:
    """Unless they have what is not hashed; then objects are told apart."""
    params = [SamplingParams(max_tokens=count, stop=["x"]) for count in (4, 5, 4)]
    params += [SamplingParams(logit_bias={1: 1.0}), SamplingParams(logit_bias={1: 1.0})]
    params.append(params[-1])
    message, prepared = sent(queued_requests([[index] for index in range(6)], params))
    assert len(message.params) == 4
    assert [one.sampling_params for one in prepared] == params
