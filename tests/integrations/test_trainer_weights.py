"""The weights of trainers that have split their model over processes, or wrapped it."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

from nanoinfer import ConfigError
from nanoinfer.integrations.trl import named_weights


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3, bias=False))  # 5 rows: halves of different sizes


def gather_in_rank(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, whole = make_model(), make_model()
    for layer in model:
        fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    assert model[0].weight.to_local().shape != whole[0].weight.shape
    for (name, tensor), (expected_name, expected) in zip(named_weights(model), whole.named_parameters(), strict=True):
        assert name == expected_name
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, expected)
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_what_fsdp_2_has_split_is_gathered_tensor_by_tensor_on_all_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(gather_in_rank, (str(tmp_path),), nprocs=2, start_method="forkserver")


def test_what_zero_3_has_split_is_gathered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for DeepSpeed, which fills a parameter while the block runs."""
    model, whole = make_model(), dict(make_model().named_parameters())
    gathered: list[int] = []
    for param, full in zip(model.parameters(), whole.values(), strict=True):
        param.ds_id, param.full, param.data = len(gathered), full.data, torch.empty(0)  # type: ignore[attr-defined]

    @contextmanager
    def gather(params: list[Any]) -> Any:
        [param] = params
        gathered.append(sum(other.numel() > 0 for other in model.parameters()))
        param.data = param.full
        yield
        param.data = torch.empty(0)

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=SimpleNamespace(GatheredParameters=gather)))
    for name, tensor in named_weights(model):
        assert torch.equal(tensor, whole[name])
    assert gathered == [0, 0, 0], "the one before was given back"


def test_names_of_wrappers_are_left_out() -> None:
    model = nn.ModuleDict(
        {"_orig_mod": nn.ModuleDict({"a": nn.ModuleDict({"_checkpoint_wrapped_module": make_model()})})}
    )
    assert [name for name, _ in named_weights(model)] == ["a.0.weight", "a.0.bias", "a.1.weight"]


def test_fsdp_1_and_split_models_with_adapters_are_refused() -> None:
    wrapped = nn.Sequential(type("FullyShardedDataParallel", (nn.Sequential,), {})())
    with pytest.raises(ConfigError, match="split by FSDP 1, which is not gathered; use fsdp_version=2"):
        next(named_weights(wrapped))
    model = make_model()
    model.merge_adapter = lambda: None  # type: ignore[assignment]
    model[0].weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="adapters of a model that is split are not merged"):
        next(named_weights(model))
