"""Norms of transformers' models that our kernel computes: those that it equals, and no others."""

import pytest
import torch
import transformers
from torch import Tensor, nn

from nanoinfer.models.transformers import fast_norms
from nanoinfer.models.transformers.fast_norms import use_norm_kernel
from nanoinfer.ops.norms.spec import rms_norm


def norms(class_name: str, size: int = 24) -> tuple[nn.Module, nn.Module]:
    """Return two equal norms with random weights, of a class of transformers."""
    module_name, _, name = class_name.rpartition(".")
    norm_class = getattr(getattr(transformers.models, module_name).__dict__[f"modeling_{module_name}"], name)
    pair = norm_class(size), norm_class(size)
    for norm in pair:
        norm.weight.data = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return pair


@pytest.mark.parametrize("class_name", ["llama.LlamaRMSNorm", "gemma2.Gemma2RMSNorm", "olmo2.Olmo2RMSNorm"])
def test_a_norm_that_the_kernel_equals_is_computed_by_it(class_name: str) -> None:
    __import__(f"transformers.models.{class_name.partition('.')[0]}.modeling_{class_name.partition('.')[0]}")
    norm, original = norms(class_name)
    assert use_norm_kernel(nn.Sequential(norm)) == 1
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(norm(x), original(x))
    norm.weight.data.mul_(2)  # as by an update
    assert not torch.equal(norm(x), original(x))
    assert norm(x.double()).dtype == original(x.double()).dtype  # left to the module itself


class Centred(nn.Module):
    """A norm that subtracts the mean first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(24)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (24,), self.weight, eps=self.eps)


@pytest.mark.parametrize("module", [Centred(), nn.LayerNorm(24), nn.Linear(24, 24), nn.RMSNorm(24)])
def test_another_module_stays_as_it_is(module: nn.Module) -> None:
    forward = module.forward
    assert use_norm_kernel(nn.Sequential(module)) == 0
    assert module.forward == forward


def test_the_kernel_gets_contiguous_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's projector normalises what it has transposed."""
    given = list[Tensor]()

    def noted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        given.append(x)
        return rms_norm(x, weight, eps)

    __import__("transformers.models.llama.modeling_llama")
    norm, original = norms("llama.LlamaRMSNorm")
    assert use_norm_kernel(nn.Sequential(norm)) == 1
    monkeypatch.setattr(fast_norms, "rms_norm", noted)
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)).t()
    torch.testing.assert_close(norm(x), original(x))
    assert not given
    norm(x.contiguous())
    assert len(given) == 1
