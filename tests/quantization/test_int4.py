"""Weights in 4 bits: each format's tensors, written here by the book, against the numbers that they stand for."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LLM, ModelError, SamplingParams
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import MergedColumnParallelLinear
from nanoinfer.ops.int4 import spec as int4
from nanoinfer.ops.int4.spec import PackedWeight, dequantize, pack, quantize, reads_4_bits, unpack
from nanoinfer.quantization.int4 import int4_linear
from nanoinfer.quantization.int4.formats import Int4Config, readers
from nanoinfer.quantization.int4.int4_linear import Int4LinearMethod
from nanoinfer.quantization.linear_method import ProductKind
from nanoinfer.quantization.method_selection import read_quantization
from tests.quantization.test_checkpoints import plain_folder, write_plain

__all__ = ["plain_folder"]  # a fixture

Tensors = dict[str, Tensor]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


class Numbers(NamedTuple):
    """A weight (num_outputs, num_inputs): its numbers, and of each group and output the scale and the zero point."""

    q: Tensor  # (num_outputs, num_inputs), 0 to 15
    scales: Tensor  # (num_outputs, num_groups) float16
    zeros: Tensor  # the same, integers
    groups: Tensor  # (num_inputs,)

    @property
    def weight(self) -> Tensor:
        group = self.groups.long()
        return (self.q - self.zeros[:, group]).float() * self.scales[:, group].float()


def draw(
    num_outputs: int, num_inputs: int, group_size: int, symmetric: bool, order: Tensor | None = None, seed: int = 0
) -> Numbers:
    """order: the inputs in the order in which groups are filled (desc_act)."""
    generator = torch.Generator().manual_seed(seed + num_outputs)
    group_size = num_inputs if group_size == -1 else group_size
    shape = (num_outputs, num_inputs // group_size)
    q = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator)
    scales = (torch.rand(shape, generator=generator) * 0.05 + 0.01).half()
    zeros = torch.full(shape, 8) if symmetric else torch.randint(1, 16, shape, generator=generator)
    groups = torch.empty(num_inputs, dtype=torch.long)
    groups[torch.arange(num_inputs) if order is None else order] = torch.arange(num_inputs) // group_size
    return Numbers(q, scales, zeros, groups)


def words(rows: Tensor, places: Callable[[int], int] = lambda i: i) -> Tensor:
    """Pack eight numbers of a row in an int32; number i has the bits from 4 * places(i) on. One after the other."""
    out = torch.zeros(rows.shape[0], rows.shape[1] // 8, dtype=torch.int64)
    for column in range(rows.shape[1]):
        out[:, column // 8] |= rows[:, column].long() << (4 * places(column % 8))
    return torch.where(out >= 2**31, out - 2**32, out).int()


def awq(it: Numbers) -> Tensors:
    places = [0, 2, 4, 6, 1, 3, 5, 7].index  # the k-th four bits hold output 0, 2, 4, ...
    return {"qweight": words(it.q.T, places), "qzeros": words(it.zeros.T, places), "scales": it.scales.T}


def gptq(it: Numbers, offset: int = 1) -> Tensors:
    tensors = {"qweight": words(it.q).T, "qzeros": words(it.zeros.T - offset), "scales": it.scales.T}
    return {**tensors, "g_idx": it.groups.int()}


def pack_quantized(it: Numbers, has_zeros: bool, has_groups: bool) -> Tensors:
    """Its numbers are signed, and packed with 8 added."""
    tensors = {
        "weight_packed": words((it.q - 8) + 8),
        "weight_scale": it.scales,
        "weight_shape": torch.tensor(it.q.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = words(((it.zeros - 8) + 8).T).T
    if has_groups:
        tensors["weight_g_idx"] = it.groups.int()
    return tensors


def scheme(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp[.]gate$"],
    }


class Kind(NamedTuple):
    config: dict[str, Any]
    write: Callable[[Numbers], Tensors]
    group_size: int
    symmetric: bool
    is_ordered: bool = False


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["mlp.gate"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}
KINDS = {
    "awq 64": Kind({**AWQ, "group_size": 64}, awq, 64, False),
    "awq 128": Kind({**AWQ, "group_size": 128}, awq, 128, False),
    "gptq": Kind({**GPTQ, "group_size": 32}, gptq, 32, True),
    "gptq with zeros": Kind({**GPTQ, "group_size": 128, "sym": False}, gptq, 128, False),
    "gptq v2": Kind(
        {**GPTQ, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}, lambda it: gptq(it, 0), 64, False
    ),
    "gptq channels": Kind({**GPTQ, "group_size": -1, "desc_act": True}, gptq, -1, True),
    "gptq desc_act": Kind({**GPTQ, "group_size": 32, "desc_act": True, "sym": False}, gptq, 32, False, True),
    "compressed": Kind(scheme(), lambda it: pack_quantized(it, False, False), 32, True),
    "compressed with zeros": Kind(
        scheme(symmetric=False, group_size=128), lambda it: pack_quantized(it, True, False), 128, False
    ),
    "compressed channels": Kind(
        scheme(strategy="channel", group_size=None), lambda it: pack_quantized(it, False, False), -1, True
    ),
    "compressed ordered": Kind(
        scheme(actorder="group"), lambda it: pack_quantized(it, False, True), 32, True, True
    ),
}  # fmt: skip
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def read(config: dict[str, Any]) -> Int4Config:
    found = read_quantization(Fields({"quantization_config": config}), None, {}, {})
    assert isinstance(found, Int4Config)
    return found


@EVERY_KIND
def test_the_tensors_of_each_format_stand_for_the_numbers_that_they_were_made_of(kind: Kind) -> None:
    """Bit for bit in float32."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)) if kind.is_ordered else None
    made, config = draw(24, 256, kind.group_size, kind.symmetric, order), read(kind.config)
    assert config.checkpoint_format is not None
    names, found = readers(config.checkpoint_format), {}
    for name, tensor in kind.write(made).items():
        if (reader := names[name]) is not None:
            found[reader[0]] = reader[1](tensor)
    assert torch.equal(found["weight"].long(), made.q)
    assert torch.equal(found["weight_scale"], made.scales.float())
    zeros = found.get("weight_zero_point") if config.has_zeros else None
    groups = found.get("weight_g_idx") if config.orders_inputs else None
    packed = PackedWeight(pack(found["weight"], 128), found["weight_scale"], zeros, groups)
    assert torch.equal(dequantize(packed), made.weight)
    assert config.group_size == (None if kind.group_size == -1 else kind.group_size)
    assert config.has_zeros != kind.symmetric
    assert config.orders_inputs == kind.is_ordered


def test_numbers_are_unpacked_as_they_were_packed() -> None:
    numbers = torch.randint(0, 16, (3, 5, 256), generator=torch.Generator().manual_seed(0))
    for block in (8, 64, 128):
        assert pack(numbers, block).dtype == torch.int32
        assert torch.equal(unpack(pack(numbers, block), block).long(), numbers)
    assert pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 15]), 8).tolist() == [0xF7654321 - 2**32]
    sixteen = torch.arange(16)
    assert pack(sixteen, 16).tolist() == [0xECA86420 - 2**32, 0xFDB97531 - 2**32], "two words, inputs two apart"


@pytest.mark.parametrize("shape", [(5, 256), (3, 4, 128), (2000, 64)])
def test_a_rounded_weight_is_near_what_it_was(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rounded = quantize(weight, 64)
    assert rounded.numbers.shape == (*shape[:-1], shape[-1] // 8)
    assert rounded.scales.shape == (*shape[:-1], shape[-1] // 64)
    error = (dequantize(rounded) - weight).square().mean().sqrt() / weight.square().mean().sqrt()
    assert 0.05 < error < 0.11


def test_a_scale_that_fits_has_a_smaller_error_than_the_one_that_clips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    fitted = (dequantize(quantize(weight, 128)) - weight).square().mean()
    monkeypatch.setattr(int4, "SHARES_OF_LARGEST", (1.0,))
    assert fitted < 0.95 * (dequantize(quantize(weight, 128)) - weight).square().mean()


def test_zeros_stay_zeros_and_nan_and_infinity_spoil_their_own_group() -> None:
    weight = torch.ones(3, 64)
    weight[0, :32], weight[1, 3], weight[2, 40] = 0.0, math.nan, math.inf
    wide = dequantize(quantize(weight, 32))
    assert (wide[0, :32] == 0).all()
    assert wide[1, :32].isnan().all()
    assert wide[2, 32:].isnan().all()
    assert torch.allclose(wide[[0, 1, 2], [33, 33, 3]], torch.ones(3), atol=0.1)


# --- whole checkpoints ---


def write_pair(plain: Path, folder: Path, kind: Kind, keep: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Write a checkpoint in 4 bits, and one in float32 of the weights that it stands for."""
    packed, wide = {}, {}
    for seed, (name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        is_linear = (name.endswith("_proj.weight") or ".experts." in name) and not any(part in name for part in keep)
        if not is_linear:
            packed[name] = wide[name] = tensor
            continue
        num_outputs, num_inputs = tensor.shape
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(0)) if kind.is_ordered else None
        made = draw(num_outputs, num_inputs, kind.group_size, kind.symmetric, order, seed)
        stem = name.removesuffix("weight")
        packed |= {f"{stem}{part}": value for part, value in kind.write(made).items()}
        wide[name] = made.weight
    raw = json.loads((plain / "config.json").read_text())
    for name, content, extra in (("packed", packed, {"quantization_config": kind.config}), ("wide", wide, {})):
        (folder / name).mkdir()
        save_file({key: value.contiguous() for key, value in content.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(raw | extra))
    return folder / "packed", folder / "wide"


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 17, 40, 90)]


def run(folder: Path, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens and their log-probabilities."""
    with LLM(folder, device="cpu", dtype="float32", max_model_len=112, **options) as llm:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    return [output.token_ids for output in outputs], [*_logprobs(outputs)]


def _logprobs(outputs: Any) -> Iterator[float]:
    for output in outputs:
        for token, step in zip(output.token_ids, output.outputs[0].logprobs, strict=True):
            yield step[token].logprob


def assert_says_the_same(one: Path, other: Path, **options: Any) -> None:
    (tokens, logprobs), (expected, expected_logprobs) = run(one, **options), run(other)
    assert tokens == expected
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=1e-4)


@EVERY_KIND
def test_a_checkpoint_in_4_bits_says_what_its_weights_in_float32_say(
    kind: Kind, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    assert_says_the_same(*write_pair(plain_folder(False), tmp_path, kind))


@pytest.mark.parametrize("name", ["awq 64", "gptq desc_act", "compressed"])
def test_experts_in_4_bits_say_what_they_say_in_float32(
    name: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    assert_says_the_same(*write_pair(plain_folder(True), tmp_path, KINDS[name]))


@pytest.mark.parametrize("name", ["awq 64", "gptq", "compressed with zeros"])
def test_two_ranks_say_what_one_says(name: str, plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    """Of 384 inner values the first rank takes 256, and the second 128 and as many zeros."""
    packed, wide = write_pair(plain_folder(False), tmp_path, KINDS[name])
    assert_says_the_same(packed, wide, tensor_parallel_size=2)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["awq 64", "compressed"])
def test_two_ranks_share_sizes_that_are_no_multiple_of_128(name: str, sparse: bool, tmp_path: Path) -> None:
    """Of 192 inner values one rank has 128, and the other 64 and as many zeros."""
    plain = tmp_path / "plain"
    write_plain(plain, sparse, intermediate_size=192, **({"moe_intermediate_size": 192} if sparse else {}))
    (tmp_path / "pair").mkdir()
    packed, wide = write_pair(plain, tmp_path / "pair", KINDS[name])
    assert_says_the_same(packed, wide, tensor_parallel_size=2)


@pytest.mark.parametrize("inner", [200, 328])
def test_two_ranks_round_to_what_one_rounds_to(inner: int, tmp_path: Path) -> None:
    write_plain(tmp_path, False, intermediate_size=inner)
    (one, logprobs), (two, others) = (run(tmp_path, quantization="int4", tensor_parallel_size=size) for size in (1, 2))
    assert one == two
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(others), atol=1e-4)


def test_layers_that_the_checkpoint_leaves_in_16_bits_are_read_so(
    plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    kind = KINDS["awq 64"]
    kind = kind._replace(config={**kind.config, "modules_to_not_convert": ["down_proj"]})
    assert_says_the_same(*write_pair(plain_folder(False), tmp_path, kind, keep=("down_proj",)))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_a_16_bit_checkpoint_is_rounded_while_it_is_loaded(
    sparse: bool, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    plain, tensors = plain_folder(sparse), {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_linear = name.endswith("_proj.weight") or ".experts." in name
        tensors[name] = dequantize(quantize(tensor, math.gcd(tensor.shape[1], 128))) if is_linear else tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    (tokens, logprobs), (expected, expected_logprobs) = run(plain, quantization="int4"), run(tmp_path)
    assert tokens == expected
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=1e-4)


def test_weights_that_a_trainer_sends_are_rounded_too(plain_folder: Callable[[bool], Path]) -> None:
    plain = plain_folder(False)
    tensors = {name: 0.5 * tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    with LLM(plain, device="cpu", dtype="float32", quantization="int4", max_model_len=112) as llm:
        before = [output.token_ids for output in llm.generate(prompts(), GREEDY, use_tqdm=False)]
        llm.update_weights(tensors)
        layer = llm.engine.runner.model.model.layers[0].mlp.down_proj  # type: ignore[union-attr]
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(layer.quant_method.wide_weight(layer), dequantize(quantize(tensors[name], 128)))
        after = [output.token_ids for output in llm.generate(prompts(), GREEDY, use_tqdm=False)]
    assert after != before


def test_new_weights_may_order_their_inputs_otherwise(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    packed, _ = write_pair(plain_folder(False), tmp_path, KINDS["gptq desc_act"])
    old = load_file(packed / "model.safetensors")
    new = {name: tensor.flip(0) if name.endswith("g_idx") else tensor for name, tensor in old.items()}
    with LLM(packed, device="cpu", dtype="float32", max_model_len=112) as llm:
        answers = []
        for tensors, sleeps in ((old, False), (new, False), (old, True)):
            if sleeps:
                llm.sleep(level=2)
                llm.wake_up()
            llm.update_weights(tensors)
            answers.append([output.token_ids for output in llm.generate(prompts(), GREEDY, use_tqdm=False)])
    assert answers[0] == answers[2] != answers[1]
    assert answers[1] == run(changed(packed, lambda tensors: tensors.update(new)))[0]


def ordered_layer() -> Any:
    """One that packs gate and up, of 128 inputs each."""
    layer: Any = MergedColumnParallelLinear(128, 64, bias=True, tp=TensorParallel())
    layer.quant_method = Int4LinearMethod(read(KINDS["gptq desc_act"].config), layer)
    return layer


def test_the_order_of_the_inputs_of_packed_weights_is_that_of_each() -> None:
    layer, order = ordered_layer(), torch.arange(128)
    parts = layer.unpack(order, layer.weight_g_idx)
    assert {name: part is order for name, part in parts.items()} == {"gate": True, "up": True}


class RowsOnAGpu:
    """What is asked of the rows of a product where its kernel is chosen."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype = (num_rows, num_inputs), dtype

    def __len__(self) -> int:
        return self.shape[0]


@pytest.mark.parametrize("on_hopper", [False, True])
def test_a_weight_is_read_in_4_bits_for_few_rows_where_a_kernel_serves_it(
    on_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "has_hopper_kernels", lambda _: on_hopper)

    def serves(num_rows: int, num_inputs: int = 256, group_size: int = 128, **changes: Any) -> bool:
        dtype, num_outputs = changes.pop("dtype", torch.bfloat16), changes.pop("num_outputs", 8)
        numbers = torch.zeros(num_outputs, num_inputs // 8, dtype=torch.int32)
        weight = PackedWeight(numbers, torch.zeros(num_outputs, num_inputs // group_size), **changes)
        x: Any = RowsOnAGpu(num_rows, num_inputs, dtype)
        return reads_4_bits(x, weight)

    assert serves(64)
    assert not serves(1025)
    assert (serves(65), serves(1024, group_size=32)) == (on_hopper, on_hopper)
    assert not serves(65, num_inputs=384, group_size=192), "groups that are no parts of a block"
    assert not serves(65, num_outputs=12), "outputs that cannot be written eight at a time"
    assert serves(64, num_outputs=12), "by the common kernel"
    assert not serves(1, num_inputs=192, group_size=64), "a block that is not whole"
    assert not serves(1, dtype=torch.float32)
    assert not serves(1, groups=torch.zeros(256, dtype=torch.int32)), "inputs in another order"


@pytest.mark.parametrize(
    ("num_inputs", "intermediate_size", "orders_inputs", "dtype", "kind"),
    [
        (128, 32, False, torch.bfloat16, ProductKind.NARROW),
        (128, 32, False, torch.float16, ProductKind.NARROW),
        (128, 32, False, torch.float32, ProductKind.WIDENED),
        (128, 32, True, torch.bfloat16, ProductKind.WIDENED),
        (192, 32, False, torch.bfloat16, ProductKind.WIDENED),
        (128, 6, False, torch.bfloat16, ProductKind.WIDENED),
    ],
)
@pytest.mark.parametrize("on_hopper", [True, False])
def test_a_layer_counts_as_narrow_where_kernels_read_its_4_bits_in_all_small_steps(
    num_inputs: int,
    intermediate_size: int,
    orders_inputs: bool,
    dtype: torch.dtype,
    kind: ProductKind,
    on_hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int4, "has_hopper_kernels", lambda _: on_hopper)
    layer: Any = MergedColumnParallelLinear(num_inputs, intermediate_size, bias=False, tp=TensorParallel()).to(dtype)
    method = Int4LinearMethod(Int4Config(orders_inputs=orders_inputs), layer)
    assert method.kind is (kind if on_hopper else ProductKind.WIDENED)


def test_a_product_of_few_rows_with_a_bias_reads_4_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = MergedColumnParallelLinear(128, 64, bias=True, tp=TensorParallel())
    layer.quant_method = method = Int4LinearMethod(Int4Config(), layer)
    method.fill_with_random_weights(layer, 1.0, torch.Generator().manual_seed(0))
    x, wide = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)), method.wide_weight(layer)
    layer.bias.fill_(2.0)
    monkeypatch.setattr(int4_linear, "reads_4_bits", lambda *_: True)
    monkeypatch.setattr(method, "_widened", lambda _: pytest.fail("it is widened"))
    torch.testing.assert_close(method.apply_split(layer, x, layer.bias), (x @ wide.T + 2.0).unsqueeze(0))


def test_random_weights_have_a_mean_of_0_and_the_spread_that_is_asked_for() -> None:
    layer: Any = MergedColumnParallelLinear(256, 512, bias=False, tp=TensorParallel())
    layer.quant_method = method = Int4LinearMethod(Int4Config(), layer)
    method.fill_with_random_weights(layer, 0.5, torch.Generator().manual_seed(0))
    wide = method.wide_weight(layer).float()
    assert abs(wide.mean()) < 0.005
    assert 0.495 < wide.std() < 0.505


def test_random_weights_need_no_checkpoint(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    raw = json.loads((plain_folder(False) / "config.json").read_text())
    for name, config in (("int4", None), ("awq", KINDS["awq 64"].config), ("gptq", KINDS["gptq desc_act"].config)):
        (tmp_path / name).mkdir()
        extra = {"quantization_config": config} if config else {}
        (tmp_path / name / "config.json").write_text(json.dumps(raw | extra))
        options = {} if config else {"quantization": "int4"}
        tokens, logprobs = run(tmp_path / name, load_format="dummy", **options)
        assert all(math.isfinite(x) for x in logprobs)
        assert tokens == run(tmp_path / name, load_format="dummy", **options)[0]


# --- what is refused ---


def changed(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(f"{Q_PROJ}.qzeros"), f"lacks weights for {Q_PROJ}.qzeros; "),
        (lambda x: x.update({f"{Q_PROJ}.scales": x[f"{Q_PROJ}.scales"][1:]}), r"q_proj.scales .* it has shape"),
        (lambda x: x.update({f"{Q_PROJ}.qweight": x[f"{Q_PROJ}.qweight"].float()}), "q_proj.qweight .* torch.int32"),
        (lambda x: x.update({f"{Q_PROJ}.qweight": x[f"{Q_PROJ}.qweight"].T}), "qweight .* 32 inputs.* implies 128"),
        (lambda x: x.update({f"{Q_PROJ}.extra": torch.zeros(1)}), "does not know.*q_proj.extra"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_errors_by_name(
    change: Callable[[Tensors], None], message: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    packed, _ = write_pair(plain_folder(False), tmp_path, KINDS["awq 64"])
    with pytest.raises(ModelError, match=message):
        run(changed(packed, change))


def test_orders_of_inputs_that_differ_within_a_product_are_refused(
    plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    packed, _ = write_pair(plain_folder(False), tmp_path, KINDS["gptq desc_act"])
    name = f"{Q_PROJ}.g_idx"
    with pytest.raises(ModelError, match="orders its inputs otherwise"):
        run(changed(packed, lambda tensors: tensors.update({name: tensors[name].flip(0)})))
    with pytest.raises(ModelError, match="names groups 0 to 9, and there are 4"):
        run(changed(packed, lambda tensors: tensors.update({name: torch.arange(128).int() % 10})))


def test_an_order_of_inputs_has_two_names() -> None:
    assert read(scheme(actorder="dynamic")).orders_inputs
    assert not read(scheme(actorder="static")).orders_inputs


def test_gptqmodel_names_the_format_twice() -> None:
    config = {
        **GPTQ,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "method": "gptq",
        "meta": {"quantizer": ["gptqmodel:5.8.0"]},
    }
    assert read(config).checkpoint_format == "gptq"


def test_an_order_of_inputs_is_not_cut_between_ranks(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    packed, _ = write_pair(plain_folder(False), tmp_path, KINDS["gptq desc_act"])
    with pytest.raises(Exception, match="desc_act"):
        LLM(packed, device="cpu", dtype="float32", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**AWQ, "group_size": 64, "bits": 3}, "bits=3"),
        ({**AWQ, "group_size": 16}, "group_size=16"),
        ({**AWQ, "group_size": 64, "version": "gemv"}, "version='gemv'"),
        ({**GPTQ, "bits": 8}, "bits=8"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "format": "gptq"}, "format='gptq'"),
        (scheme(num_bits=8), "weights.num_bits=8"),
        (scheme(strategy="tensor"), "weights.strategy='tensor'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes', which is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_field_and_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_quantization(Fields({"quantization_config": config}), None, {}, {})
    assert "quantization='fp8' or 'int4'" in str(caught.value)
