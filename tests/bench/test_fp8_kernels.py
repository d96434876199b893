"""The tables of FP8 kernels call them as they ask to be called; here their twins run, and nothing is timed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from nanoinfer.bench import fp8_kernels
from nanoinfer.errors import ConfigError
from nanoinfer.ops.common.fp8_format import QuantizedRows
from nanoinfer.quantization import method_selection


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def microseconds(calls: Sequence[Callable[[], object]]) -> float:
        assert len(calls) > 1
        calls[0]()
        return 1.0

    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    monkeypatch.setattr(fp8_kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(fp8_kernels, "microseconds", microseconds)
    monkeypatch.setattr(fp8_kernels, "randn", lambda *shape: torch.randn(*shape).bfloat16())
    monkeypatch.setattr(fp8_kernels, "ROWS", (1, 3))
    monkeypatch.setattr(fp8_kernels, "MOE_TOKENS", (1, 3))
    monkeypatch.setattr(fp8_kernels, "MODELS", {"small": (128, 256, 2, 2)})
    monkeypatch.setattr(fp8_kernels, "MOE_MODELS", {"small": (128, 128, 4, 2)})
    monkeypatch.setattr(fp8_kernels, "KV_HEADS", 1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["channels", "blocks"])
def test_products_and_experts_have_a_row_for_each_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = fp8_kernels.FORMATS[name]
    fp8_kernels.products(name, config)
    assert capsys.readouterr().out.count("\n") >= 1 + 2
    fp8_kernels.experts(name, config)
    assert "small" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
def test_inputs_are_rounded_before_products_are_timed() -> None:
    layers = fp8_kernels.quantized(
        [fp8_kernels.RowParallelLinear(128, 64, False, fp8_kernels.TensorParallel())], fp8_kernels.FORMATS["channels"]
    )
    assert isinstance(layers[0].quant_method.round_input(torch.randn(2, 128)), QuantizedRows)


def test_a_machine_without_fp8_products_is_told_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may have them")
    with pytest.raises(ConfigError, match="--quantization fp8 times FP8 products, which this machine has not"):
        fp8_kernels.run()
