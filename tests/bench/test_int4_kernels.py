"""The table of products in 4 bits calls them as they ask to be called; here their twins run, and nothing is timed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from nanoinfer.bench import int4_kernels
from nanoinfer.errors import ConfigError


def test_products_have_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def microseconds(calls: Sequence[Callable[[], object]]) -> float:
        assert len(calls) > 1
        calls[0]()
        return 1.0

    monkeypatch.setattr(int4_kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(int4_kernels, "microseconds", microseconds)
    monkeypatch.setattr(int4_kernels, "randn", lambda *shape: torch.randn(*shape).bfloat16())
    monkeypatch.setattr(int4_kernels, "ROWS", (1, 3))
    monkeypatch.setattr(int4_kernels, "MODELS", {"small": (128, 256, 2, 2)})
    monkeypatch.setattr(int4_kernels, "KV_HEADS", 1)
    with torch.inference_mode():
        int4_kernels.products()
    _, *rows = capsys.readouterr().out.splitlines()
    assert len([row for row in rows if "small" in row]) == 2
    assert all(row.count(" / ") == 8 for row in rows if "small" in row), "four products, three figures each"


def test_a_machine_without_a_gpu_is_told_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ConfigError, match="--quantization int4 times kernels of a GPU, which this machine has not"):
        int4_kernels.run()
