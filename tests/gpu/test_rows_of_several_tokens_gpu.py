"""Decode steps of several tokens a row on one GPU and on two: answers, CUDA graphs, sleep, the memory of graphs."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nanoinfer import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, tiny_model_path
from nanoinfer.bench.workloads import write_config
from nanoinfer.config import EngineConfig
from nanoinfer.engine.interfaces import row_sizes
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
from nanoinfer.runner.cuda_graphs import graph_sizes, several_tokens_graph_sizes, sharing_graph_sizes
from nanoinfer.runner.stand_ins import GraphKey, packed_graph_sizes, packed_line_counts
from nanoinfer.runner.step_tables import PADDING_ROW
from tests.engine.test_rows_of_several_tokens import PARAMS, compare, draw_prompts, folders
from tests.gpu.test_engine_gpu import assert_part_at_near_ties, chat_prompts
from tests.models.test_architectures import VOCAB_SIZE, draw_options, save_random_model
from tests.proposers import KnownTexts, engine_of, proposing_llm
from tests.tiny_checkpoint.tasks import TASKS, held_out_examples

__all__ = ["folders"]
pytestmark = pytest.mark.gpu

SIZES = pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
QUESTIONS = [example.question for task in TASKS for example in held_out_examples(task, 20, seed=5)]
GREEDY = SamplingParams(temperature=0, max_tokens=128)
# The beginning of a text that follows one follows it, too: max_tokens may end it.
GRAMMARS = ["[a-zA-Z0-9 ,.]*", "([a-z][0-9])*[a-z]?", "([0-9]{2}, )*([0-9]{1,2},?)?", "[b-y]*( [A-Z]*)*"]


@SIZES
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_in_float32_tokens_and_log_probabilities_are_those_of_single_steps(
    architecture: str, size: int, folders: Callable[[str], Path]
) -> None:
    """In float32 attention is PyTorch's, and there are no CUDA graphs."""
    plain, metrics = compare(
        folders(architecture), draw_prompts(), PARAMS, 1e-4, device="cuda", tensor_parallel_size=size
    )
    assert metrics.num_decode_steps < plain.num_decode_steps


@SIZES
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_those_of_single_steps_before_sleep_and_after_it(size: int, enforce_eager: bool) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": size, "enforce_eager": enforce_eager}
    with LLM(tiny_model_path(), **options) as llm:
        prompts = chat_prompts(llm, QUESTIONS)
        expected = llm.generate(prompts, GREEDY, use_tqdm=False)
        num_single_steps = llm.get_metrics().num_decode_steps
    with proposing_llm(tiny_model_path(), **options) as llm:
        engine, num_steps = engine_of(llm), 0
        vocab_size = len(llm.tokenizer)
        for turn in range(3):
            engine.proposer = KnownTexts(expected, vocab_size, turn, first_id=turn * len(prompts), may_differ=True)
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            same = sum(one.token_ids == other.token_ids for one, other in zip(outputs, expected, strict=True))
            assert same >= 0.97 * len(prompts), f"{same} of {len(prompts)} agree in turn {turn}"
            num_steps, num_before = llm.get_metrics().num_decode_steps, num_steps
            assert num_steps - num_before < 0.8 * num_single_steps
            if turn < 2:
                llm.sleep(level=1)
                llm.wake_up()


def masked_params(num_requests: int) -> list[SamplingParams]:
    """Return greedy requests: every third has no mask, the next has a grammar, and the next a set of tokens."""
    params = []
    for index in range(num_requests):
        grammar = StructuredOutputsParams(regex=GRAMMARS[index // 3 % len(GRAMMARS)])
        token_ids = [*range(3 + index, 300, 1 + index % 2)]
        masks: list[dict[str, Any]] = [{}, {"structured_outputs": grammar}, {"allowed_token_ids": token_ids}]
        params.append(replace(GREEDY, max_tokens=64, ignore_eos=index % 3 > 0, **masks[index % 3]))
    return params


@pytest.mark.parametrize(
    ("size", "dtype", "near_tie"),
    [(1, "float32", 0.001), (1, "bfloat16", 0.25), pytest.param(2, "bfloat16", 0.25, marks=pytest.mark.multi_gpu)],
)
def test_answers_with_masks_part_from_single_steps_at_near_ties(size: int, dtype: str, near_tie: float) -> None:
    """Each of the packed lines finds its own mask: rows have different ones, and most grammars one for each token.

    A mask leaves tokens that the model finds unlikely, and many of these are nearly as likely as each other. So more
    answers part than without masks, also between two batch sizes.
    """
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"dtype": dtype, "tensor_parallel_size": size}
    params = masked_params(len(QUESTIONS))
    with LLM(tiny_model_path(), logprobs_mode="processed_logprobs", **options) as llm:
        prompts = chat_prompts(llm, QUESTIONS)
        expected = llm.generate(prompts, [replace(one, logprobs=20) for one in params], use_tqdm=False)
        in_few_rows = [
            output
            for start in range(0, len(prompts), 16)
            for output in llm.generate(prompts[start : start + 16], params[start : start + 16], use_tqdm=False)
        ]
    with proposing_llm(tiny_model_path(), **options) as llm:
        engine_of(llm).proposer = KnownTexts(expected, len(llm.tokenizer), may_differ=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_metrics().num_accepted_tokens > len(prompts)
    for output, one in zip(outputs, params, strict=True):
        if one.structured_outputs is not None:
            assert re.fullmatch(str(one.structured_outputs.regex), output.text)
        assert one.allowed_token_ids is None or {*output.token_ids} <= {*one.allowed_token_ids}
    same, same_in_few_rows = (
        sum(assert_part_at_near_ties(one, other, near_tie) for one, other in zip(expected, others, strict=True))
        for others in (outputs, in_few_rows)
    )
    print(f"{dtype}, {size} GPUs: {same} of {len(prompts)} agree, and {same_in_few_rows} with steps of 16 rows")
    assert same >= (0.98 if dtype == "float32" else 0.6) * len(prompts)


@SIZES
@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "GptOssForCausalLM"])
def test_states_windows_and_sinks_in_graphs_part_from_single_steps_at_near_ties(
    architecture: str, size: int, tmp_path: Path
) -> None:
    """Some prompts share a prefix, which steps of several tokens read together, too."""
    heads = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    save_random_model(tmp_path, architecture, draw_options(architecture, 1) | heads, seed=1)
    prefix = [(5 * i * i + 3 * i) % VOCAB_SIZE for i in range(100)]
    prompts = [prefix + [i] * (1 + i) for i in range(12)] + [[i, 3 * i, 7] * (1 + i) for i in range(1, 13)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5, detokenize=False)
    options: dict[str, Any] = {"dtype": "bfloat16", "tensor_parallel_size": size, "kvcache_block_size": 16}

    def answers(llm: LLM) -> list[RequestOutput]:
        engine_of(llm).scheduler.sharer_finder.min_saved_tokens = 0
        return llm.generate(prompts, params, use_tqdm=False)

    with LLM(tmp_path, max_model_len=200, **options) as llm:
        expected = answers(llm)
    with proposing_llm(tmp_path, max_model_len=200, **options) as llm:
        engine_of(llm).proposer = KnownTexts(expected, VOCAB_SIZE, may_differ=True)
        outputs = answers(llm)
    same = sum(assert_part_at_near_ties(one, other) for one, other in zip(expected, outputs, strict=True))
    print(f"{architecture}, {size} GPUs: {same} of {len(prompts)} agree")
    assert same >= 0.5 * len(prompts)


def test_graphs_of_up_to_8_tokens_a_row_fit_into_the_memory_that_is_left_for_them(tmp_path: Path) -> None:
    write_config("0.6B", tmp_path)
    total = torch.cuda.mem_get_info()[1]
    options: dict[str, Any] = {"load_format": "dummy", "gpu_memory_utilization": 0.5, "max_num_seqs": 256}
    with patch.object(EngineConfig, "max_row_tokens", 8), LLM(tmp_path, **options) as llm:
        used = [total - torch.cuda.mem_get_info()[0]]
        capture_all_graphs(engine_of(llm), max_num_seqs=256)
        torch.cuda.empty_cache()
        used.append(total - torch.cuda.mem_get_info()[0])
    print(f"used, GiB: {used[0] / 2**30:.2f}, with all graphs {used[1] / 2**30:.2f} of {total / 2**31:.2f} granted")
    assert used[1] < 0.51 * total


@torch.inference_mode()
def capture_all_graphs(engine: LLMEngine, max_num_seqs: int) -> None:
    """Capture each graph that steps of up to 8 tokens a row can ask for."""
    graphs = engine.runner.model_runner.state.decode_graphs  # type: ignore[union-attr]
    assert graphs is not None
    sizes = several_tokens_graph_sizes(graph_sizes(max_num_seqs))
    for num_tokens in (1, *row_sizes(8)):
        for size in sizes:
            rows = torch.full((size,), PADDING_ROW, dtype=torch.int32, device="cuda")
            num_row_tokens, none = torch.ones_like(rows), torch.zeros_like(rows)
            graphs.replay(DecodeBatch(rows, None, num_tokens, num_row_tokens))
            if size in sharing_graph_sizes(max_num_seqs):
                graphs.replay(DecodeBatch(rows, SharedPrefixes(none, none), num_tokens, num_row_tokens))
    for size in packed_graph_sizes(graph_sizes(max_num_seqs)):
        for lines in packed_line_counts(size, num_tokens=8):
            key = GraphKey(size, num_tokens=8, shares_prefixes=False, num_packed=lines)
            if key not in graphs._graphs:
                graphs.capture(key, is_late=True)
    torch.cuda.synchronize()
    assert len(graphs._graphs) > 5 * len(sizes)
