"""Weights by handles, on a CPU, where a stand-in keeps the tensors that a GPU's memory would hold."""

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions

from nanoinfer import LLM, ModelError, SamplingParams, tiny_model_path
from nanoinfer.control import weight_handles
from nanoinfer.control.weight_handles import DEVICE, open_weights

GPUS = ["GPU-a", "GPU-b", "GPU-c"]  # in the order of the trainer's process


class OnGpu:
    """What `weight_handles` asks of a tensor on a GPU."""

    def __init__(self, tensor: Tensor, index: int) -> None:
        self.tensor, self.device = tensor, SimpleNamespace(type="cuda", index=index)

    def detach(self) -> "OnGpu":
        return self


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs of the process, whose order a test may change; memory is shared by the number of a GPU and a handle."""
    seen, memory = [*GPUS], dict[tuple[str, int], Tensor]()

    def reduce(tensor: OnGpu) -> tuple[None, tuple[Any, ...]]:
        handle = len(memory)
        memory[seen[tensor.device.index], handle] = tensor.tensor
        return None, (*range(DEVICE), tensor.device.index, handle)

    def rebuild(*arguments: Any) -> Tensor:
        return memory[seen[arguments[DEVICE]], arguments[DEVICE + 1]]

    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=seen[index]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    return seen


def test_the_number_of_the_gpu_is_where_pytorch_has_it() -> None:
    assert [*inspect.signature(reductions.rebuild_cuda_tensor).parameters][DEVICE] == "storage_device"


def test_an_engine_answers_with_the_weights_of_another_process(gpus: list[str]) -> None:
    weights = load_file(tiny_model_path() / "model.safetensors")
    changed = {name: tensor * 1.2 if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    with LLM("tiny", device="cpu") as llm:
        llm.update_weights(changed)
        [expected] = llm.generate("What is 2", params, use_tqdm=False)
        llm.update_weights(weights)
        handles = weight_handles.weight_handles((name, OnGpu(tensor, 1)) for name, tensor in changed.items())  # type: ignore[misc]
        gpus[:] = ["GPU-b", "GPU-a"]  # the other process numbers its GPUs in another way
        llm.update_weights(open_weights(pickle.loads(pickle.dumps(handles))))
        [output] = llm.generate("What is 2", params, use_tqdm=False)
    assert output.token_ids == expected.token_ids
    assert (output.outputs[0].cumulative_logprob, handles[0].gpu) == (expected.outputs[0].cumulative_logprob, "GPU-b")


def test_what_has_no_handle_or_lies_elsewhere_is_named(gpus: list[str]) -> None:
    with pytest.raises(ModelError, match=r"lm_head\.weight is on cpu, and only a GPU's memory has handles"):
        weight_handles.weight_handles([("lm_head.weight", torch.zeros(1))])
    handles = weight_handles.weight_handles([("norm.weight", OnGpu(torch.zeros(1), 2))])  # type: ignore[list-item]
    gpus.pop()
    with pytest.raises(
        ModelError, match=r"on the GPU GPU-c, which this process does not see \(it sees GPU-a, GPU-b\);"
    ):
        next(open_weights(handles))
