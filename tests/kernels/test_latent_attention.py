"""The kernels of latent attention in Triton's interpreter, on the CPU, against plain PyTorch. On a GPU: tests/gpu."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.layers.attention.latent import TorchLatentBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata
from nanoinfer.models import execution, latent_attention
from nanoinfer.ops.latent_attention.spec import (
    gather_latents,
    norm_rope_store_latents,
    store_and_absorb,
    values_of_sums,
)
from tests.latent_cases import (
    DECODES,
    FLASH,
    PREFILLS,
    SIZES,
    LatentStep,
    decode_step,
    moved,
    prefill_step,
    randn,
    write_arguments,
)
from tests.models.test_architectures import checkpoint, draw_prompts

pytest.importorskip("triton")

from nanoinfer.layers.attention import latent_triton
from nanoinfer.layers.attention.latent_triton import TritonLatentBackend
from nanoinfer.ops.decode_attention import triton as decode_kernels
from nanoinfer.ops.latent_attention import triton as kernels
from tests.kernels.helpers import exact_bfloat16, loops_are_interpreted

__all__ = ["checkpoint", "exact_bfloat16"]  # fixtures
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
    # Of queries after the last of a group, whose results are not stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 5)


def assert_equals_specification(step: LatentStep, atol: float = 1e-5) -> torch.Tensor:
    found, expected = step.run(TritonLatentBackend(step.spec, CPU)), step.specification()
    if isinstance(step.metadata, DecodeMetadata):  # rows without context, and tokens that a row does not have
        lens = step.metadata.with_a_row_for_each_token().context_lens
        found, expected = found[lens > 0], expected[lens > 0]
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=1e-4)
    return found


@pytest.mark.parametrize("name", DECODES)
def test_decode_equals_its_specification(name: str) -> None:
    assert_equals_specification(decode_step(*DECODES[name]))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_rows_that_read_a_prefix_together_get_what_each_gets_alone(num_tokens: int) -> None:
    step = decode_step(16, (40, 50, 33, 70, 45), num_tokens, num_shared=2, num_sharers=(2, 1, 2))
    together = assert_equals_specification(step)
    alone = replace(step, metadata=replace(step.metadata, shared_prefixes=None))
    torch.testing.assert_close(together, assert_equals_specification(alone), atol=1e-5, rtol=1e-4)
    assert step.metadata.shared_prefixes is not None
    assert TritonLatentBackend(step.spec, CPU).plan(step.metadata, step.cache).plans[step.spec].prefixes is not None


@pytest.mark.parametrize("name", [name for name in PREFILLS if "chunks" in name])
def test_prefill_over_cached_vectors_equals_its_specification(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_triton, "MAX_EXPANDED", 0)
    assert_equals_specification(prefill_step(*PREFILLS[name]))


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "is_absorbed"),
    [
        ((1000, 600), (1000, 900), False),  # a prompt of which the step before computed a part
        ((4000,), (8000,), True),  # much memory
        ((100, 100), (2100, 2100), True),  # few tokens after long prefixes
    ],
)
def test_prefill_absorbs_where_few_tokens_attend_to_many_of_earlier_steps(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], is_absorbed: bool
) -> None:
    backend = TritonLatentBackend(decode_step(20, (1,), sizes=FLASH).spec, CPU)
    assert backend._absorbing_pays(query_lens, context_lens) == is_absorbed


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", ["whole prompts", "chunks and whole prompts"])
def test_prefill_over_expanded_keys_and_values_equals_its_specification(
    name: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of earlier steps are expanded too, where that takes less than absorbing."""
    monkeypatch.setattr(kernels, "has_large_shared_memory", lambda device: not small)
    monkeypatch.setattr(TritonLatentBackend, "_absorbing_pays", lambda *_: False)
    step = prefill_step(*PREFILLS[name])
    spec = step.spec
    q = randn(len(step.absorbed), spec.num_heads, SIZES.plain_size + SIZES.rotary_size)
    weight, metadata = randn(3, 24, SIZES.plain_size + SIZES.value_size), step.metadata
    of_chunks = zip(metadata.block_tables, metadata.context_lens, metadata.query_lens, strict=True)
    vectors = torch.cat([gather_latents(step.cache, table, end)[-num:] for table, end, num in of_chunks])

    def expand(latents: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tl,hls->ths", latents, weight)

    found, expected = (
        backend.attend_to_heads(q, vectors, expand, step.cache, backend.plan(step.metadata, step.cache))
        for backend in (TritonLatentBackend(spec, CPU), TorchLatentBackend(spec))
    )
    backend = TritonLatentBackend(spec, CPU)
    assert not backend.reads_latents(backend.plan(step.metadata, step.cache))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_sizes_of_glm_flash_equal_the_specification(monkeypatch: pytest.MonkeyPatch, exact_bfloat16: None) -> None:
    """In bfloat16; of prefill also with less shared memory."""
    assert_equals_specification(decode_step(20, (5, 33), sizes=FLASH).to("cpu", torch.bfloat16), atol=0.02)
    for small in (False, True):
        monkeypatch.setattr(kernels, "has_large_shared_memory", lambda device, small=small: not small)
        step = prefill_step(2, (9,), (20,), sizes=FLASH)
        assert_equals_specification(step.to("cpu", torch.bfloat16), atol=0.02)


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, is_interleaved=True), FLASH])
@pytest.mark.parametrize("num_heads", [1, 20])
def test_the_write_equals_its_specification(num_heads: int, sizes: object) -> None:
    arguments = write_arguments(sizes, 7, num_heads, torch.float32)  # type: ignore[arg-type]
    theirs, ours = moved(arguments, "cpu"), moved(arguments, "cpu")
    expected, found = norm_rope_store_latents(*theirs), kernels.norm_rope_store_latents(*ours)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours[3], theirs[3])
    torch.testing.assert_close(ours[6].k, theirs[6].k)
    assert not torch.equal(ours[3], arguments[3])
    assert (ours[6].k != 0).any(dim=3).sum() == 4, "two of seven tokens have slots, and the others have none"


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, is_interleaved=True), FLASH])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_write_that_absorbs_the_queries_equals_its_specification(num_tokens: int, sizes: Any) -> None:
    """The weights of keys lie before those of values; latents of 24 and of 512 numbers are cut into columns."""
    num_heads = 20 if sizes is SIZES else 2
    arguments = write_arguments(sizes, num_tokens, num_heads, torch.float32)
    arguments[7] = torch.tensor([3, -1, 0])[:num_tokens]  # slots
    weight = randn(num_heads, sizes.plain_size + sizes.value_size, sizes.latent_size, seed=9)[:, : sizes.plain_size]
    theirs, ours = moved(arguments, "cpu"), moved(arguments, "cpu")
    expected, found = store_and_absorb.__wrapped__(*theirs, weight), kernels.store_and_absorb(*ours, weight)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours[3], theirs[3])
    torch.testing.assert_close(ours[6].k, theirs[6].k)
    assert (ours[6].k != 0).any(dim=3).sum() == min(2, num_tokens), "one token of three has no slot"


@pytest.mark.parametrize("sizes", [SIZES, FLASH])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_values_of_sums_equal_their_specification(num_tokens: int, sizes: Any) -> None:
    sums = randn(num_tokens, 3, sizes.latent_size)
    weight = randn(3, sizes.plain_size + sizes.value_size, sizes.latent_size, seed=1)[:, sizes.plain_size :]
    expected, found = values_of_sums.__wrapped__(sums, weight), kernels.values_of_sums(sums, weight)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_rows_are_combined_row_by_row_and_many_by_shares(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of latents of 512 numbers: eight programs share two rows, the first of which is whole in one share.

    One or two rows over many programs are combined row by row, too, in other tiles: smaller ones where splits are few,
    and several in turn where there are more than a tile holds.
    """
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 8)
    step = decode_step(3, (5, 150), num_tokens, sizes=FLASH)
    together = assert_equals_specification(step)
    in_turn: list[tuple[str, Any]] = [("FEW_ROWS_TO_SHARES", 4), ("FEW_SPLITS", 4), ("OF_FEW_ROWS", (4, 32, 4))]
    for name, value in (*in_turn, ("ROWS_TO_SHARES", 1000)):
        monkeypatch.setattr(decode_kernels, name, value)
        torch.testing.assert_close(together, assert_equals_specification(step), atol=1e-5, rtol=1e-4)


def test_steps_without_tokens_write_nothing() -> None:
    arguments = write_arguments(SIZES, 0, 2, torch.float32)
    assert kernels.norm_rope_store_latents(*arguments).shape == (0, 32)
    assert kernels.store_and_absorb(*arguments, randn(2, 12, 24)).shape == (0, 2, 24)
    assert kernels.values_of_sums(randn(0, 2, 24), randn(2, 20, 24)).shape == (0, 2, 20)


@pytest.mark.parametrize(("max_few_rows", "max_expanded"), [(0, 0), (4, 10**6)])
def test_an_engine_over_the_kernels_gives_the_tokens_of_plain_attention(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, max_few_rows: int, max_expanded: int
) -> None:
    """Whole prompts and chunks, a second sample of each that reads its prompt with the first."""
    folder, prompts = (
        checkpoint("Glm4MoeLiteForCausalLM", 0, num_hidden_layers=2, mlp_layer_types=None),
        draw_prompts(0, (20, 37)),
    )
    passes = set[str]()

    def answers() -> list[list[int]]:
        options = {"max_model_len": 64, "kvcache_block_size": 16, "max_num_batched_tokens": 32}
        with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=100, **options) as llm:
            llm.engine.scheduler.sharer_finder.min_saved_tokens = 0  # type: ignore[attr-defined]
            params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True, n=2)
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = [llm.generate(prompts, params, use_tqdm=False)]
        return [one.token_ids for calls in outputs for output in calls for one in output.outputs]

    def noted(name: str) -> Callable[..., Any]:
        kernel = getattr(latent_triton, name)

        def run(*args: Any) -> Any:
            passes.add(name)
            return kernel(*args)

        return run

    expected = answers()
    monkeypatch.setattr(latent_triton, "MAX_EXPANDED", max_expanded)
    names = {"expanded_prefill_attention", "paged_latent_attention", "shared_latent_attention"}
    names |= set() if max_expanded else {"absorbed_prefill_attention"}
    for name in names:
        monkeypatch.setattr(latent_triton, name, noted(name))
    for name in ("norm_rope_store_latents", "store_and_absorb", "values_of_sums"):
        monkeypatch.setattr(latent_attention, name, getattr(kernels, name))
    monkeypatch.setattr(latent_attention, "few_rows_kernels_serve", lambda num_rows, _: num_rows <= max_few_rows)
    monkeypatch.setattr(
        latent_attention, "select_latent_backend", lambda _, spec: latent_triton.TritonLatentBackend(spec, CPU)
    )
    assert answers() == expected
    assert passes == names


def test_what_steps_seldom_run_is_compiled_ahead(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        latent_attention, "select_latent_backend", lambda _, spec: latent_triton.TritonLatentBackend(spec, CPU)
    )
    folder, launched = checkpoint("Glm4MoeLiteForCausalLM", 0, q_lora_rank=16), []
    with LLM(folder, device="cpu", dtype="float32", max_model_len=64, num_kvcache_blocks=10) as llm:
        decoder = llm.engine.runner.model.model
    monkeypatch.setattr(latent_attention, "few_rows_kernels_serve", lambda num_rows, _: num_rows <= 4)
    for module, name in ((latent_triton, "absorbed_prefill_attention"), (latent_attention, "few_rows_product")):
        kernel = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, name=name, kernel=kernel, **rest: launched.append(name) or kernel(*args, **rest)
        )
    with execution.compiling_few_rows(decoder, [1, 2, 8]):
        pass
    assert sorted(launched) == ["absorbed_prefill_attention", "few_rows_product", "few_rows_product"]
