"""The engine from prompt to tokens on a CPU in float32, where equal computation means equal greedy tokens.

Each path that could change what is computed (chunks, cached prefixes, preemption, block sizes) must not change it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from nanoinfer import LLM, ConfigError, RequestError, SamplingParams
from tests.engine.helpers import num_found

VOCAB_SIZE = 512
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65)  # around the edges of blocks of 16 tokens, and of 64
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

Checkpoint = Callable[..., Path]
ReferenceModel = Callable[[Path], Qwen3ForCausalLM]


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def reference_tokens(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=None,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def generate(folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **options: object) -> list:
    with LLM(folder, device="cpu", **options) as llm:
        return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def greedy_tokens(random_checkpoint: Checkpoint) -> list[list[int]]:
    """What the default options generate after `random_prompts(LENGTHS)`."""
    return generate(random_checkpoint(), random_prompts(LENGTHS))


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "attention_bias": True},
        {"head_dim": 128, "attention_bias": True},
        {"head_dim": 80},
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 96},
        {
            "max_position_embeddings": 128,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "max_position_embeddings": 77,
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        },  # to the last position
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=str,
)
def test_greedy_tokens_equal_those_of_transformers(
    random_checkpoint: Checkpoint, reference_model: ReferenceModel, overrides: dict
) -> None:
    folder = random_checkpoint(**overrides)
    prompts = random_prompts((1, 15, 16, 17, 63, 65))
    expected = [reference_tokens(reference_model(folder), prompt, GREEDY.max_tokens) for prompt in prompts]
    assert generate(folder, prompts, kvcache_block_size=16) == expected


def test_lengths_around_the_edge_of_a_default_block_equal_transformers(
    random_checkpoint: Checkpoint, reference_model: ReferenceModel
) -> None:
    folder, prompts = random_checkpoint(), random_prompts((255, 256, 257))
    expected = [reference_tokens(reference_model(folder), prompt, GREEDY.max_tokens) for prompt in prompts]
    assert generate(folder, prompts) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"kvcache_block_size": 48},
        {"kvcache_block_size": 16, "max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 17, "enable_prefix_caching": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"overlap": False},
        {"overlap": False, "kvcache_block_size": 16, "max_num_batched_tokens": 50, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_options_do_not_change_greedy_tokens(
    random_checkpoint: Checkpoint, greedy_tokens: list[list[int]], options: dict
) -> None:
    assert generate(random_checkpoint(), random_prompts(LENGTHS), **options) == greedy_tokens


def test_preemption_does_not_change_greedy_tokens(random_checkpoint: Checkpoint) -> None:
    folder = random_checkpoint()
    prompts = random_prompts((30,) * 8)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(folder, device="cpu", kvcache_block_size=16, num_kvcache_blocks=20, max_model_len=300) as llm:
        llm.engine.scheduler.reserved_tokens = 0  # so that blocks do run short
        tight = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.get_metrics().num_preemptions > 0
    assert tight == generate(folder, prompts, params)


def test_a_warm_prefix_cache_does_not_change_greedy_tokens(random_checkpoint: Checkpoint) -> None:
    prompts = random_prompts(LENGTHS)
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16) as llm:
        cold = llm.generate(prompts, GREEDY, use_tqdm=False)
        warm = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        cold_again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert [output.num_cached_tokens for output in cold] == [0] * len(LENGTHS)
    assert [output.num_cached_tokens for output in warm] == [num_found(length, 16) for length in LENGTHS]
    assert [output.num_cached_tokens for output in cold_again] == [0] * len(LENGTHS)


def test_generated_blocks_are_found_by_the_next_turn(random_checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts((20,))
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16) as llm:
        [first] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
        [second] = llm.generate([prompt + first.token_ids + [7]], GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == 48  # of 49 computed tokens: the last one sampled never was


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_shared_prefix_is_found_to_the_token_where_prompts_part(
    random_checkpoint: Checkpoint, size: int, kv_cache_dtype: str
) -> None:
    """Prompts part 13 tokens into their second block, and two of them later."""
    shared, *rest = random_prompts((29, 10, 30, 2, 5, 60))
    prompts = [*(shared + own for own in rest), shared + rest[1][:20] + rest[0]]
    options = {"kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": size}
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16, **options) as llm:
        [cold, *_] = llm.generate([prompt[:29] for prompt in prompts[:1]], GREEDY, use_tqdm=False)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = generate(random_checkpoint(), prompts, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in again] == expected
    assert cold.num_cached_tokens == 0
    # The last one shares 49 tokens with another of its step, of which it finds whole blocks.
    assert [output.num_cached_tokens for output in outputs] == [29, 29, 29, 29, 29, 48]
    assert [output.num_cached_tokens for output in again] == [num_found(len(prompt), 16) for prompt in prompts]


def test_prefixes_are_shared_within_equal_values_of_an_option_that_they_depend_on(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoinfer.engine.row_options.PREFIX_OPTIONS", ["seed"])  # as if keys and values depended on it
    [prompt] = random_prompts((40,))
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16) as llm:
        seeds = None, 1, 2, 1, None, 0
        params = (SamplingParams(temperature=0, max_tokens=1, seed=seed) for seed in seeds)
        found = [llm.generate([prompt], one, use_tqdm=False)[0].num_cached_tokens for one in params]
    assert found == [0, 0, 0, 32, 32, 0]


def test_identical_prompts_of_one_step_share_their_blocks(random_checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts((50,))
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16) as llm:
        outputs = llm.generate([prompt] * 3, GREEDY, use_tqdm=False)
        assert llm.get_metrics().num_prefill_steps == 1
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 48]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_token_ends_a_sequence_and_nothing_after_it_is_shown(
    random_checkpoint: Checkpoint, greedy_tokens: list[list[int]], tmp_path: Path, overlap: bool
) -> None:
    prompts, free = random_prompts(LENGTHS), greedy_tokens
    stop_token_ids = {tokens[5] for tokens in free}
    shutil.copytree(random_checkpoint(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(stop_token_ids)}))
    with LLM(tmp_path, device="cpu", kvcache_block_size=16, overlap=overlap, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        assert llm.get_metrics().decode_tokens == sum(len(output.token_ids) - 1 for output in outputs)
        assert llm.engine.block_manager.num_used_blocks == 0
    for output, tokens in zip(outputs, free, strict=True):
        end = next(i for i, token_id in enumerate(tokens) if token_id in stop_token_ids) + 1
        assert (output.token_ids, output.finish_reason) == (tokens[:end], "stop")


def test_a_prompt_that_fills_the_cache_but_one_token_is_served(random_checkpoint: Checkpoint) -> None:
    short, prompt = random_prompts((52, 63))
    with pytest.warns(UserWarning, match="lowered from the model's 2048 tokens to 64"):
        llm = LLM(random_checkpoint(), device="cpu", kvcache_block_size=16, num_kvcache_blocks=4)
    with llm:
        assert llm.max_model_len == 64
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        outputs = llm.generate([short, prompt], params, use_tqdm=False)
        assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(12, "length"), (1, "length")]
        with pytest.raises(RequestError, match="64 tokens, and with one more exceeds max_model_len=64"):
            llm.generate([[*prompt, 1]], GREEDY, use_tqdm=False)


def test_an_explicit_max_model_len_beyond_cache_or_model_is_an_error(random_checkpoint: Checkpoint) -> None:
    with pytest.raises(
        ValueError, match=r"max_model_len=65 is more than the KV cache holds: 4 blocks of 16 tokens, 64"
    ):
        LLM(random_checkpoint(), device="cpu", kvcache_block_size=16, num_kvcache_blocks=4, max_model_len=65)
    with pytest.raises(ValueError, match="max_model_len=2049 is above the model's own limit of 2048"):
        LLM(random_checkpoint(), device="cpu", max_model_len=2049)


def test_dynamic_rope_is_refused_beyond_the_models_own_length_with_the_reason(random_checkpoint: Checkpoint) -> None:
    folder = random_checkpoint(max_position_embeddings=77, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(ConfigError) as error:
        LLM(folder, device="cpu", max_model_len=78)
    assert str(error.value) == (
        "max_model_len=78 is above the model's own limit of 77 tokens; use at most 77: beyond it rope_type='dynamic' "
        "depends on the current length, so that keys in the KV cache would disagree with newer ones"
    )


def test_sampled_tokens_do_not_depend_on_the_batch(random_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Nor do they with random weights, for which config.json is enough."""
    shutil.copy(random_checkpoint() / "config.json", tmp_path)
    prompts = random_prompts((9, 20, 33, 5))
    params = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
    for options in ({}, {"load_format": "dummy"}):
        together = generate(tmp_path if options else random_checkpoint(), prompts, params, **options)
        one_by_one = generate(tmp_path if options else random_checkpoint(), prompts, params, max_num_seqs=1, **options)
        assert together == one_by_one


def test_equal_prompts_draw_different_samples_and_the_seed_decides(random_checkpoint: Checkpoint) -> None:
    prompts, params = random_prompts((9,)) * 2, SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first, again, other = (generate(random_checkpoint(), prompts, params, seed=seed) for seed in (1, 1, 2))
    assert first[0] != first[1]
    assert first == again != other
