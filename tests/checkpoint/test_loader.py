"""Weights from safetensors files: all of them, each in its place, and an error where that cannot be."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.checkpoint.loader import fill_with_random_weights, iterate_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.models import get_model_class
from nanoinfer.models.native_config import read_native_config
from nanoinfer.models.qwen import Qwen3ForCausalLM

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
QKV_PROJ = "model.layers.0.self_attn.qkv_proj"
GATE_UP_PROJ = "model.layers.0.mlp.gate_up_proj"


SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}


def tiny_config(**overrides: Any) -> ModelConfig:
    """One layer: vocabulary of 8, 6 dimensions, 4 query heads over 2 KV heads of 2 dimensions, an MLP of 10."""
    return read_native_config({**SIZES, **overrides})


def checkpoint_tensors(bias: bool = False, head: bool = True, vocab_size: int = 8) -> dict[str, Tensor]:
    """The tensors of `tiny_config` under their names in a checkpoint, each element a different number."""
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocab_size, 6),
        f"{layer}.input_layernorm.weight": (6,),
        f"{layer}.self_attn.q_proj.weight": (8, 6),
        f"{layer}.self_attn.k_proj.weight": (4, 6),
        f"{layer}.self_attn.v_proj.weight": (4, 6),
        f"{layer}.self_attn.o_proj.weight": (6, 8),
        f"{layer}.self_attn.q_norm.weight": (2,),
        f"{layer}.self_attn.k_norm.weight": (2,),
        f"{layer}.post_attention_layernorm.weight": (6,),
        f"{layer}.mlp.gate_proj.weight": (10, 6),
        f"{layer}.mlp.up_proj.weight": (10, 6),
        f"{layer}.mlp.down_proj.weight": (6, 10),
        "model.norm.weight": (6,),
    }
    if bias:
        sizes = {"q": 8, "k": 4, "v": 4, "o": 6}
        shapes |= {f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if head:
        shapes["lm_head.weight"] = (vocab_size, 6)
    start, tensors = 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    return tensors


def build(config: ModelConfig, tp: TensorParallel | None = None) -> Qwen3ForCausalLM:
    """A model whose parameters are NaN until they are loaded."""
    places = KVCacheLayout.of(config, 4, tp or TensorParallel()).places
    backends = AttentionBackends("torch", torch.device("cpu"), torch.float32, block_size=16, places=places)
    model = Qwen3ForCausalLM(config, max_positions=4, backends=backends, tp=tp or TensorParallel())
    for param in model.parameters():
        param.fill_(float("nan"))
    return model


def load(folder: Path, config: ModelConfig | None = None, tp: TensorParallel | None = None) -> dict[str, Tensor]:
    """Load the checkpoint in `folder`; the model's parameters by name, a tied head included."""
    model = build(config or tiny_config(), tp)
    load_model(model, folder)
    return dict(model.named_parameters(remove_duplicate=False))


def assert_error(folder: Path, message: str, config: ModelConfig | None = None) -> None:
    with pytest.raises(ModelError) as error:
        load(folder, config)
    assert message in str(error.value)


# --- what is loaded ---


def test_every_tensor_of_the_checkpoint_lies_in_its_place(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(bias=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")  # safetensors beside it are enough
    rotary_table_of_an_old_checkpoint = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    save_file(tensors | rotary_table_of_an_old_checkpoint, tmp_path / "model.safetensors")
    params = load(tmp_path, tiny_config(attention_bias=True))
    layer, unpacked = "model.layers.0", set(tensors) & set(params)
    assert len(unpacked) == 10
    for name in unpacked:
        assert torch.equal(params.pop(name), tensors[name]), name
    for kind in ("weight", "bias"):
        expected = [tensors[f"{layer}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(params.pop(f"{QKV_PROJ}.{kind}"), torch.cat(expected))
    expected = [tensors[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(params.pop(f"{GATE_UP_PROJ}.weight"), torch.cat(expected))
    assert params == {}


def test_a_bfloat16_checkpoint_fills_a_float32_model(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    embedding = load(tmp_path)["model.embed_tokens.weight"]
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].float())


def test_a_checkpoint_in_two_files_is_read_with_and_without_its_index(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    first, second = save_in_two_files(tensors, tmp_path)
    unnamed = tmp_path / "consolidated.safetensors"
    save_file({"another.weight": torch.zeros(1)}, unnamed)
    assert {name for name, _ in iterate_weights(tmp_path)} == first | second == set(tensors)
    with_index = load(tmp_path)
    unnamed.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    without_index = load(tmp_path)
    assert all(torch.equal(with_index[name], without_index[name]) for name in with_index)


def save_in_two_files(tensors: dict[str, Tensor], folder: Path) -> tuple[set[str], set[str]]:
    """Split the tensors over two files with an index, as save_pretrained does; q, k and v come to lie in both."""
    parts = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        filename = f"model-0000{number}-of-00002.safetensors"
        save_file(part, folder / filename)
        weight_map.update(dict.fromkeys(part, filename))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return set(parts[0]), set(parts[1])


# --- tied heads ---


@pytest.mark.parametrize("repeated", [False, True])
def test_a_tied_head_is_the_embedding_whether_the_checkpoint_repeats_it_or_not(repeated: bool, tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    if repeated:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    else:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    params = load(tmp_path, tiny_config(tie_word_embeddings=True))
    assert params["lm_head.weight"] is params["model.embed_tokens.weight"]
    assert torch.equal(params["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_head_than_the_tied_embedding_is_used_as_in_transformers_5(
    ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = checkpoint_tensors(vocab_size=100)
    save_file(tensors, tmp_path / "model.safetensors")
    config = tiny_config(tie_word_embeddings=True, vocab_size=100)
    shares = [load(tmp_path, config, TensorParallel(rank, size=ranks)) for rank in range(ranks)]
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(torch.cat([share[name] for share in shares]), tensors[name])
    assert caplog.messages[0] == (
        f"config.json ties lm_head to the embedding, and {tmp_path} has another lm_head, which is used; set "
        "tie_word_embeddings to false there"
    )


def test_a_head_in_fewer_bits_than_the_tied_embedding_does_not_replace_it(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    embedding = tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 0.1
    save_file({**tensors, "lm_head.weight": embedding.bfloat16()}, tmp_path / "model.safetensors")
    params = load(tmp_path, tiny_config(tie_word_embeddings=True))
    assert torch.equal(params["model.embed_tokens.weight"], embedding)


def test_a_tied_head_without_the_embedding_is_both(tmp_path: Path) -> None:
    """safetensors' save_model keeps the first name of a tensor that has two."""
    tensors = checkpoint_tensors()
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    params = load(tmp_path, tiny_config(tie_word_embeddings=True))
    assert params["lm_head.weight"] is params["model.embed_tokens.weight"]
    assert torch.equal(params["lm_head.weight"], tensors["lm_head.weight"])


# --- what is refused ---


K_PROJ = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("missing", "extra", "has_bias", "message"),
    [
        ([f"{K_PROJ}.weight"], [], False, f"lacks weights for {K_PROJ}.weight; download the checkpoint again"),
        (["lm_head.weight"], [], False, "lacks weights for lm_head.weight; download the checkpoint again"),
        ([], [], True, f"lacks weights for {K_PROJ}.bias, model.layers.0.self_attn.o_proj.bias, {Q_PROJ[:-6]}bias, "),
        ([*checkpoint_tensors()][1:], [], False, "lm_head.weight, model.layers.0.input_layernorm.weight, "),
        ([*checkpoint_tensors()][1:], [], False, " and 5 more; "),
        ([], [f"{K_PROJ}.bias"], False, f"has weights that the model does not know: {K_PROJ}.bias"),
        ([], ["model.layers.1.x.weight"], False, "has weights that the model does not know: model.layers.1.x.weight"),
        ([], ["stray"], False, "has weights that the model does not know: stray"),
    ],
)
def test_a_missing_part_of_a_packed_weight_and_a_left_over_layer_are_named(
    missing: list[str], extra: list[str], has_bias: bool, message: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in checkpoint_tensors().items() if name not in missing}
    save_file(tensors | dict.fromkeys(extra, torch.zeros(4)), tmp_path / "model.safetensors")
    assert_error(tmp_path, message, tiny_config(attention_bias=has_bias))


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("model.embed_tokens.weight", (9, 6), (8, 6)),
        ("lm_head.weight", (8, 5), (8, 6)),
        ("model.norm.weight", (5,), (6,)),
        (Q_PROJ, (4, 6), (8, 6)),
        ("model.layers.0.self_attn.v_proj.weight", (8, 6), (4, 6)),
        ("model.layers.0.self_attn.o_proj.weight", (8, 6), (6, 8)),
        ("model.layers.0.mlp.up_proj.weight", (10, 7), (10, 6)),
        ("model.layers.0.mlp.down_proj.weight", (10, 6), (6, 10)),
        ("model.layers.0.self_attn.k_proj.bias", (8,), (4,)),
        ("model.layers.0.self_attn.o_proj.bias", (1,), (6,)),
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = checkpoint_tensors(bias=True) | {name: torch.zeros(found)}
    save_file(tensors, tmp_path / "model.safetensors")
    message = f"{name} in {tmp_path}: it has shape {found}, config.json implies {expected}; is this"
    assert_error(tmp_path, message, tiny_config(attention_bias=True))


def test_a_file_or_a_tensor_that_the_index_names_but_is_not_there_is_named(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    save_in_two_files(tensors, tmp_path)
    first = {name: tensor for name, tensor in [*tensors.items()][::2] if name != Q_PROJ}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    assert_error(tmp_path, f"lacks weights for {Q_PROJ}; download")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert_error(tmp_path, "lacks model-00002-of-00002.safetensors, which its index names; download the checkpoint")


@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
def test_an_index_that_is_no_index_is_refused(content: str, tmp_path: Path) -> None:
    save_file(checkpoint_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert_error(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("filename", "message"),
    [
        *(
            (name, "has only pickled weights, which are refused: unpickling a file can run any code that is in")
            for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth")
        ),
        ("model-q4.gguf", "has its weights only in GGUF files; give the original checkpoint in safetensors"),
        ("nothing", "has no *.safetensors file; download the checkpoint, or use load_format='dummy'"),
    ],
)
def test_pickled_weights_are_refused_with_the_reason_and_never_opened(
    filename: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / filename).write_bytes(pickle.dumps({"model.norm.weight": [1.0]}))
    assert_error(tmp_path, message)


def test_a_tensor_in_two_files_is_refused_with_their_names(tmp_path: Path) -> None:
    save_file(checkpoint_tensors(), tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.norm.weight": torch.zeros(6)}, tmp_path / "other.safetensors")
    files = "model-00001-of-00002.safetensors, other.safetensors"
    assert_error(tmp_path, f"has model.norm.weight in two of its files, {files}; remove the one that is not of this")


@pytest.mark.parametrize(
    "other",
    [
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
        "model-00001-of-00001.safetensors",
    ],
)
@pytest.mark.parametrize(
    "index", [None, ["model.safetensors"], ["model-00001-of-00001.safetensors"], ["absent.safetensors"]]
)
def test_one_file_of_the_usual_name_is_read_alone(other: str, index: list[str] | None, tmp_path: Path) -> None:
    """As in transformers, which looks for it first."""
    tensors = checkpoint_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / other)
    if index is not None:
        weight_map = dict.fromkeys(tensors, index[0])
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(tmp_path)["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "weights.safetensors"])
def test_a_single_file_of_another_name_is_read_and_not_what_lies_beside_it(name: str, tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    save_file(tensors, tmp_path / name)
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(load(tmp_path)["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("consolidated.safetensors", "such a file has the layout of Mistral's own code; download model.safetensors"),
        ("adapter_model.safetensors", "use the base model with enable_lora=True, and name the adapter"),
    ],
)
def test_files_that_hold_no_weights_of_the_model_are_named(name: str, why: str, tmp_path: Path) -> None:
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, tmp_path / name)
    assert_error(tmp_path, f"{tmp_path} has no model.safetensors, and {name} is not read: {why}")


# --- how missing tensors are called ---

MIXTRAL = {
    **SIZES,
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
OLD_NAMES = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_tensors(renamed: dict[str, str]) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in checkpoint_tensors().items() if ".layers." not in name}
    for layer in range(2):
        for name, tensor in checkpoint_tensors().items():
            path = name.replace(".0.", f".{layer}.")
            if ".mlp." in name:
                for expert in range(2):
                    tensors[path.replace("mlp", f"mlp.experts.{expert}")] = tensor.clone()
            elif "layers" in name and "_norm" not in name:
                tensors[path] = tensor
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.zeros(2, 6)
    for theirs, ours in renamed.items():
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    return tensors


@pytest.mark.parametrize(
    ("renamed", "missing"),
    [
        (OLD_NAMES, "model.layers.1.block_sparse_moe.experts.0.w3.weight"),
        ({}, "model.layers.1.mlp.experts.0.up_proj.weight"),
        ({"model.": "model.language_model."}, "model.language_model.layers.0.mlp.experts.1.down_proj.weight"),
        ({"model.": "language_model.model."}, "language_model.model.layers.1.self_attn.v_proj.weight"),
        ({"model.": ""}, "layers.1.self_attn.v_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_its_like_in_other_layers_and_experts(
    renamed: dict[str, str], missing: str, tmp_path: Path
) -> None:
    tensors = mixtral_tensors(renamed)
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_native_config(MIXTRAL)
    places = KVCacheLayout.of(config, 4, TensorParallel()).places
    backends = AttentionBackends("torch", torch.device("cpu"), torch.float32, block_size=16, places=places)
    model = get_model_class("MixtralForCausalLM")(config, 4, backends, TensorParallel())
    with pytest.raises(ModelError, match=re.escape(f"lacks weights for {missing}; download the checkpoint again")):
        load_model(model, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:4], id="cut in the length"),
        pytest.param(lambda content: content[:40], id="cut in the header"),
        pytest.param(lambda content: content[:-1], id="cut at the end"),
        pytest.param(lambda content: b"\xff" * 8 + content[8:], id="an impossible length"),
        pytest.param(lambda content: b"<html>not found</html>", id="another kind of file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(checkpoint_tensors(), path)
    path.write_bytes(damage(path.read_bytes()))
    assert_error(tmp_path, f"{path} is not a valid safetensors file (")


# --- two ranks ---


def test_the_shards_of_two_ranks_put_together_are_the_whole(tmp_path: Path) -> None:
    save_file(checkpoint_tensors(bias=True, vocab_size=100), tmp_path / "model.safetensors")
    config = tiny_config(attention_bias=True, vocab_size=100)
    whole = load(tmp_path, config)
    rank0, rank1 = (load(tmp_path, config, TensorParallel(rank, size=2)) for rank in range(2))
    for name, expected in whole.items():
        assert torch.equal(together(name, rank0[name], rank1[name]), expected), name


def together(name: str, first: Tensor, second: Tensor) -> Tensor:
    """What two ranks hold of one parameter, as one rank would hold it."""
    if "qkv_proj" in name:  # 2 query heads, a key head and a value head of 2 dimensions on each rank
        parts = zip(first.split([4, 2, 2]), second.split([4, 2, 2]), strict=True)
        return torch.cat([half for pair in parts for half in pair])
    if "gate_up_proj" in name:
        parts = zip(first.chunk(2), second.chunk(2), strict=True)
        return torch.cat([half for pair in parts for half in pair])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.cat([first, second], dim=1)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return torch.cat([first, second])
    assert torch.equal(first, second), f"{name} is whole on every rank"  # norms, and the bias of o_proj
    return first


# --- random weights ---


def test_random_weights_are_those_of_their_seed_with_norms_of_one_and_the_given_spread() -> None:
    models = [build(tiny_config(vocab_size=2000)) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        fill_with_random_weights(model, std=0.5, seed=seed)
    params = dict(models[0].named_parameters())
    assert torch.equal(params["model.norm.weight"], torch.ones(6))
    assert torch.equal(params["model.layers.0.self_attn.q_norm.weight"], torch.ones(2))
    assert params["lm_head.weight"].std() == pytest.approx(0.5, rel=0.05)
    assert params["lm_head.weight"].mean() == pytest.approx(0.0, abs=0.02)
    assert torch.equal(models[1].lm_head.weight, params["lm_head.weight"])
    assert not torch.equal(models[2].lm_head.weight, params["lm_head.weight"])
