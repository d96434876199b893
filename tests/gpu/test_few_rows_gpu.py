"""The kernels for steps of few rows, compiled: against their specifications, and as a path of the decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.models import few_rows_layer
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.few_rows import spec
from nanoinfer.ops.few_rows.spec import few_rows_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not overlap_options(torch.device("cuda"))["OVERLAP"],
        reason="few rows have no path of their own before Hopper",
    ),
]

ROWS = [1, 2, 3, 4]
# (outputs, inputs, gated): the products of 0.6B, 4B, 8B, Llama 8B and Qwen2.5 7B, attention's of gpt-oss-20b and
# 30B-A3B; sizes that end inside a tile
SHAPES = [
    *((4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False)),
    *((6144, 2560, False), (2560, 4096, False), (9728, 2560, True), (2560, 9728, False)),
    *((6144, 4096, False), (4096, 4096, False), (12288, 4096, True), (4096, 12288, False)),
    *((14336, 4096, True), (4096, 14336, False), (4608, 3584, False), (18944, 3584, True), (3584, 18944, False)),
    *((5120, 2880, False), (2880, 4096, False), (5120, 2048, False), (2048, 4096, False)),
    *((1001, 200, False), (520, 1032, True)),
]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def inputs(num_rows: int, num_outputs: int, size: int, gated: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What a layer has: products that end in SwiGLU begin with a norm, others have both or neither."""
    torch.manual_seed(0)
    num_lines = num_outputs * (1 + gated)
    has_norm = gated or num_outputs > size
    options = {
        "bias": randn(num_lines) if num_outputs % 512 == 0 else None,
        "norm": (randn(size), 1e-6) if has_norm else None,
        "residual": None if has_norm else randn(num_rows, num_outputs),
        "gated": gated,
    }
    return randn(num_rows, size), randn(num_lines, size) * size**-0.5, options


def in_float32(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in options.items()}
    if options["norm"] is not None:
        weight_of_norm, eps = options["norm"]
        wide["norm"] = weight_of_norm.float(), eps
    return few_rows_product.__wrapped__(x.float(), weight.float(), **wide)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_outputs", "size", "gated"), SHAPES)
def test_a_product_is_as_exact_as_its_specification(num_outputs: int, size: int, gated: bool, num_rows: int) -> None:
    x, weight, options = inputs(num_rows, num_outputs, size, gated)
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    exact = in_float32(x, weight, options)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    specification = few_rows_product.__wrapped__(x, weight, **options)
    result = few_rows_product(x, weight, **options)
    assert result.shape == (num_rows, num_outputs)
    error, specification_error = ((each.float() - exact).norm(dim=1) for each in (result, specification))
    assert (error <= 1.3 * specification_error).all()
    torch.testing.assert_close(result.float(), exact, rtol=0.03, atol=0.03 * exact.abs().mean().item())
    assert torch.equal(few_rows_product(x, weight, **options), result), "equal inputs give equal bits"


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_a_chain_in_a_cuda_graph_equals_one_that_waits_for_each_kernel(num_rows: int) -> None:
    """Kernels start while the one before them is running, so that each must wait before it reads or overwrites."""
    hidden, inner, num_layers = 1024, 3072, 8
    norms = [(randn(hidden), 1e-6) for _ in range(2 * num_layers)]
    shapes = (4096, hidden), (hidden, 2048), (2 * inner, hidden), (hidden, inner)
    all_weights = [[randn(*shape) * shape[1] ** -0.5 for shape in shapes] for _ in range(num_layers)]

    def chain(x: Tensor, waits: bool) -> Tensor:
        def run(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
            result = function(*args, **options)
            if waits:
                torch.cuda.synchronize()
            return result

        for index, (qkv_proj, o_proj, gate_up_proj, down_proj) in enumerate(all_weights):
            qkv = run(few_rows_product, x, qkv_proj, norm=norms[2 * index])
            x = run(few_rows_product, qkv[:, :2048], o_proj, residual=x)
            gated = run(few_rows_product, x, gate_up_proj, norm=norms[2 * index + 1], gated=True)
            x = run(few_rows_product, gated, down_proj, residual=x)
        return x

    x = randn(num_rows, hidden)
    chain(x, waits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x, waits=False)
    for _ in range(20):
        x.copy_(randn(num_rows, hidden))
        graph.replay()
        assert torch.equal(result, chain(x.clone(), waits=True))


def answers(monkeypatch: pytest.MonkeyPatch, max_few_rows: int, enforce_eager: bool) -> list[tuple[list[int], float]]:
    """Return what three greedy requests got in bfloat16, with the sums of their log-probabilities."""
    calls = []
    path = few_rows_layer.few_rows_product
    monkeypatch.setattr(spec, "MAX_FEW_ROWS", max_few_rows)
    monkeypatch.setattr(
        few_rows_layer, "few_rows_product", lambda *args, **kwargs: calls.append(1) or path(*args, **kwargs)
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [[*range(5, 45)], [9, 8, 7], [*range(100, 117)]]
    with LLM(Path(tiny_model_path()), dtype="bfloat16", enforce_eager=enforce_eager) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.undo()
    assert bool(calls) == (max_few_rows > 0)
    return [
        (
            output.token_ids,
            sum(entry[token].logprob for entry, token in zip(done.logprobs, done.token_ids, strict=True)),
        )
        for output in outputs
        for done in output.outputs
    ]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_path_for_few_rows_continues_prompts_as_the_common_one_does(
    monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    common, few = (answers(monkeypatch, rows, enforce_eager) for rows in (0, 4))
    assert answers(monkeypatch, 4, enforce_eager) == few, "equal steps give equal bits"
    for (tokens, logprob), (few_tokens, few_logprob) in zip(common, few, strict=True):
        if tokens == few_tokens:  # else they part where two tokens are within rounding of each other
            assert abs(logprob - few_logprob) < 0.5
    assert sum(mine[0][:4] == theirs[0][:4] for mine, theirs in zip(common, few, strict=True)) >= 2
