"""Hybrids of linear and full attention: states through chunks, samples, pauses and sleep; names in checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.caches.recurrent_states import LayerStates
from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.delta_rule import spec
from tests.models.test_architectures import (
    GREEDY,
    HYBRIDS,
    checkpoint,
    draw_options,
    draw_prompts,
    generate,
    reference_tokens,
)

__all__ = ["checkpoint"]
EVEN = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def random_weights(heads: int, key_dim: int, value_dim: int, width: int = 4) -> spec.DeltaRuleWeights:
    """Weights for as many key heads as value heads, and the epsilon of the norm."""
    channels = heads * (2 * key_dim + value_dim)
    sizes = ((channels, width), (heads,), (heads,), (value_dim,))
    return spec.DeltaRuleWeights(*(torch.randn(size) for size in sizes), 1e-6)


def empty_states(num_places: int, heads: int, key_dim: int, value_dim: int, width: int = 4) -> LayerStates:
    """States of NaN, which nothing may read before it is written."""
    nan = float("nan")
    conv_inputs = torch.full((num_places, width, heads * (2 * key_dim + value_dim)), nan)
    return LayerStates(torch.full((num_places, heads, key_dim, value_dim), nan), conv_inputs)


@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [64], [63, 65, 128], [1, 2, 3, 4, 130], [50, 100, 150]], ids=str)
def test_chunks_cut_anywhere_and_steps_leave_the_state_that_single_steps_leave(cuts: list[int]) -> None:
    torch.manual_seed(0)
    num_tokens, heads, key_dim, value_dim = 190, 2, 8, 12
    weights = random_weights(heads, key_dim, value_dim)
    qkvz = torch.randn(num_tokens, heads * (2 * key_dim + 2 * value_dim))
    ba = torch.randn(num_tokens, 2 * heads)
    by_steps, by_chunks = (empty_states(2, heads, key_dim, value_dim) for _ in range(2))
    row = torch.tensor([1], dtype=torch.int32)
    expected = torch.cat(
        [
            spec.gated_delta_step(
                *(x[[index]] for x in (qkvz, ba)), row, torch.tensor([index]), *astuple(by_steps), weights
            )
            for index in range(num_tokens)
        ]
    )
    outs = []
    for start, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        of_chunk = qkvz[start:end], ba[start:end], row, (end - start,), (end,)
        outs.append(spec.gated_delta_prefill(*of_chunk, *astuple(by_chunks), weights))
    torch.testing.assert_close(torch.cat(outs), expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(by_chunks.matrices[1], by_steps.matrices[1], atol=1e-4, rtol=1e-4)
    assert torch.equal(by_chunks.conv_inputs[1], by_steps.conv_inputs[1])
    assert by_chunks.matrices[0].isnan().all(), "the state of another row"


def astuple(states: LayerStates) -> tuple[torch.Tensor, torch.Tensor]:
    return states.matrices, states.conv_inputs


def test_chunks_of_several_sequences_do_not_mix() -> None:
    torch.manual_seed(1)
    heads, key_dim, value_dim, lens = 2, 8, 8, (1, 70, 3, 128, 64)
    weights = random_weights(heads, key_dim, value_dim)
    qkvz, ba = torch.randn(sum(lens), heads * (2 * key_dim + 2 * value_dim)), torch.randn(sum(lens), 2 * heads)
    together, alone = (empty_states(len(lens), heads, key_dim, value_dim) for _ in range(2))
    rows = torch.tensor([4, 2, 0, 1, 3], dtype=torch.int32)
    out = spec.gated_delta_prefill(qkvz, ba, rows, lens, lens, *astuple(together), weights)
    first = 0
    for row, length in zip(rows, lens, strict=True):
        part = slice(first, first + length)
        of_one = qkvz[part], ba[part], row[None], (length,), (length,)
        expected = spec.gated_delta_prefill(*of_one, *astuple(alone), weights)
        torch.testing.assert_close(out[part], expected, atol=1e-5, rtol=1e-5)
        first += length
    torch.testing.assert_close(together.matrices, alone.matrices, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_prompts_longer_and_shorter_than_chunks_and_convolution_give_the_tokens_of_transformers(
    checkpoint: Callable[..., Path],
    architecture: str,
) -> None:
    folder = checkpoint(architecture, 5)
    prompts = draw_prompts(5, (1, 2, 3, 4, 5, 63, 64, 65, 127, 129, 200))
    answers = [
        generate(folder, prompts, max_num_batched_tokens=max_num_batched_tokens, kvcache_block_size=16)
        for max_num_batched_tokens in (7, 65, 1000)
    ]
    assert answers == [reference_tokens(folder, prompts, answers[0])] * 3


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_samples_of_a_prompt_have_states_of_their_own(checkpoint: Callable[..., Path], architecture: str) -> None:
    folder, [prompt] = checkpoint(architecture, 1), draw_prompts(1, (33,))
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=4, seed=3)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 100, "kvcache_block_size": 16}
    with LLM(folder, max_num_seqs=4, **options) as llm:
        samples = [sample.token_ids for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs]
    with LLM(folder, max_num_seqs=1, **options) as llm:
        alone = [sample.token_ids for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs]
    assert samples == alone
    assert len({tuple(sample) for sample in samples}) == 4


def test_a_sequence_that_was_paused_or_slept_through_goes_on_with_its_state(
    checkpoint: Callable[..., Path],
) -> None:
    folder, prompts = checkpoint("Qwen3_5ForCausalLM", 2), draw_prompts(2, (20, 5))
    with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=50, kvcache_block_size=16) as llm:
        first, second = (llm.add_request(prompt, GREEDY) for prompt in prompts)
        llm.step()
        llm.step()
        llm.pause([first])
        outputs = []
        while len(outputs) < 1:
            outputs += llm.step()
        llm.resume([first])
        while not llm.is_finished():
            outputs += llm.step()
        tokens = {output.request_id: output.outputs[0].token_ids for output in outputs}
        answers = [tokens[first], tokens[second]]
        assert answers == reference_tokens(folder, prompts, answers)
        llm.sleep(level=1)
        llm.wake_up()
        assert [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == answers


# --- checkpoints ---


def as_released(folder: Path, target: Path, architecture: str) -> Path:
    """Write the checkpoint of a text model as it is released: beside a vision model and mtp.*, its experts fused."""
    tensors = load_file(folder / "model.safetensors")
    released: dict[str, torch.Tensor] = {"mtp.fc.weight": torch.ones(3), "model.visual.blocks.0.weight": torch.ones(2)}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        ours = name.replace("model.", "model.language_model.", 1)
        if ".experts." in name:
            path, _, rest = ours.partition(".experts.")
            number, part, _ = rest.split(".")
            experts.setdefault(path, {})[int(number), part] = tensor
        else:
            released[ours] = tensor
    for path, parts in experts.items():
        numbers = range(1 + max(number for number, _ in parts))
        gate_up = [torch.cat([parts[number, "gate_proj"], parts[number, "up_proj"]]) for number in numbers]
        released[f"{path}.experts.gate_up_proj"] = torch.stack(gate_up)
        released[f"{path}.experts.down_proj"] = torch.stack([parts[number, "down_proj"] for number in numbers])
    target.mkdir()
    save_file(released, target / "model.safetensors")
    text_config = transformers.AutoConfig.from_pretrained(folder)
    text_config.rope_parameters |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    name = architecture.replace("ForCausalLM", "ForConditionalGeneration")
    config_class = getattr(transformers, name).config_class
    config = config_class(
        text_config=text_config.to_dict(), architectures=[name], tie_word_embeddings=text_config.tie_word_embeddings
    )
    config.save_pretrained(target)
    return target


@pytest.mark.parametrize("architecture", HYBRIDS[1:])
def test_the_text_part_of_a_model_that_sees_images_answers_as_the_text_model(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    architecture: str,
) -> None:
    folder, prompts = checkpoint(architecture, 3), draw_prompts(3, (9, 30))
    released = as_released(folder, tmp_path / "released", architecture)
    answers = generate(released, prompts)
    assert answers == reference_tokens(folder, prompts, answers)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layer_types": ["full_attention", "x"]}, "it must name linear_attention or full_attention for each of 2"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types without full_attention"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5 is no multiple of linear_num_key_heads=16"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0; it must be a whole number of at least 1"),
        ({"text_config": 3}, "text_config=3; it must be a JSON object"),
        ({"hidden_act": "gelu", "full_attention_interval": 2}, "hidden_act='gelu', which is not supported"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused_by_field_and_value(entry: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2}
    raw = {"architectures": ["Qwen3_5ForCausalLM"], "num_attention_heads": 8, **sizes, **entry}
    with pytest.raises(ModelError) as error:
        read_native_config(raw)
    assert message in str(error.value)


def test_ranks_that_cannot_share_the_key_heads_are_refused() -> None:
    options = draw_options("Qwen3_5ForCausalLM", 0) | EVEN | {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
    config = read_native_config({"architectures": ["Qwen3_5ForCausalLM"], **options})
    with pytest.raises(ConfigError, match="linear_num_key_heads=3 of this model; use one of 1"):
        config.check_tensor_parallel_size(2)
