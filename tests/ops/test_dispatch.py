"""Every operation has a specification that needs no Triton, and a kernel that is called alike."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import nanoinfer
from nanoinfer.ops import dispatch
from nanoinfer.ops.dispatch import kernel_of

OPS = Path(nanoinfer.__file__).parent / "ops"
SPECS = sorted(path.parent.name for path in OPS.glob("*/spec.py"))
# Whose kernels take plans, and are chosen by attention backends, or by the attention of towers.
PLANNED = {"decode_attention", "prefill_attention", "segment_attention"}


def operations(name: str) -> list[object]:
    """The functions of ops/NAME/spec.py that are decorated with `op`."""
    module = import_module(f"nanoinfer.ops.{name}.spec")
    return [
        function
        for function in vars(module).values()
        if getattr(function, "__module__", None) == module.__name__ and hasattr(function, "__wrapped__")
    ]


def parameters(function: object) -> list[tuple[str, object]]:
    assert callable(function)
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("name", SPECS)
def test_a_kernel_takes_what_its_specification_takes(name: str) -> None:
    pytest.importorskip("triton")
    assert bool(operations(name)) == (name not in PLANNED)
    for specification in operations(name):
        assert inspect.getclosurevars(specification).nonlocals["on_cuda"]() is kernel_of(specification)  # type: ignore[arg-type]
        assert parameters(kernel_of(specification)) == parameters(specification)  # type: ignore[arg-type]


def test_specifications_need_no_triton() -> None:
    imports = "".join(f"import nanoinfer.ops.{name}.spec\n" for name in SPECS)
    code = f"import sys\nsys.modules['triton'] = None\n{imports}"
    subprocess.run([sys.executable, "-c", code], check=True)


class CudaTensor(Tensor):
    """A tensor that only says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("has_triton", [True, False])
def test_on_cuda_the_kernel_runs_where_triton_is_installed(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imports: list[str] = []

    def import_module(name: str) -> SimpleNamespace:
        imports.append(name)
        return SimpleNamespace(double=lambda x: "kernel")

    monkeypatch.setattr(dispatch, "import_error", lambda name: None if has_triton else ImportError("not there"))
    monkeypatch.setattr(dispatch, "import_module", import_module)

    def double(x: Tensor) -> str:
        return "plain"

    double.__module__ = "nanoinfer.ops.doubling.spec"
    double = dispatch.op(double)
    assert (double(torch.ones(1)), imports) == ("plain", [])
    for _ in "ab":
        assert double(torch.ones(1).as_subclass(CudaTensor)) == ("kernel" if has_triton else "plain")
    assert imports == ["nanoinfer.ops.doubling.triton"] * has_triton, "it is imported once, and only where it runs"
    assert (double.__name__, double.__wrapped__(3)) == ("double", "plain")  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="double takes a tensor first, not a int"):
        double(3)  # type: ignore[arg-type]
