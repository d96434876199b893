"""What an adapter's config says: by peft's rules where peft is installed, and what is refused."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoinfer.errors import ModelError
from nanoinfer.lora.adapter_config import AdapterConfig

NAMES = [
    f"model.layers.{layer}.{part}_proj"
    for layer in range(12)
    for part in ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.gate", "mlp.down")
]


def read(folder: Path, **fields: Any) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    return AdapterConfig.read(folder)


def targeted(config: AdapterConfig) -> list[str]:
    return [name.removeprefix("model.layers.").removesuffix("_proj") for name in NAMES if config.targets(name)]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 11]}, ["1.self_attn.q", "11.self_attn.q"]),
        ({"target_modules": ["q_proj", "o_proj"], "layers_to_transform": 3}, ["3.self_attn.q", "3.self_attn.o"]),
        ({"target_modules": ["proj", "model.layers.2.mlp.down_proj"]}, ["2.mlp.down"]),
        ({"target_modules": r".*\.1\.self_attn.*", "exclude_modules": ["k_proj"]}, ["1.self_attn.q", "1.self_attn.o"]),
        ({"target_modules": r"q_proj"}, []),
        (
            {"target_modules": "all-linear", "exclude_modules": r".*\.(?!10\.)\d+\.(self_attn|mlp)\..*"},
            [f"10.{part}" for part in ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.gate", "mlp.down")],
        ),
        ({"target_modules": ["gate_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, ["0.mlp.gate"]),
        ({"target_modules": ["gate_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks"]}, []),
    ],
)
def test_modules_are_named_by_ends_or_by_one_expression_of_the_whole(
    tmp_path: Path, fields: dict[str, Any], names: list[str]
) -> None:
    assert targeted(read(tmp_path, **fields)) == names


def test_ranks_and_factors_follow_the_first_pattern_that_a_name_ends_with(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {"rank_pattern": {r"layers\.1\..*q_proj": 2, "q_proj": 4}, "alpha_pattern": {"mlp.*": 6}}
    config = read(tmp_path, r=16, lora_alpha=8, **patterns)
    assert [config.rank_of(name) for name in (NAMES[5], NAMES[0], NAMES[4])] == [2, 4, 16]
    assert [config.factor_of(name) for name in (NAMES[5], NAMES[0], NAMES[4])] == [4, 2, 6 / 16]
    config = read(tmp_path, r=16, lora_alpha=8, use_rslora=True, **patterns)
    assert [config.factor_of(name) for name in (NAMES[5], NAMES[0], NAMES[4])] == [8 / 2**0.5, 4, 6 / 4]


def test_a_random_config_means_what_it_means_to_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    rng, num_targeted = random.Random(0), 0
    ends = ["q_proj", "k_proj", "o_proj", "mlp.gate_proj", "proj", "layers.3.mlp.down_proj", NAMES[7]]
    whole = [r".*q_proj", r".*layers\.[0-3]\..*", r"model\.layers\.\d\.mlp\..*", "q_proj", ".*"]
    for _ in range(200):
        fields: dict[str, Any] = {
            "target_modules": rng.choice([rng.sample(ends, 3), rng.choice(whole)]),
            "exclude_modules": rng.choice([None, rng.sample(ends, 2), rng.choice(whole[:-1])]),
            "rank_pattern": {end: rng.randint(1, 9) for end in rng.sample([*ends, *whole], 2)},
            "alpha_pattern": {end: rng.randint(1, 9) for end in rng.sample([*ends, *whole], 2)},
            "use_rslora": rng.random() < 0.5,
        }
        if isinstance(fields["target_modules"], list):
            fields["layers_to_transform"] = rng.choice([None, 1, [0, 3, 10], []])
            fields["layers_pattern"] = rng.choice([None, "layers", ["blocks", "layers"]])
            if fields["layers_to_transform"] is None:
                del fields["layers_pattern"]
        theirs = peft.LoraConfig(r=6, lora_alpha=5, **fields)
        theirs.save_pretrained(tmp_path)
        theirs = peft.LoraConfig.from_pretrained(tmp_path)  # as saved: patterns are sorted
        ours = AdapterConfig.read(tmp_path)
        for name in NAMES:
            found = check_target_module_exists(SimpleNamespace(**theirs.to_dict()), name)
            assert ours.targets(name) == bool(found), (fields, name)
            num_targeted += bool(found)
            rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, name), 6)
            alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, name), 5)
            assert ours.rank_of(name) == rank
            assert ours.factor_of(name) == alpha / (rank**0.5 if fields["use_rslora"] else rank)
    assert 200 < num_targeted < 150 * len(NAMES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: value}, f"{name}={value!r} is not supported; merge the adapter into its base model with peft's")
            for name, value in {
                "use_dora": True,
                "bias": "all",
                "lora_bias": True,
                "fan_in_fan_out": True,
                "modules_to_save": ["lm_head"],
                "trainable_token_indices": [1],
                "alora_invocation_tokens": [1],
                "layer_replication": [[0, 2]],
                "target_parameters": ["experts.down_proj"],
                "use_qalora": True,
                "use_bdlora": {"nblocks": 2},
                "kasa_config": {"beta": 1},
                "arrow_config": {"top_k": 1},
                "what_comes_next": True,
            }.items()
        ),
        *(
            ({"init_lora_weights": name}, f"init_lora_weights={name!r} changes the base model's weights")
            for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq")
        ),
        ({"peft_type": "IA3"}, "peft_type='IA3', and only 'LORA' is supported"),
        ({"r": 0}, "r=0 is not a number above 0"),
        ({"target_modules": [1]}, "target_modules=[1] is neither a text nor a list of texts"),
        ({"target_modules": "("}, "'(' is no regular expression (missing ), unterminated"),
        ({"rank_pattern": {"*": 4}}, "'(*)' is no regular expression (nothing to repeat"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern['q_proj']='x' is not a number above 0"),
        ({"rank_pattern": [4]}, "rank_pattern=[4] is no dict of numbers by ends of names"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan is not a number above 0"),
        ({"layers_pattern": 5}, "layers_pattern=5 is neither a text nor a list of texts"),
        ({"layers_to_transform": "0"}, "layers_to_transform='0' is neither a whole number nor a list of these"),
    ],
)
def test_what_would_change_answers_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read(tmp_path, **fields)


def test_what_changes_no_answer_is_passed_over(tmp_path: Path) -> None:
    read(tmp_path, lora_dropout=0.5, base_model_name_or_path="m", init_lora_weights="gaussian", eva_config={"rho": 2.0})


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read .*; give the folder"):
        AdapterConfig.read(tmp_path)
