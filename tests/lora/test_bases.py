"""Adapters of many kinds of base models: other architectures, weights in fewer bits, 8-bit caches; and peft's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import LLM, ConfigError
from nanoinfer.ops.lora.spec import LoRARows
from tests.control.test_weight_control import save_random
from tests.lora.adapters import PREFIX, merge, request, write_adapter
from tests.lora.test_adapters import GREEDY, OPTIONS, check
from tests.models.test_architectures import draw_prompts
from tests.quantization.test_checkpoints import FORMATS, plain_folder, write_pair  # noqa: F401 (a fixture)

PROMPTS = draw_prompts(0, (29, 1, 40))
RULES = {  # of modules that are no linear layer here, or stay in 16 bits there
    "Qwen3NextForCausalLM": r".*layers\.\d+\.(self_attn|linear_attn|mlp\.shared_expert)\.\w+(proj\w*)",
    "Qwen3MoeForCausalLM": r".*self_attn\.\w+_proj",
}
ALL = r".*layers\.\d+\.(self_attn|mlp)\.\w+_proj"


def answers(folder: Path, adapter: Path | None = None, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[Any]:
    given = None if adapter is None else [request(adapter, 1), None, request(adapter, 1)][: len(prompts)]
    with LLM(folder, enable_lora=adapter is not None, **OPTIONS, **options) as llm:
        return [*llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=given)]


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(
    "architecture", ["Phi3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"]
)
def test_architectures_that_pack_and_name_their_layers_otherwise(tmp_path: Path, architecture: str, size: int) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    base = save_random(tmp_path / "base", architecture, 0, **sizes)
    adapter = write_adapter(base, tmp_path / "adapter", 1, RULES.get(architecture, ALL), std=0.2)
    merged = merge(base, adapter, tmp_path / "merged")
    plain, wanted = answers(base), answers(merged)
    assert plain[0].token_ids != wanted[0].token_ids
    check(answers(base, adapter, tensor_parallel_size=size), [wanted[0], plain[1], wanted[2]])


@pytest.mark.parametrize("name", [*FORMATS][:2])
def test_a_base_in_fp8(
    name: str,
    plain_folder: Callable[[bool], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    fp8, wide = write_pair(plain_folder(False), tmp_path, FORMATS[name])
    adapter = write_adapter(wide, tmp_path / "adapter", 1, ALL)
    wanted = answers(wide, adapter, dtype="float32")
    assert [one.token_ids for one in wanted] != [one.token_ids for one in answers(wide, dtype="float32")]
    check(answers(fp8, adapter, dtype="float32"), wanted)


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_products_and_caches_in_fewer_bits(
    random_checkpoint: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """An adapter of zeros changes nothing; another one adds its product to what the layers compute without it."""
    base = random_checkpoint(hidden_size=128, intermediate_size=256)
    zeros = write_adapter(base, tmp_path / "zeros", 1, ALL, std=0.0)
    adapter = write_adapter(base, tmp_path / "adapter", 1, ALL, std=0.2)
    check(answers(base, zeros, **options), answers(base, **options))
    with LLM(base, enable_lora=True, **OPTIONS, **options) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=request(adapter, 1))
        engine: Any = llm.engine
        layer = engine.runner.model.model.layers[1].mlp.down_proj
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
        product, matrices = layer.quant_method, load_file(adapter / "adapter_model.safetensors")
        step, rows = engine.runner.adapters.step, engine.runner.model_runner.state.adapters.by_row
        [slot] = {*rows.values()}
        step.rows = LoRARows(torch.tensor([slot, len(product.matrices.a), slot], dtype=torch.int32))
        changed = [product.apply(layer, x, None), product.apply_split(layer, x, None).sum(0)]
        step.rows = None
        plain = product.apply(layer, x, None)
    a, b = (matrices[f"{PREFIX}model.layers.1.mlp.down_proj.lora_{which}.weight"] for which in "AB")
    wanted = plain + 2 * (x @ a.T @ b.T) * torch.tensor([[1.0], [0.0], [1.0]])
    torch.testing.assert_close(changed, [wanted, wanted])


def test_models_of_transformers_and_encoders_have_none(random_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"enable_lora=True, and .* runs by transformers' layers, which is not"):
        LLM(random_checkpoint(), enable_lora=True, model_impl="transformers", **OPTIONS)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
        {"r": 64, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True},
        {
            "r": 8,
            "target_modules": r".*\.1\..*(k|o|up)_proj",
            "rank_pattern": {"o_proj": 3},
            "alpha_pattern": {"k_proj": 1},
        },
        {
            "r": 5,
            "target_modules": ["down_proj", "gate_proj"],
            "layers_to_transform": [0],
            "exclude_modules": ["gate_proj"],
        },
    ],
)
def test_what_peft_saves_gives_the_tokens_that_peft_gives_merged_or_not(
    random_checkpoint: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = random_checkpoint(attention_bias=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(base).float().eval()
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path)
    outputs = answers(base, tmp_path, prompts=PROMPTS[:1], max_lora_rank=64)
    ids = torch.tensor([PROMPTS[0] + outputs[0].token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(PROMPTS[0]) - 1 : -1]
    assert logits.argmax(-1).tolist() == outputs[0].token_ids
    theirs = logits.log_softmax(-1).gather(1, ids[0, len(PROMPTS[0]) :, None])[:, 0]
    ours = [
        entry[token].logprob for token, entry in zip(outputs[0].token_ids, outputs[0].outputs[0].logprobs, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=0)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    check(answers(tmp_path / "merged", prompts=PROMPTS[:1]), outputs)
