"""The kernels of adapters in Triton's interpreter, on the CPU, against their specification.

On a GPU: tests/gpu/test_lora_gpu.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanoinfer.ops.activations.spec import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from nanoinfer.ops.lora import spec
from nanoinfer.ops.lora.spec import LoRARows, add_lora, gated_with_lora

triton = pytest.importorskip("triton")

from nanoinfer.ops.common.device_properties import next_power_of_2  # noqa: E402
from nanoinfer.ops.lora import triton as kernels  # noqa: E402
from nanoinfer.ops.routing import triton as routing  # noqa: E402
from tests.kernels.helpers import exact_bfloat16, loops_are_interpreted  # noqa: E402, F401 (a fixture)
from tests.lora.adapters import random_products  # noqa: E402

NAN = float("nan")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
]


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    """Parts that no program has written show in the results."""
    torch.use_deterministic_algorithms(True)  # which fills new memory
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("slots", "num_slots", "num_inputs", "sizes", "max_rank"),
    [
        ([0], 1, 96, (40,), 16),  # one token, which needs no sorting
        ([2], 2, 96, (40,), 16),  # without an adapter
        ([0, 2, 1, 2, 0], 2, 160, (48, 16, 16), 8),  # q, k and v; blocks of outputs that two of them share
        ([3, 0, 3, 1] * 12, 4, 100, (70, 70), 5),  # no whole tiles of anything
        ([1] * 20 + [0] * 17, 3, 64, (130,), 64),
        ([0, 1] * 3, 2, 40, (24, 24), 80),  # ranks in several steps
    ],
)
def test_products_of_adapters_equal_their_specification(
    slots: list[int], num_slots: int, num_inputs: int, sizes: tuple[int, ...], max_rank: int
) -> None:
    x, out, rows, matrices = random_products(slots, num_slots, num_inputs, sizes, max_rank)
    wanted = out.clone()
    add_lora(wanted, x, rows, matrices)
    first_out = out.clone()
    kernels.add_lora(out, x, rows, matrices)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    has_none = rows.slots == num_slots
    assert torch.equal(out[has_none], first_out[has_none])
    assert has_none.all() or not torch.allclose(out, first_out)
    plan = rows.plan
    kernels.add_lora(first_out, x, rows, matrices)
    assert rows.plan is plan, "the layers of a step share its plan"
    torch.testing.assert_close(first_out, out)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul, gelu_and_mul])
@pytest.mark.parametrize(
    ("slots", "num_slots", "num_inputs", "size", "max_rank"),
    [
        ([0], 1, 96, 40, 16),
        ([2], 2, 96, 70, 16),
        ([3, 0, 3, 1] * 12, 4, 300, 70, 5),
        ([0, 1, 2], 2, 40, 24, 80),
    ],
)
def test_gate_and_up_are_expanded_and_activated_at_once(
    slots: list[int], num_slots: int, num_inputs: int, size: int, max_rank: int, activation: Any
) -> None:
    x, gate_up, rows, matrices = random_products(slots, num_slots, num_inputs, (size, size), max_rank)
    out, shrunk = kernels.gated_with_lora(gate_up, x, rows, matrices, activation)
    assert shrunk is None
    assert not torch.allclose(out, activation(gate_up)) or slots == [num_slots]
    wanted, _ = gated_with_lora(gate_up, x, rows, matrices, activation)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_multiprocessors", [1, 1000])  # tokens are many for one, and few for 1,000
@pytest.mark.parametrize(
    ("slots", "num_slots", "size", "max_rank"),
    [
        ([0], 1, 70, 16),
        ([2], 2, 40, 16),
        ([3, 0, 3, 1] * 12, 4, 600, 5),
        ([0, 1, 2], 2, 24, 64),
        ([0, 1, 2], 2, 24, 80),
    ],
)
def test_activated_rows_are_shrunk_for_the_next_product(
    slots: list[int],
    num_slots: int,
    size: int,
    max_rank: int,
    num_multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda _: num_multiprocessors)
    monkeypatch.setattr(kernels, "GATED_COLUMNS", 16)
    x, gate_up, rows, matrices = random_products(slots, num_slots, 96, (size, size), max_rank)
    _, out, _, following = random_products(slots, num_slots, size, (32,), max_rank)
    wanted = out.clone()
    for given, ops in ((out, kernels), (wanted, spec)):
        activated, shrunk = ops.gated_with_lora(gate_up.clone(), x, rows, matrices, silu_and_mul, following.a)
        assert (shrunk is None) == (ops is kernels and (max_rank > 64 or num_multiprocessors > 1))
        ops.add_lora(given, activated if shrunk is None else activated.fill_(NAN), rows, following, shrunk)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


def test_few_tokens_are_split_and_the_parts_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda _: 8)
    x, out, rows, matrices = random_products([0, 1, 0], 2, 500, (32,), 16)
    parts: list[torch.Tensor] = []
    launch = kernels._expand_kernel.run

    def note_parts(inner: torch.Tensor, *args: Any, **options: Any) -> None:
        parts.append(inner)
        launch(inner, *args, **options)

    monkeypatch.setattr(kernels._expand_kernel, "run", note_parts)
    wanted = out.clone()
    add_lora(wanted, x, rows, matrices)
    kernels.add_lora(out, x, rows, matrices)
    assert len(parts[0]) > 1
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_one_adapter_has_does_not_reach_the_tokens_of_another() -> None:
    x, out, rows, matrices = random_products([0, 1, 2, 1], 2, 64, (32,), 8)
    wanted = out.clone()
    add_lora(wanted, x, rows, matrices)
    matrices.a[0, 0, 0] = float("inf")
    matrices.b[0, 3] = float("nan")
    kernels.add_lora(out, x, rows, matrices)
    torch.testing.assert_close(out[1:], wanted[1:], atol=1e-4, rtol=1e-4)
    assert not out[0].isfinite().all()


def test_no_tokens_are_no_launch() -> None:
    x, out, rows, matrices = random_products([], 2, 64, (32,), 8)
    kernels.add_lora(out, x, rows, matrices)
    assert rows.plan is None


def test_numbers_in_bfloat16_are_rounded_as_specified(exact_bfloat16: None) -> None:  # noqa: F811
    x, out, rows, matrices = random_products([0, 1, 2, 1], 2, 64, (32, 16), 8, torch.bfloat16)
    wanted = out.clone()
    add_lora(wanted, x, rows, matrices)
    kernels.add_lora(out, x, LoRARows(rows.slots), matrices)
    torch.testing.assert_close(out, wanted, atol=0.05, rtol=0.02)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("max_rank", "num_parts"), [(16, 1), (16, 3), (64, 3)])
def test_large_tiles_shrink_their_activated_rows_too(
    max_rank: int,
    num_parts: int,
    exact_bfloat16: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parts of which all are added up, also where a tile and its ranks are so large that few are fetched at once."""
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda _: 1)
    monkeypatch.setattr(kernels, "LEAST_TILES", 1)
    if num_parts > 1:
        monkeypatch.setattr(kernels, "LARGE_TILE_BLOCKS", 1)
    slots = [0, 1, 1, 2] * 40
    x, out, rows, matrices = random_products(slots, 2, 1100, (140, 140), max_rank, torch.bfloat16)
    _, following_out, _, following = random_products(slots, 2, 140, (32,), max_rank, torch.bfloat16)
    results = []
    for ops in (spec, kernels):
        sums, last = out.clone(), following_out.clone()
        ops.add_lora(sums, x, rows, matrices)
        activated, shrunk = ops.gated_with_lora(out.clone(), x, rows, matrices, silu_and_mul, following.a)
        ops.add_lora(last, activated, rows, following, shrunk)
        assert shrunk is not None
        assert len(shrunk) == (num_parts if ops is kernels else 1)
        results.append((sums, activated, last))
    assert rows.plan.tile_size == 128
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=0.01 * float(wanted.abs().max()), rtol=0)


def test_steps_of_powers_of_two_tokens_launch_all_kernels_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what an engine compiles as it loads is all that it launches."""
    launched = set[Any]()

    class Noted:
        """Stands for a kernel whose launches are noted, with all that it is compiled for."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, _grid: Any) -> Any:
            return lambda *args, **constants: launched.add(
                (self.name, tuple(arg is None for arg in args), tuple(sorted(constants.items())))
            )

    for module, name in (
        *((kernels, name) for name in ("_shrink_kernel", "_expand_kernel", "_gated_kernel")),
        *((routing, name) for name in ("_plan_kernel", "_count_kernel")),
    ):
        monkeypatch.setattr(module, name, Noted(name))
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda _: 132)
    *_, gate_up = random_products([], 5, 640, (2000, 2000), 16)
    *_, down = random_products([], 5, 2000, (640,), 16)

    def kernels_of(num_tokens: int) -> set[Any]:
        launched.clear()
        x, both, rows = torch.empty(1, 640), torch.empty(1, 4000), LoRARows(torch.empty(num_tokens, dtype=torch.int32))
        x, both = x.expand(num_tokens, -1), both.expand(num_tokens, -1)
        activated, shrunk = kernels.gated_with_lora(both, x, rows, gate_up, silu_and_mul, down.a)
        kernels.add_lora(x, activated, rows, down, shrunk)
        return {*launched}

    for num_tokens in (*range(1, 140, 3), 257, 1025, 1072, 1500, 2049, 4097, 5000, 8193, 9000):
        assert kernels_of(num_tokens) == kernels_of(next_power_of_2(num_tokens)), f"{num_tokens} tokens"
