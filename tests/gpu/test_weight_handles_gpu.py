"""New weights by handles of tensors that another process has on the same GPU."""

import pickle
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.control.weight_handles import open_weights, weight_handles

pytestmark = pytest.mark.gpu


def changed_weights() -> dict[str, torch.Tensor]:
    weights = load_file(tiny_model_path() / "model.safetensors")
    return {name: tensor * 1.2 if tensor.dim() == 2 else tensor for name, tensor in weights.items()}


def train(connection: Connection) -> None:
    weights = {name: tensor.cuda() for name, tensor in changed_weights().items()}
    connection.send_bytes(pickle.dumps(weight_handles(weights.items())))
    connection.recv()  # until the engine has them


def test_an_engine_takes_the_weights_of_another_process() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ours, theirs = get_context("spawn").Pipe()
    trainer = get_context("spawn").Process(target=train, args=(theirs,), daemon=True)
    trainer.start()
    with LLM("tiny", gpu_memory_utilization=0.3) as llm:
        [before] = llm.generate("What is 2", params, use_tqdm=False)
        assert ours.poll(120)
        llm.update_weights(open_weights(pickle.loads(ours.recv_bytes())))
        ours.send(None)
        [after] = llm.generate("What is 2", params, use_tqdm=False)
        llm.update_weights(changed_weights())
        [expected] = llm.generate("What is 2", params, use_tqdm=False)
    trainer.join(30)
    assert trainer.exitcode == 0
    assert before.token_ids != after.token_ids == expected.token_ids
