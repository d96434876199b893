"""The floor adds up: on a model that can be counted by hand, and on the standard workload."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanoinfer.bench.floor import Rates, Weights, compute_floor, count_weights, decode_steps, measure_rates
from nanoinfer.bench.workloads import LOADS, Workload, draw_workload, write_config
from nanoinfer.models.native_config import read_native_config, read_native_folder
from nanoinfer.quantization.fp8_linear import Fp8Config

FP8 = Fp8Config()
UNIT_RATES = Rates(bandwidth=1, matrix_rate=1, bytes_per_value=2, method="given")
# q, o: 4 x 4 each; k, v: 4 x 2 each; three MLP matrices of 4 x 8; lm_head 10 x 4
TINY = read_native_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 2,
    }
)
LAYERS, LM_HEAD = 16 + 16 + 8 + 8 + 96, 40


def test_the_floor_of_a_model_that_can_be_counted_by_hand() -> None:
    assert count_weights(TINY) == Weights(LAYERS, LM_HEAD)
    floor = compute_floor(TINY, Workload(seed=0, prompts=[[1, 2]], max_tokens=[2]), UNIT_RATES)
    # products of 2 tokens and one row of logits; 3 pairs of positions, 4 values of a query, 4 FLOPs
    assert floor.prefill_seconds == 2 * LAYERS * 2 + 2 * LM_HEAD + 4 * 4 * 3
    assert floor.decode_matrix_seconds == 2 * (LAYERS + LM_HEAD)
    assert floor.decode_kv_seconds == 3 * (2 + 2) * 2  # 3 tokens of 2 keys and 2 values, 2 bytes each
    assert floor.num_decode_steps == 1
    assert floor.seconds == floor.prefill_seconds + floor.decode_matrix_seconds + floor.decode_kv_seconds


def test_layers_with_a_window_attend_to_as_many_tokens_at_most_and_read_as_many() -> None:
    windowed = replace(TINY, windows=(3,))
    workload = Workload(seed=0, prompts=[[1, 2, 3, 4, 5], [1]], max_tokens=[3, 3])
    floor, full = (compute_floor(config, workload, UNIT_RATES) for config in (windowed, TINY))
    # pairs: 1 + 2 + 3 x 3 instead of 1 + 2 + 3 + 4 + 5
    assert full.prefill_seconds - floor.prefill_seconds == 4 * 4 * (15 - 12)
    # steps: contexts of 6 and 2, then of 7 and 3; 8 bytes for each token
    assert (full.decode_kv_seconds, floor.decode_kv_seconds) == ((6 + 2 + 7 + 3) * 8, (3 + 2 + 3 + 3) * 8)


def test_layers_of_two_shapes_are_counted_each_by_its_own_heads_and_shared_caches_are_read_again() -> None:
    sizes = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 4, "sliding_window": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "global_head_dim": 4}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    inputs = {"hidden_size_per_layer_input": 2, "vocab_size_per_layer_input": 10}
    config = read_native_config({"architectures": ["Gemma4ForCausalLM"], **sizes, **inputs})
    local, of_all, mlp, of_input = 16 + 8 + 8 + 16, 32 + 16 + 16 + 32, 96, 2 * 4 * 2
    sharing = (16 + 16) + (32 + 32)  # queries and outputs alone
    dense, late = local + of_all + sharing + 4 * mlp + 4 * of_input + 4 * 4 * 2, sharing + 2 * mlp + 2 * of_input
    assert count_weights(config) == Weights(dense, LM_HEAD, late=late)
    floor = compute_floor(config, Workload(seed=0, prompts=[[1, 2, 3, 4, 5]], max_tokens=[2]), UNIT_RATES)
    # Each of two layers reads 3 tokens of 2 keys and 2 values, and each of two others 6 tokens of 4 and 4.
    assert floor.decode_kv_seconds == 2 * 3 * 4 * 2 + 2 * 6 * 8 * 2
    # Layers with keys have 12 pairs of a window of 3 in queries of 4 values, and 15 in queries of 8; the others have
    # those of the last token alone, 3 and 5, if nobody asks for the log-probabilities of the prompt.
    owned = 2 * (dense - late) * 5 + 2 * LM_HEAD + 4 * (12 * 4 + 15 * 8)
    assert floor.prefill_seconds == owned + 2 * late + 4 * (3 * 4 + 5 * 8)
    asked = Workload(seed=0, prompts=[[1, 2, 3, 4, 5]], max_tokens=[2], prompt_logprobs=0)
    of_all_tokens = owned + 2 * LM_HEAD * 4 + 2 * late * 5 + 4 * (12 * 4 + 15 * 8)
    assert compute_floor(config, asked, UNIT_RATES).prefill_seconds == of_all_tokens


def test_a_token_of_latent_attention_has_one_vector_for_all_heads() -> None:
    sizes = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "first_k_dense_replace": 1}
    sizes |= {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 3}
    config = read_native_config({"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None, **sizes})
    layers = 4 * 2 * (2 + 2) + 4 * (4 + 2) + 4 * 2 * (2 + 3) + 2 * 3 * 4 + 96  # q, kv_a, kv_b, o; the MLP
    assert count_weights(config) == Weights(layers, LM_HEAD, 0, 256, 8)
    floor = compute_floor(config, Workload(seed=0, prompts=[[1, 2]], max_tokens=[2]), UNIT_RATES)
    # 3 pairs of positions, of 2 heads with 4 values of a key and 3 of a value, 2 FLOPs each
    assert floor.prefill_seconds == 2 * layers * 2 + 2 * LM_HEAD + 3 * 2 * (4 + 3) * 2
    assert floor.decode_kv_seconds == 3 * (4 + 2) * 2  # 3 tokens of a latent and a rotated part, 2 bytes each


def test_what_samples_share_is_left_out_of_a_windows_reads() -> None:
    workload = Workload(0, [[1, 2, 3]], [3], num_samples=2)
    assert decode_steps(workload, 512, window=2) == [(2, 1 + 1), (2, 2 + 2)]


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "partial_rotary_factor": 1,
    "layer_types": ["linear_attention", "full_attention"],
}
# q with gates and o: 3 of 4 x 4; k and v: 4 x 2 each. q, k: 3 values each; v, z and o: 10 each; b and a: 2 each
MIXERS = 4 * (3 * 4 + 2 * 2) + 4 * (2 * 3 + 3 * 10 + 2 * 2)


def test_linear_layers_read_and_write_their_states_and_keep_no_tokens() -> None:
    config = read_native_config(HYBRID)
    layers = MIXERS + 2 * 96
    assert count_weights(config) == Weights(layers, LM_HEAD)
    floor = compute_floor(config, Workload(seed=0, prompts=[[1, 2]], max_tokens=[2]), UNIT_RATES)
    states = 2 * 3 * 5
    assert floor.prefill_seconds == 2 * layers * 2 + 2 * LM_HEAD + 4 * 4 * 3 + 6 * states * 2
    assert floor.decode_kv_seconds == 3 * (2 + 2) * 2 + 2 * 4 * states


def test_an_expert_for_all_tokens_is_read_by_each() -> None:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    raw = {**HYBRID, "architectures": ["Qwen3_5MoeForCausalLM"], **sizes, "shared_expert_intermediate_size": 5}
    weights = count_weights(read_native_config(raw))
    assert weights == Weights(MIXERS + 2 * (6 * 4 + 3 * 4 * 5), LM_HEAD, 2 * 3 * 4 * 8, 6, 2)


def test_a_cache_in_8_bits_is_read_as_a_byte_for_each_key_and_value() -> None:
    workload = Workload(seed=0, prompts=[[1, 2]], max_tokens=[2])
    floor, in_16_bits = (compute_floor(TINY, workload, UNIT_RATES, 512, name) for name in ("int8", "auto"))
    assert floor.decode_kv_seconds == 3 * (2 + 2) * 1
    assert floor.decode_matrix_seconds == in_16_bits.decode_matrix_seconds
    assert floor.prefill_seconds == in_16_bits.prefill_seconds


def test_a_shared_prefix_is_computed_once_and_read_once_a_step() -> None:
    prefix_alone = compute_floor(TINY, Workload(0, [[1, 2, 3]], [2]), UNIT_RATES)
    shared = compute_floor(TINY, Workload(0, [[1, 2, 3, 4], [1, 2, 3, 5]], [2, 2], shared_prefix=3), UNIT_RATES)
    apart = compute_floor(TINY, Workload(0, [[1, 2, 3, 4], [1, 2, 3, 5]], [2, 2]), UNIT_RATES)
    # the prefix with one row of logits, a row more, and two tokens that attend to 4 tokens each
    assert shared.prefill_seconds == prefix_alone.prefill_seconds + 2 * LM_HEAD + 2 * (2 * LAYERS + 4 * 4 * 4)
    # one step: 2 sequences that attend to 5 tokens, 3 of them the same; 8 bytes for each
    assert apart.decode_kv_seconds == (5 + 5) * 8
    assert shared.decode_kv_seconds == (5 + 2) * 8
    assert shared.decode_matrix_seconds == apart.decode_matrix_seconds


def test_a_prompt_is_computed_once_and_read_once_a_step_for_all_its_samples() -> None:
    one = compute_floor(TINY, Workload(0, [[1, 2, 3]], [2]), UNIT_RATES)
    three = compute_floor(TINY, Workload(0, [[1, 2, 3]], [2], num_samples=3), UNIT_RATES)
    assert three.prefill_seconds == one.prefill_seconds
    # one step: 3 tokens of the prompt, and a token of each sample; 8 bytes for each
    assert (one.decode_kv_seconds, three.decode_kv_seconds) == ((3 + 1) * 8, (3 + 3) * 8)
    # at these rates products take longer than reading the weights once
    assert three.decode_matrix_seconds == 3 * one.decode_matrix_seconds


def test_samples_of_prompts_that_share_a_prefix_read_it_once_for_all() -> None:
    workload = Workload(0, [[1, 2, 3, 4], [1, 2, 3, 5, 6]], [2, 3], shared_prefix=3, num_samples=2)
    # the prefix of 3, the rest of each prompt (1 and 2), and 1 or 2 tokens of each of the samples
    assert decode_steps(workload, max_num_seqs=512) == [(4, 3 + 1 + 2 + 4 * 1), (2, 5 + 2 * 2)]


def test_decode_steps_run_each_request_to_its_end() -> None:
    workload = Workload(seed=0, prompts=[[7, 7], [7, 7, 7], [7]], max_tokens=[3, 2, 1])
    # The third is done with its prefill; the first attends to 3, then 4 tokens, the second to 4.
    assert decode_steps(workload, max_num_seqs=512) == [(2, 3 + 4), (1, 4)]


def test_beyond_max_num_seqs_requests_wait_for_room() -> None:
    workload = Workload(seed=0, prompts=[[7], [7], [7]], max_tokens=[2, 3, 3])
    assert decode_steps(workload, max_num_seqs=2) == [(2, 2 + 2), (2, 3 + 2), (1, 3)]


def test_beyond_max_num_seqs_a_request_runs_some_of_its_samples_first() -> None:
    workload = Workload(seed=0, prompts=[[7, 7], [7, 7, 7, 7]], max_tokens=[3, 2], num_samples=2)
    # Three have room: both samples of the first request, and one of the second; its other one takes the row of that.
    assert decode_steps(workload, max_num_seqs=3) == [(3, 2 + 4 + 3 * 1), (3, 2 + 4 + 2 * 2 + 1)]
    assert decode_steps(workload, max_num_seqs=1) == [(1, 3), (1, 4), (1, 3), (1, 4), (1, 5), (1, 5)]


@pytest.mark.parametrize(("size", "seconds", "kv_share"), [("0.6B", 3.73, 0.86), ("8B", 10.64, 0.39)])
def test_the_floor_of_the_standard_workload_on_an_h200(
    size: str, seconds: float, kv_share: float, tmp_path: Path
) -> None:
    write_config(size, tmp_path)
    workload = draw_workload(0, LOADS["cuda"]["default"][0], vocab_size=151936)
    h200 = Rates(bandwidth=4.3e12, matrix_rate=790e12, bytes_per_value=2, method="given")
    floor = compute_floor(read_native_folder(tmp_path), workload, h200)
    assert floor.seconds == pytest.approx(seconds, rel=0.01)
    assert floor.decode_kv_seconds / floor.seconds == pytest.approx(kv_share, abs=0.015)


def test_a_step_reads_the_experts_that_its_tokens_go_to() -> None:
    """Of 128 experts a token goes to 8: 4 tokens reach 29 of them on average, and 16 reach 82."""
    weights = Weights(dense=0, lm_head=0, expert=1, num_experts=128, num_experts_per_tok=8)
    assert weights.layers_of_a_token == 8
    reads = [weights.layers_read_by(num_tokens) for num_tokens in (0, 1, 4, 16, 1000)]
    assert reads == pytest.approx([0, 8, 29.1, 82.4, 128], abs=0.1)


def test_weights_in_fp8_are_read_as_a_byte_each_and_multiplied_at_their_own_rate() -> None:
    workload, config = Workload(seed=0, prompts=[[1, 2]], max_tokens=[2]), replace(TINY, quantization=FP8)
    at_once = compute_floor(config, workload, replace(UNIT_RATES, matrix_rate=1e9, fp8_matrix_rate=2e9))
    assert at_once.decode_matrix_seconds == LAYERS * 1 + LM_HEAD * 2
    assert at_once.decode_kv_seconds == 3 * (2 + 2) * 2
    multiplied = compute_floor(config, workload, replace(UNIT_RATES, bandwidth=1e9, fp8_matrix_rate=2))
    assert multiplied.prefill_seconds == LAYERS * 2 + 2 * LM_HEAD + 4 * 4 * 3
    assert multiplied.decode_matrix_seconds == LAYERS + 2 * LM_HEAD
    without_products = compute_floor(config, workload, UNIT_RATES)
    assert without_products.prefill_seconds == compute_floor(TINY, workload, UNIT_RATES).prefill_seconds


def test_what_a_checkpoint_leaves_in_16_bits_is_read_and_multiplied_so() -> None:
    """The projections of attention: 2 bytes a value, at the rate of 16 bits."""
    config = replace(TINY, quantization=Fp8Config(in_checkpoint=True, ignored=("self_attn",)))
    attention, mlp = 16 + 16 + 8 + 8, 96
    assert count_weights(config) == Weights(LAYERS, LM_HEAD, wide_dense=attention)
    workload = Workload(seed=0, prompts=[[1, 2]], max_tokens=[2])
    at_once = compute_floor(config, workload, replace(UNIT_RATES, matrix_rate=1e9, fp8_matrix_rate=2e9))
    assert at_once.decode_matrix_seconds == mlp * 1 + (attention + LM_HEAD) * 2
    multiplied = compute_floor(config, workload, replace(UNIT_RATES, bandwidth=1e9, fp8_matrix_rate=2))
    assert multiplied.prefill_seconds == 2 * (mlp + 2 * attention) + 2 * LM_HEAD + 4 * 4 * 3
    assert multiplied.decode_matrix_seconds == mlp + 2 * attention + 2 * LM_HEAD


@pytest.mark.parametrize(("in_checkpoint", "num_wide"), [(False, 4 * 2 * 2), (True, 0)])
def test_what_is_not_rounded_at_load_counts_as_16_bits(in_checkpoint: bool, num_wide: int) -> None:
    """b and a of linear attention, 2 values each for 4 inputs; a checkpoint may have them in 8 bits."""
    config = replace(read_native_config(HYBRID), quantization=Fp8Config(in_checkpoint=in_checkpoint))
    assert count_weights(config).wide_dense == num_wide


def test_in_gpt_oss_only_experts_have_4_bits(tmp_path: Path) -> None:
    """One token reads 24 layers of 4 experts of 3 x 2880 x 2880 values, attention and routers in 16 bits, the head."""
    write_config("gpt-oss-20b", tmp_path)
    config = read_native_folder(tmp_path)
    attention, routers = 24 * 2880 * 2 * 64 * (64 + 8), 24 * 2880 * 32
    weights = count_weights(config)
    assert (weights.wide_dense, weights.wide_expert) == (weights.dense, 0) == (attention + routers, 0)
    h200 = Rates(bandwidth=4.42e12, matrix_rate=790e12, bytes_per_value=2, method="given")
    one = draw_workload(0, LOADS["cuda"]["small"][0], vocab_size=201088)
    floor = compute_floor(config, one, h200)
    num_bytes = 24 * 4 * 3 * 2880**2 * 4.25 / 8 + 2 * (attention + routers + 201088 * 2880)
    assert floor.decode_matrix_seconds == pytest.approx(255 * num_bytes / 4.42e12)
    assert one.num_output_tokens / floor.seconds == pytest.approx(1179, abs=1)


def test_the_rate_of_fp8_is_measured_where_weights_have_it() -> None:
    assert measure_rates("cpu", replace(TINY, dtype="float32", quantization=FP8)).fp8_matrix_rate is None
    assert str(replace(UNIT_RATES, matrix_rate=8e14, fp8_matrix_rate=1.5e15)) == (
        "0.000 TB/s and 800 TFLOP/s (1500 in FP8): given"
    )
