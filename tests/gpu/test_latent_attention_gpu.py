"""The kernels of latent attention, compiled, at the sizes of GLM-4.7-Flash and others, against plain PyTorch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.layers.attention.latent import TorchLatentBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata
from nanoinfer.ops.latent_attention import spec
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

pytestmark = pytest.mark.gpu

LITE = replace(FLASH, query_rank=None, plain_size=128, value_size=128)  # DeepSeek-V2-Lite
GPU = torch.device("cuda")


def assert_equals_specification(step: LatentStep, dtype: torch.dtype = torch.bfloat16) -> None:
    from nanoinfer.layers.attention.latent_triton import TritonLatentBackend

    step = step.to("cuda", dtype)
    found, expected = step.run(TritonLatentBackend(step.spec, GPU)).cpu().float(), step.specification()
    if isinstance(step.metadata, DecodeMetadata):
        lens = step.metadata.with_a_row_for_each_token().context_lens.cpu()
        found, expected = found[lens > 0], expected[lens > 0]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("sizes", "block_size"), [(SIZES, 16), (FLASH, 16), (FLASH, 64)])
@pytest.mark.parametrize("name", DECODES)
def test_decode_equals_its_specification(name: str, sizes: Any, block_size: int) -> None:
    """By Triton's kernel, and of whole tiles of 64 vectors by that for Hopper GPUs."""
    assert_equals_specification(decode_step(*DECODES[name], sizes=sizes, block_size=block_size))


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("num_heads", [16, 20])
@pytest.mark.parametrize("lens", [(9000,), (3000, 1, 5000), (300, 800, 17, 1) * 40])
def test_long_contexts_and_many_rows_equal_the_specification(
    num_heads: int, lens: tuple[int, ...], block_size: int
) -> None:
    """Rows over many programs, which few rows combine by rows, and rows that lie whole in a share."""
    assert_equals_specification(decode_step(num_heads, lens, sizes=FLASH, block_size=block_size))


@pytest.mark.parametrize(("num_shared", "block_size"), [(20, 16), (5, 64)])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_rows_that_read_a_prefix_together_equal_the_specification(
    num_tokens: int, num_shared: int, block_size: int
) -> None:
    lens, sharers = (400, 500, 330, 700, 450), (2, 1, 2)
    step = decode_step(16, lens, num_tokens, FLASH, num_shared=num_shared, num_sharers=sharers, block_size=block_size)
    assert_equals_specification(step)


@pytest.mark.parametrize("sizes", [LITE, FLASH])
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("name", [name for name in PREFILLS if "128" not in name])
def test_prefill_equals_its_specification(name: str, pays: bool, sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed and expanded, by one weight."""
    from nanoinfer.layers.attention.latent_triton import TritonLatentBackend

    monkeypatch.setattr(TritonLatentBackend, "_absorbing_pays", lambda *_: pays)
    step = prefill_step(*PREFILLS[name], sizes=sizes)
    num_heads, metadata = step.spec.num_heads, step.metadata
    q = randn(len(step.absorbed), num_heads, sizes.plain_size + sizes.rotary_size)
    weight = randn(num_heads, sizes.plain_size + sizes.value_size, sizes.latent_size, seed=1) * sizes.latent_size**-0.5
    of_chunks = zip(metadata.block_tables, metadata.context_lens, metadata.query_lens, strict=True)
    vectors = torch.cat([spec.gather_latents(step.cache, table, end)[-num:] for table, end, num in of_chunks])

    def attend(backend: Any, step: LatentStep, q: Tensor, vectors: Tensor, weight: Tensor) -> Tensor:
        metadata = backend.plan(step.metadata, step.cache)
        if not backend.reads_latents(metadata):
            expanded = lambda latents: torch.einsum("tl,hsl->ths", latents, weight)  # noqa: E731
            return backend.attend_to_heads(q, vectors, expanded, step.cache, metadata)
        of_keys, of_values = weight.split([sizes.plain_size, sizes.value_size], dim=1)
        absorbed = torch.einsum("thp,hpl->thl", q[..., : sizes.plain_size], of_keys)
        sums = backend.attend_to_latents(absorbed, q[..., sizes.plain_size :], step.cache, metadata)
        return torch.einsum("thl,hvl->thv", sums, of_values)

    expected = attend(TorchLatentBackend(step.spec), step, q, vectors, weight)
    of_gpu = [x.to("cuda", torch.bfloat16) for x in (q, vectors, weight)]
    found = attend(TritonLatentBackend(step.spec, GPU), step.to("cuda", torch.bfloat16), *of_gpu)
    torch.testing.assert_close(found.cpu().float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("sizes", [SIZES, LITE, FLASH])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_what_few_rows_store_and_absorb_equals_the_specification(num_tokens: int, sizes: Any) -> None:
    arguments = write_arguments(sizes, num_tokens, 20, torch.bfloat16)
    weight = randn(20, sizes.plain_size + sizes.value_size, sizes.latent_size, seed=9).bfloat16() * 0.1
    theirs, ours = moved(arguments, "cpu"), moved(arguments, "cuda")
    expected = spec.store_and_absorb(*theirs, weight[:, : sizes.plain_size])
    found = spec.store_and_absorb(*ours, weight.cuda()[:, : sizes.plain_size])
    torch.testing.assert_close(found.cpu(), expected, atol=0.05, rtol=0.02)
    torch.testing.assert_close(ours[3].cpu(), theirs[3], atol=0.02, rtol=0.01)
    torch.testing.assert_close(ours[6].k.cpu(), theirs[6].k, atol=0.02, rtol=0.01)
    of_values, sums = weight[:, sizes.plain_size :], found.cpu()
    values = spec.values_of_sums(found, weight.cuda()[:, sizes.plain_size :])
    torch.testing.assert_close(values.cpu(), spec.values_of_sums(sums, of_values), atol=0.1, rtol=0.02)
