"""Models that see, on a GPU: the tokens of a CPU, near ties aside, and towers that wait for nothing."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.models.images import ImageContent
from nanoinfer.models.transformers.fast_towers import speed_up_tower
from nanoinfer.models.transformers.tower_attention import Segments, attend_in_segments
from nanoinfer.outputs import RequestOutput
from nanoinfer.runner import step_images
from tests.images.seeing_models import ALL, MODELS, make_prompt, write_seeing
from tests.images.test_seeing_models import PROMPTS, impls, load, run
from tests.images.test_towers import PACKING, features, make, tower_inputs

pytestmark = pytest.mark.gpu

SEEING = [f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Gemma3", "Llava", "Qwen2_5_VL", "Mistral3")]
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_kvcache_blocks": 200, "max_num_seqs": 4}
NEAR = {"float32": 0.002, "bfloat16": 0.3}  # log-probabilities this close may change places
Outputs = list[RequestOutput]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        write_seeing(architecture, folder)
        return folder

    return make


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tiny pictures would fill a batch, among which some towers make a mask."""
    monkeypatch.setattr(step_images, "MAX_VALUES_AT_ONCE", 3 * 2**12)


def answers(llm: LLM, architecture: str) -> Outputs:
    return run(llm, [make_prompt(architecture, parts) for parts in PROMPTS], logprobs=5)


def assert_equal_but_for_near_ties(found: Outputs, expected: Outputs, near: float) -> None:
    num_equal = 0
    for one, other in zip(found, expected, strict=True):
        assert one.error is None, one.error
        ours, theirs = one.outputs[0], other.outputs[0]
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            num_equal += 1
            continue
        assert theirs.logprobs is not None
        likely = theirs.logprobs[place]
        assert ours.token_ids[place] in likely, f"token {place} is none of the likely ones"
        gap = likely[theirs.token_ids[place]].logprob - likely[ours.token_ids[place]].logprob
        assert gap < near, f"token {place} was {gap} less likely"
    assert num_equal >= len(PROMPTS) / 4


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    ("architecture", "model_impl"), [(name, impl) for name in SEEING if name in MODELS for impl in impls(name)]
)
def test_images_give_the_tokens_of_a_cpu_also_with_prefix_hits(
    architecture: str, model_impl: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(architecture)
    options = {**OPTIONS, "dtype": dtype, "model_impl": model_impl}
    with load(folder, device="cpu", **options) as llm:
        expected = answers(llm, architecture)
    with load(folder, device="cuda", max_num_batched_tokens=48, **options) as llm:
        assert_equal_but_for_near_ties(answers(llm, architecture), expected, NEAR[dtype])
        again = answers(llm, architecture)
        assert_equal_but_for_near_ties(again, expected, NEAR[dtype])
        assert sum(output.num_cached_tokens for output in again) > 50


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("architecture", [name for name in SEEING if name in MODELS])
def test_images_are_encoded_without_a_wait_for_the_gpu(architecture: str, folder_of: Callable[[str], Path]) -> None:
    pictures = [ALL[architecture].picture(seed).tensors for seed in (0, 1)]
    ids = [ALL[architecture].picture(seed).token_ids for seed in (0, 1)]
    tensors = [
        {name: x.bfloat16() if x.is_floating_point() else x for name, x in picture.items()} for picture in pictures
    ]
    images = [ImageContent(its, one) for its, one in zip(ids, tensors, strict=True)]
    with load(folder_of(architecture), model_impl=impls(architecture)[-1], dtype="bfloat16", **OPTIONS) as llm:
        encoder = llm.engine.check_open().model_runner.state.images._encoder
        images = images if encoder.may_join(*images) else images[:1]
        encoder.encode(images)  # what is set up at first may wait
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            encoder.encode(images)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("architecture", PACKING)
@torch.inference_mode()
def test_faster_parts_give_what_those_of_transformers_do(architecture: str) -> None:
    model, inputs = make(architecture).cuda(), tower_inputs(architecture, [0, 1, 2])
    inputs = {name: x.cuda() for name, x in inputs.items()}
    with torch.backends.cudnn.flags(allow_tf32=False):
        expected = features(model, inputs)
    assert speed_up_tower(model.model.visual) >= 3
    torch.testing.assert_close(features(model, inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_tiles", [True, False])
def test_segments_attend_within_themselves(head_dim: int, dtype: torch.dtype, has_tiles: bool) -> None:
    """Hopper GPUs have a kernel that reads tiles. Queries, keys and values are views of one product."""
    generator = torch.Generator("cuda").manual_seed(0)
    starts = torch.tensor([0, 300, 301, 365, 494, 2030], dtype=torch.int32)
    qkv = torch.randn(2030, 3, 4, head_dim, generator=generator, device="cuda").to(dtype)
    qkv[300] = torch.nan  # the second segment stays apart
    q, k, v = qkv.unbind(1)
    expected = attend_in_segments(*(x.cpu().float() for x in (q, k, v)), Segments.of(starts, torch.device("cpu")), 0.1)
    segments = Segments.of(starts, qkv.device)
    segments = segments if has_tiles else segments._replace(tiles=None)
    found = attend_in_segments(q, k, v, segments, 0.1)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("num_heads", [4, 2])
def test_segments_of_one_length_that_come_often_attend_alike(num_heads: int) -> None:
    """Then it is cuDNN that computes them, on a GPU with that but without our kernel."""
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(2 * 640, 3, num_heads, 72, generator=generator, device="cuda").bfloat16()
    segments = Segments.of(torch.tensor([0, 640, 1280], dtype=torch.int32), qkv.device)._replace(tiles=None)
    first = attend_in_segments(*qkv.unbind(1), segments, 0.1)
    again = attend_in_segments(*qkv.unbind(1), segments, 0.1, is_frequent=True)
    torch.testing.assert_close(again, first, rtol=2e-2, atol=2e-2)
