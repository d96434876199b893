"""Weights from a trainer's process to the engine's, over a process group that both are in (gloo on a CPU)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, ModelError, SamplingParams, tiny_model_path
from nanoinfer.checkpoint.loader import iterate_weights
from nanoinfer.control import weight_transfer
from nanoinfer.control.weight_transfer import receive_weights, send_weights
from tests.executor.test_external_runner import OPTIONS, in_processes, said

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ODD = {
    "a": torch.arange(3.0),
    "b": torch.tensor(2.5).bfloat16(),
    "c": torch.zeros(0, 4),
    "d": torch.arange(40.0).half(),
}


def changed() -> dict[str, Tensor]:
    """The tiny model's weights with the sign of some changed, so that it says something else."""
    weights = dict(iterate_weights(tiny_model_path()))
    return {name: -tensor if name.endswith("layernorm.weight") else tensor for name, tensor in weights.items()}


def trainer_and_engine(rank: int) -> dict[str, Any]:
    """Rank 0 trains, and rank 1 samples."""
    if rank == 0:
        send_weights(ODD.items(), bucket_bytes=40)
        send_weights(((name, torch.nn.Parameter(tensor)) for name, tensor in changed().items()), bucket_bytes=2**20)
        return {}
    received = dict(receive_weights(0))
    assert [*received] == [*ODD]
    found: dict[str, Any] = {"odd": [str(tensor.dtype) for tensor in received.values()]}
    assert all(torch.equal(received[name], tensor) for name, tensor in ODD.items())
    with LLM(tiny_model_path(), tensor_parallel_size=2, **OPTIONS) as llm:  # both ranks take their part
        found["before"] = said(llm, ["Sort 3"], [GREEDY])
        llm.update_weights(receive_weights(0))
        found["after"] = said(llm, ["Sort 3"], [GREEDY])
    return found


def test_an_engine_takes_the_weights_that_a_trainer_sends(tmp_path: Path) -> None:
    with LLM(tiny_model_path(), **OPTIONS) as llm:
        before = said(llm, ["Sort 3"], [GREEDY])
        llm.update_weights(changed())
        after = said(llm, ["Sort 3"], [GREEDY])
    assert before != after
    _, found = in_processes(trainer_and_engine, tmp_path)
    assert found == {
        "odd": ["torch.float32", "torch.bfloat16", "torch.float32", "torch.float16"],
        "before": before,
        "after": after,
    }


@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1, 4), (40, 2), (10**6, 1)])
def test_tensors_travel_in_buckets(bucket_bytes: int, num_buckets: int) -> None:
    """Of 16, 16, 0 and 80 bytes."""
    *full, end = weight_transfer._buckets(ODD.items(), bucket_bytes)
    assert end == ([], [])
    assert [described.name for bucket, _ in full for described in bucket] == [*ODD]
    assert sum(described.num_bytes for bucket, _ in full for described in bucket) == 112
    assert len(full) == num_buckets


def test_a_list_that_is_full_closes_its_bucket() -> None:
    tensors = [(f"{'x' * 1000}.{index}", torch.zeros(1)) for index in range(100)]
    *full, _ = weight_transfer._buckets(tensors, 10**6)
    assert len(full) == 2
    assert all(len(weight_transfer._written(bucket)) <= weight_transfer.LIST_BYTES for bucket, _ in full)
    with pytest.raises(ModelError, match="has 70000 letters; use the names of the checkpoint"):
        [*weight_transfer._buckets([("y" * 70000, torch.zeros(1))], 10**6)]
