"""The kernels for steps of few rows in Triton's interpreter, on the CPU, against their specifications.

On a GPU: tests/gpu/test_few_rows_gpu.py.
"""

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.few_rows import spec as few_rows

triton = pytest.importorskip("triton")

from nanoinfer.ops.few_rows import triton as few_rows_kernels  # noqa: E402
from nanoinfer.ops.few_rows.triton import Tiling  # noqa: E402
from tests.kernels.helpers import loops_are_interpreted  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
]

TILINGS = [
    Tiling(warps=2, slices=1, outputs=2, ahead=1),
    Tiling(warps=4, slices=2, outputs=4, ahead=2),  # which two or three steps of a slice do not fill
    Tiling(warps=2, slices=2, outputs=2, ahead=8),  # all of the weight is read ahead
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_amid_nan(num_rows: int, size: int, seed: int = 0) -> Tensor:
    """Random rows, with NaN wherever nothing should be read."""
    wide = torch.full((num_rows, size + 512), float("nan"))
    wide[:, :size] = randn(num_rows, size, seed=seed)
    return wide[:, :size]


@pytest.fixture(params=TILINGS, ids=str)
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tiling:
    monkeypatch.setattr(few_rows_kernels, "choose_tiling", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize(
    ("num_outputs", "size", "num_rows"),
    [
        *((64, 512, num_rows) for num_rows in (1, 2, 3, 4)),
        *((40, 96, num_rows) for num_rows in (2, 4)),
        *((33, 600, num_rows) for num_rows in (1, 4)),
        *((9, 1536, num_rows) for num_rows in (2, 3)),
        *((10, 1300, num_rows) for num_rows in (1, 3)),
    ],
)
def test_a_product_equals_its_specification(num_outputs: int, size: int, num_rows: int, tiling: Tiling) -> None:
    x, weight = rows_amid_nan(num_rows, size), randn(num_outputs, size, seed=1)
    norm = rows_amid_nan(1, size, seed=2)[0], 1e-6
    for its_norm in (None, norm):
        result = few_rows_kernels.few_rows_product(x, weight, norm=its_norm)
        expected = few_rows.few_rows_product(x, weight, norm=its_norm)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize(("num_lines", "size"), [(2056, 2560), (2056, 1100), (512, 1536), (64, 3000), (520, 896)])
def test_the_tilings_that_are_chosen_fit_sizes_that_they_do_not_divide(
    num_rows: int, num_lines: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few of the lines, as the interpreter is slow."""
    choose, few_lines = few_rows_kernels.choose_tiling, 16
    monkeypatch.setattr(few_rows_kernels, "choose_tiling", lambda rows, _, *rest: choose(rows, num_lines, *rest))
    x, norm = rows_amid_nan(num_rows, size), (randn(size, seed=2), 1e-6)
    weight = randn(few_lines, size, seed=1) * size**-0.5
    for gated in (False, True):
        result = few_rows_kernels.few_rows_product(x, weight, norm=norm, gated=gated)
        expected = few_rows.few_rows_product(x, weight, norm=norm, gated=gated)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_what_is_fused_equals_separate_layers(
    has_bias: bool, gated: bool, has_residual: bool, has_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever two of the four options are, they meet every tiling."""
    tiling = TILINGS[(has_bias + gated + has_residual + has_norm) % len(TILINGS)]
    monkeypatch.setattr(few_rows_kernels, "choose_tiling", lambda *_: tiling)
    num_rows, num_outputs, size = 3, 44, 344
    num_lines = 2 * num_outputs if gated else num_outputs
    x, weight = 3 * randn(num_rows, size + 8)[:, :size], randn(num_lines, size, seed=1) / 12  # rows out of wider ones
    options = {
        "bias": randn(num_lines, seed=2) if has_bias else None,
        "norm": (randn(size, seed=3), 1e-5) if has_norm else None,
        "residual": randn(num_rows, num_outputs, seed=4) if has_residual else None,
        "gated": gated,
    }
    result = few_rows_kernels.few_rows_product(x, weight, **options)
    torch.testing.assert_close(result, few_rows.few_rows_product(x, weight, **options), rtol=1e-5, atol=1e-5)


def test_a_row_of_nan_or_of_zeros_leaves_the_others_alone(tiling: Tiling) -> None:
    x, weight, norm = randn(4, 96), randn(24, 96, seed=1), (randn(96, seed=2), 1e-6)
    expected = few_rows.few_rows_product(x, weight, norm=norm)
    x[1], x[2, 5] = 0.0, float("nan")
    result = few_rows_kernels.few_rows_product(x, weight, norm=norm)
    torch.testing.assert_close(result[[0, 3]], expected[[0, 3]], rtol=1e-5, atol=1e-4)
    assert (result[1] == 0).all()
    assert result[2].isnan().all()


def test_16_bits_are_rounded_about_as_often_as_by_separate_layers(tiling: Tiling) -> None:
    x, weight, norm = randn(3, 128).half(), (randn(128, 128, seed=1) / 11).half(), randn(128, seed=2).half()
    result = few_rows_kernels.few_rows_product(x, weight, norm=(norm, 1e-6), gated=True)
    assert result.dtype == torch.float16
    exact = few_rows.few_rows_product(x.float(), weight.float(), norm=(norm.float(), 1e-6), gated=True)
    specification = few_rows.few_rows_product(x, weight, norm=(norm, 1e-6), gated=True)
    assert (result.float() - exact).norm() < 1.5 * (specification.float() - exact).norm()


def test_a_result_in_float32_is_not_rounded_before(tiling: Tiling) -> None:
    x, weight = randn(3, 128).half(), (randn(40, 128, seed=1) / 11).half()
    result = few_rows_kernels.few_rows_product(x, weight, out_dtype=torch.float32)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, few_rows.few_rows_product(x, weight, out_dtype=torch.float32))
    torch.testing.assert_close(result, x.float() @ weight.float().t())
    assert not torch.equal(result, result.half().float())


def test_no_rows_give_no_rows() -> None:
    assert few_rows_kernels.few_rows_product(randn(0, 64), randn(32, 64)).shape == (0, 32)
