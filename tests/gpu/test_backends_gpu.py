"""Each attention backend on the GPU against plain PyTorch in float32, over a cache with blocks in random order."""

import pytest
import torch

from nanoinfer.device import import_error
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention import backend_selection
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.backend_selection import FLASH_ATTN, AttentionBackends
from tests.attention_cases import Layer, random_step

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 256
BF16 = torch.bfloat16
CUDA = torch.device("cuda")
BEFORE_HOPPER = "triton before Hopper"


def make_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Skip the test where flash-attn is not there, or is a build without what the layer needs."""
    try:
        if name != BEFORE_HOPPER:
            return AttentionBackends(name, CUDA, BF16, BLOCK_SIZE).select(spec)
        for_prefill = AttentionBackends("flash_attn", CUDA, BF16, BLOCK_SIZE).select(spec)
    except ConfigError as error:
        if name in ("triton", "torch"):
            raise
        pytest.skip(str(error))
    from nanoinfer.layers.attention.triton import TritonBackend

    return TritonBackend(spec, for_prefill)


SIZES = pytest.mark.parametrize(
    ("window", "head_dim"), [(window, dim) for window in (None, 7, 1000) for dim in (64, 80, 96, 128, 256)]
)


@SIZES
@pytest.mark.parametrize("name", ["flash_attn", "triton", "torch", BEFORE_HOPPER])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [((7, 300, 1), (7, 300, 1)), ((7, 300, 1, 256), (7, 1500, 257, 512))],
    ids=["fresh", "cached prefixes"],
)
def test_prefill_equals_plain_attention(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], name: str, head_dim: int, window: int | None
) -> None:
    layer = Layer(4, head_dim, block_size=BLOCK_SIZE, window=window, dtype=BF16, device="cuda")
    step = random_step(layer, context_lens, query_lens)
    step.assert_equals_specification(make_backend(name, layer.spec))


@SIZES
@pytest.mark.parametrize("name", ["flash_attn", "triton", "torch"])
def test_decode_equals_plain_attention(name: str, head_dim: int, window: int | None) -> None:
    """The last row is padding."""
    layer = Layer(4, head_dim, block_size=BLOCK_SIZE, window=window, dtype=BF16, device="cuda")
    step = random_step(layer, [1, 255, 256, 257, 1500, 0])
    step.assert_equals_specification(make_backend(name, layer.spec))


@SIZES
@pytest.mark.parametrize("name", ["flash_attn", "triton", "torch"])
def test_decode_of_several_tokens_a_row_equals_plain_attention(name: str, head_dim: int, window: int | None) -> None:
    """The last row is padding; the cache is NaN where a row has fewer tokens."""
    layer = Layer(4, head_dim, block_size=BLOCK_SIZE, window=window, dtype=BF16, device="cuda")
    step = random_step(layer, [1, 255, 256, 254, 1500, 0], num_row_tokens=[4, 1, 4, 4, 2, 1])
    step.assert_equals_specification(make_backend(name, layer.spec))


def test_flash_attn_serves_full_attention_where_it_is_installed() -> None:
    if error := import_error(FLASH_ATTN):
        pytest.skip(f"flash-attn cannot be imported: {error}")
    assert AttentionBackends("flash_attn", CUDA, BF16, BLOCK_SIZE).select(Layer(head_dim=128).spec).name == "flash_attn"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_auto_takes_our_kernels_and_before_hopper_flash_attn_in_prefill_where_it_serves(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Layer(head_dim=head_dim).spec
    expected = {"triton"}
    if torch.cuda.get_device_capability() < (9, 0):
        expected.add("triton, flash_attn in prefill")
    assert AttentionBackends("auto", CUDA, BF16, BLOCK_SIZE).select(spec).name in expected
    monkeypatch.setattr(
        backend_selection, "import_error", lambda name: ImportError("hidden") if name == FLASH_ATTN else None
    )
    assert AttentionBackends("auto", CUDA, BF16, BLOCK_SIZE).select(spec).name == "triton"
