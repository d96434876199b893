"""What sees computes many images at once as each by itself, and reads nothing from the device on the way."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nanoinfer.models.images import ImageContent
from nanoinfer.models.transformers import fast_towers, host_tensors, image_encoder, tower_attention
from nanoinfer.models.transformers.attention_interface import base_model, name_attention_of_towers, text_part
from nanoinfer.models.transformers.fast_towers import speed_up_tower
from nanoinfer.models.transformers.host_tensors import HostTensorsFollow
from nanoinfer.models.transformers.image_encoder import TransformersImageEncoder
from nanoinfer.models.transformers.tower_attention import (
    MAX_SHAPES,
    PATCHES_BEFORE_CUDNN,
    Segments,
    attend_in_segments,
    count_patches,
    packs_images,
)
from tests.images.seeing_models import ALL, IS_5

PACKING = ["Qwen3VLForConditionalGeneration"]
if IS_5:
    PACKING += [f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3_5", "GlmOcr", "PaddleOCRVL")]
JOINED_PASSES = {
    "Qwen3VLForConditionalGeneration": {"add_layer_norm", "linear_gelu_tanh"},
    "Qwen3_5ForConditionalGeneration": {"add_layer_norm", "linear_gelu_tanh"},
    "Qwen2_5_VLForConditionalGeneration": {"add_rms_norm"},
    "GlmOcrForConditionalGeneration": {"add_rms_norm"},
    "PaddleOCRVLForConditionalGeneration": {"linear_gelu_tanh"},
}
# Those that look for empty tiles, say, or make sizes on the device.
READING = ("SmolVLM", "Idefics3", "Idefics2", "GraniteDocling", "Aria", "Gemma4", "Gemma4Unified", "Ovis2", "Step3p7")
NOT_PACKING = ("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration")


def make(architecture: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ALL[architecture].make().float().eval()


def tower_inputs(architecture: str, seeds: list[int]) -> dict[str, torch.Tensor]:
    pictures = [ALL[architecture].picture(seed).tensors for seed in seeds]
    return {name: torch.cat([picture[name] for picture in pictures]) for name in pictures[0]}


def features(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found = base_model(model).get_image_features(**inputs)
    found = getattr(found, "pooler_output", found)
    if isinstance(found, tuple) and isinstance(found[-1], list):  # of transformers 4, with deepstack's beside it
        found = found[0]
    return torch.cat([*found]) if isinstance(found, (list, tuple)) else found


@pytest.mark.parametrize("architecture", PACKING)
@torch.inference_mode()
def test_packed_images_attend_each_to_itself_as_in_transformers(architecture: str) -> None:
    model, inputs = make(architecture), tower_inputs(architecture, [0, 1, 2])
    expected = features(model, inputs)
    assert all(packs_images(part) for name, part in model.model.named_children() if name == "visual")
    name_attention_of_towers(model)
    torch.testing.assert_close(features(model, inputs), expected)


@pytest.mark.parametrize("architecture", NOT_PACKING)
def test_other_towers_keep_the_attention_of_transformers(architecture: str) -> None:
    model = make(architecture)
    name_attention_of_towers(model)
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    assert "nanoinfer_flash" not in {getattr(config, "_attn_implementation", None) for config in configs}


def count_and_call(calls: Counter[str], op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    calls[op.__name__] += 1
    return op(*args, **options)


@pytest.mark.parametrize("architecture", PACKING)
@torch.inference_mode()
def test_faster_parts_give_what_those_of_transformers_do(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make(architecture), tower_inputs(architecture, [0, 1, 2])
    expected = features(model, inputs)
    assert speed_up_tower(model.model.visual) >= 3  # the rotations of two layers, and the embedding of patches
    calls = Counter[str]()
    for op in (fast_towers.add_layer_norm, fast_towers.add_rms_norm, fast_towers.linear_gelu_tanh):
        monkeypatch.setattr(fast_towers, op.__name__, partial(count_and_call, calls, op))
    torch.testing.assert_close(features(model, inputs), expected)
    assert {*calls} == JOINED_PASSES[architecture]
    assert {*calls.values()} == {2}, "of two layers each"


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy without pinned memory, which there is none of without a GPU."""

    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert tensor.is_contiguous(), "what is expanded cannot be pinned"
        return tensor.to(device)

    for module in (host_tensors, tower_attention):
        monkeypatch.setattr(module, "to_device", copied)
    monkeypatch.setattr(image_encoder, "numbers_to_device", lambda numbers, device: torch.tensor(numbers).to(device))


@pytest.mark.skipif(not IS_5, reason="transformers 4 makes numbers of some tensors on the device")
@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("architecture", sorted(ALL.keys() - {f"{name}ForConditionalGeneration" for name in READING}))
def test_images_are_encoded_without_a_wait_for_the_device(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the device "meta" have no values: whatever reads one fails."""
    model, pictures = make(architecture), [ALL[architecture].picture(seed) for seed in (0, 1)]
    encoder = TransformersImageEncoder(model)
    images = [ImageContent(one.token_ids, one.tensors) for one in pictures]
    if not encoder.may_join(*images):
        images.pop()
    for part in base_model(model).children():
        if part is not text_part(model):
            speed_up_tower(part)
    model.to("meta")

    def placed(parts: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(parts)
        return joined.to("meta") if joined.dtype in (torch.float32, torch.bool) else joined

    monkeypatch.setattr(encoder, "_placed", placed)
    rows = encoder.encode(images)
    assert [one.shape[1] for one in rows] == [len(image.token_ids) for image in images]
    assert {one.device.type for one in rows} == {"meta"}


def test_positions_of_equal_prompts_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TransformersImageEncoder(make(PACKING[0]))
    image, turned = (ImageContent(one.token_ids, one.tensors) for one in map(ALL[PACKING[0]].picture, (0, 1)))
    assert image.tensors["image_grid_thw"].tolist() != turned.tensors["image_grid_thw"].tolist()
    prompt = [1, *image.token_ids, 2]
    monkeypatch.setattr(image_encoder, "MAX_POSITIONS", 2)
    counted, count = list[int](), encoder._count_positions

    def counting(token_ids: Sequence[int], grids: Sequence[Any]) -> torch.Tensor:
        counted.append(len(token_ids))
        return count(token_ids, grids)

    monkeypatch.setattr(encoder, "_count_positions", counting)
    first = encoder.positions(prompt, [image])
    pixels = {**image.tensors, "pixel_values": torch.zeros(1)}
    assert encoder.positions(prompt, [replace(image, tensors=pixels)]) is first
    assert not torch.equal(encoder.positions(prompt, [turned]), first)
    assert encoder.positions([*prompt, 2], [image]).shape == (3, len(prompt) + 1)
    assert counted == [len(prompt), len(prompt), len(prompt) + 1]
    assert len(encoder._positions) == 1, "two were forgotten before the last one"


@pytest.mark.usefixtures("unpinned")
def test_tensors_of_the_host_follow_those_on_the_device() -> None:
    device = torch.device("meta")
    on_host, there = torch.arange(3), torch.empty(3, device=device)
    with HostTensorsFollow(device):
        assert (there + on_host).device == device
        assert (there + on_host[:, None].expand(3, 3)).device == device
        assert torch.cat([there, on_host]).device == device
        assert there[on_host].device == device
        assert on_host.to(there.device).device == device
        assert (on_host + on_host).tolist() == [0, 2, 4]
        assert on_host.to(torch.float32).device.type == "cpu"
        assert (there * torch.tensor(2)).device == device


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_segments_attend_within_themselves(num_kv_heads: int) -> None:
    q, k, v = torch.randn(3, 7, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    k, v = k[:, :num_kv_heads], v[:, :num_kv_heads]
    segments = Segments((4, 3), torch.tensor([0, 4, 7], dtype=torch.int32))
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[:4, :4] = mask[4:, 4:] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(attend_in_segments(q, k, v, segments, 0.3), expected[0].transpose(0, 1))


@pytest.mark.usefixtures("unpinned")
def test_long_segments_are_cut_into_tiles_for_hopper_and_small_windows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.6")
    starts, device = torch.tensor([0, 300, 600]), torch.device("cpu")
    assert Segments.of(starts, device).tiles is None
    monkeypatch.setattr(tower_attention, "has_hopper_kernels", lambda _: True)
    tiles = Segments.of(starts, device).tiles
    assert tiles is not None
    starts_of_tiles = [(0, 0, 300), (128, 0, 300), (256, 0, 300), (300, 300, 600), (428, 300, 600), (556, 300, 600)]
    assert [*map(tuple, tiles.tolist())] == starts_of_tiles  # the first query, and the segment's begin and end
    assert Segments.of(torch.arange(0, 640, 64), device).tiles is None


def test_a_shape_is_frequent_in_a_layer_after_many_patches_and_rare_ones_are_forgotten() -> None:
    layers = torch.nn.Identity(), torch.nn.Identity()
    num_patches = PATCHES_BEFORE_CUDNN // 2
    half, q = Segments((num_patches,), torch.tensor([0, num_patches])), torch.zeros(1, 2, 8).expand(num_patches, 2, 8)
    assert [count_patches(layers[0], q, half) for _ in range(3)] == [False, False, True]
    assert not count_patches(layers[1], q, half)
    assert not count_patches(layers[0], q, Segments((1, num_patches - 1), torch.tensor([0, 1, num_patches])))
    for length in range(1, 2 * MAX_SHAPES):
        count_patches(layers[0], torch.zeros(length, 2, 8), half)
    assert len(layers[0].num_patches_by_shape) <= MAX_SHAPES


class Mlp(torch.nn.Module):
    def __init__(self, approximate: str, residual: bool = False) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        self.act, self.residual = torch.nn.GELU(approximate), residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.act(self.up(x)))
        return found + x if self.residual else found


def test_only_an_mlp_with_the_tanh_of_gelu_and_nothing_else_is_replaced() -> None:
    towers = [
        torch.nn.Sequential(Mlp("tanh")),
        torch.nn.Sequential(Mlp("none")),
        torch.nn.Sequential(Mlp("tanh", True)),
    ]
    assert [*map(speed_up_tower, towers)] == [1, 0, 0]
    x = torch.randn(2, 3, 4)
    [mlp] = towers[0]
    torch.testing.assert_close(mlp(x), Mlp.forward(mlp, x))


class Block(torch.nn.Module):
    """A layer as in Qwen's towers, or one that differs from it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        size = 8 if kind == "scaled" else 4
        self.norm1, self.norm2 = (torch.nn.LayerNorm(size, elementwise_affine=kind != "without weights") for _ in "ab")
        self.attn, self.mlp, self.kind = torch.nn.Identity(), torch.nn.Identity(), kind
        self.scale = torch.nn.Parameter(torch.full((8,), 1.01), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        assert self.kind != "of one picture", "options are not looked at"
        normed = self.norm1(hidden_states)
        attended: torch.Tensor = self.attn(normed, **options)
        if self.kind == "scaled":
            attended = attended * self.scale
        if self.kind == "parallel":
            return hidden_states + attended + self.mlp(self.norm2(hidden_states))
        total = (normed if self.kind == "residual after norm" else hidden_states) + attended
        found: torch.Tensor = total + self.mlp(self.norm2(total))
        return found


OTHERS = ["scaled", "parallel", "residual after norm", "without weights", "of one picture"]


@pytest.mark.parametrize(("kind", "is_known"), [("plain", True), *((kind, False) for kind in OTHERS)])
def test_a_block_that_computes_something_else_stays(kind: str, is_known: bool) -> None:
    assert fast_towers._is_known_block(Block(kind)) == is_known


def rotate_in_place(x: torch.Tensor, other: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return x.mul_(cos.unsqueeze(1)), other.mul_(sin.unsqueeze(1))


def test_another_rotation_stays_though_it_works_in_place() -> None:
    assert not fast_towers._equals(rotate_in_place)
