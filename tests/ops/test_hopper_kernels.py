"""Kernels for Hopper are used where they run. Only an absent or too old Triton may keep a Hopper GPU from them."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import nanoinfer
from nanoinfer.device import import_error
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.backend_selection import FLASH_ATTN, AttentionBackends
from nanoinfer.ops.common.device_properties import has_hopper_kernels

CUDA = torch.device("cuda")
PACKAGE = Path(nanoinfer.__file__).parent
HOPPER = sorted(PACKAGE.rglob("*hopper*.py"))


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PyTorch say that there is a Hopper GPU."""
    has_hopper_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    has_hopper_kernels.cache_clear()


@pytest.mark.usefixtures("hopper_gpu")
def test_a_hopper_gpu_has_its_kernels_with_this_triton() -> None:
    pytest.importorskip("triton", minversion="3.6")
    assert has_hopper_kernels(CUDA)
    spec = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=1.0)
    backend: Any = AttentionBackends("auto", CUDA, torch.bfloat16, block_size=256).select(spec)
    assert backend.name == "triton"
    assert backend.has_hopper_kernel


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.5.1", False), ("2.9", False), ("3.6.0", True), ("3.10.0+git1a2b", True), ("4.0.0rc1", True)],
)
def test_from_triton_3_6_on(version: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    triton: Any = ModuleType("triton")
    triton.__version__, triton.__spec__ = version, SimpleNamespace(origin="there", parent="triton")
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert has_hopper_kernels(CUDA) == expected


@pytest.mark.usefixtures("hopper_gpu")
def test_not_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not has_hopper_kernels(CUDA)


def test_not_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 9), (10, 0)):
        has_hopper_kernels.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, its=capability: its)
        assert not has_hopper_kernels(CUDA)


def test_every_module_of_hopper_kernels_can_be_imported() -> None:
    """As on a GPU, without the interpreter. The modules are found by their names, so a new one is among them."""
    pytest.importorskip("triton", minversion="3.6")
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in HOPPER]
    assert len(names) >= 3, names
    code = f"import os\nos.environ['TRITON_INTERPRET'] = '0'\nimport {', '.join(names)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def stand_in_for_flash_attn() -> Any:
    """A module with the functions of flash-attn 2.8, which say in their docstrings how many arguments they take."""
    module: Any = ModuleType("flash_attn_2_cuda")
    for name, num_arguments in (("varlen_fwd", 21), ("fwd_kvcache", 20)):
        arguments = ", ".join(f"arg{index}: torch.Tensor" for index in range(num_arguments))
        setattr(module, name, SimpleNamespace(__doc__=f"{name}({arguments}) -> list"))
    return module


def test_flash_attn_is_found_where_its_extension_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, FLASH_ATTN, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", stand_in_for_flash_attn())
    assert import_error(FLASH_ATTN) is None
    monkeypatch.delitem(sys.modules, FLASH_ATTN)
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    assert "flash_attn_2_cuda" in str(import_error(FLASH_ATTN))


@pytest.mark.parametrize("line", ["import nanoinfer.nowhere", "from nanoinfer.device import nothing"])
def test_a_broken_module_of_ours_does_not_count_as_absent(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_ours.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="nanoinfer"):
        import_error("imports_ours")
