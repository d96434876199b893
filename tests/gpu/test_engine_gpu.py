"""The engine on the GPU: its answers on the tiny checkpoint against the CPU's, over every backend and with graphs."""

import gc
import importlib.util
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from nanoinfer import LLM, RequestOutput, SamplingParams, tiny_model_path
from nanoinfer.device import import_error
from nanoinfer.layers.attention import backend_selection
from nanoinfer.models import prefill_graphs
from nanoinfer.models.prefill_graphs import STEPS_BEFORE_CAPTURE
from nanoinfer.ops.common.device_properties import has_hopper_kernels
from tests.models.test_architectures import checkpoint  # noqa: F401 (a fixture)
from tests.tiny_checkpoint.tasks import TASKS, held_out_examples

pytestmark = pytest.mark.gpu

BACKENDS = ["flash_attn", "triton", "torch"]
GREEDY = SamplingParams(temperature=0, max_tokens=128)
NEAR_TIE = 0.25  # in logits: bf16 keeps 8 bits, and the layers add up


def skip_without(backend: str) -> None:
    if backend == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")


def chat_prompts(llm: LLM, questions: list[str]) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    return [
        llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in conversations
    ]


def tokens(folder: Path, prompts: list, params: object, **options: object) -> list[list[int]]:
    with LLM(folder, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.block_manager.num_used_blocks == 0
    return [output.token_ids for output in outputs]


def num_equal(one: list[list[int]], two: list[list[int]]) -> int:
    return sum(mine == theirs for mine, theirs in zip(one, two, strict=True))


def assert_answers_right(llm: LLM) -> None:
    examples = [example for task in TASKS for example in held_out_examples(task, 20, seed=5)]
    outputs = llm.generate(chat_prompts(llm, [example.question for example in examples]), GREEDY, use_tqdm=False)
    right = sum(output.text == example.answer for output, example in zip(outputs, examples, strict=True))
    assert right >= 0.97 * len(examples)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_tiny_checkpoint_answers_right(backend: str, enforce_eager: bool) -> None:
    skip_without(backend)
    with LLM(tiny_model_path(), attention_backend=backend, enforce_eager=enforce_eager) as llm:
        assert_answers_right(llm)


def reference_model(folder: Path) -> torch.nn.Module:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()


def assert_differ_at_a_near_tie(model: torch.nn.Module, prompt: list[int], mine: list[int], theirs: list[int]) -> None:
    """Where two greedy completions part, if they do, `model` holds their tokens for about equally likely."""
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=True))))
    if same < len(mine):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + mine[:same]], device="cuda")).logits[0, -1]
        gap = abs(logits[theirs[same]] - logits[mine[same]]).item()
        spread = logits.std().item()
        assert gap < NEAR_TIE * spread, f"token {same} of a prompt of {len(prompt)}: {gap} in logits of {spread}"


class OnCpu(NamedTuple):
    """What the engine says on a CPU, computed once, and the model that judges where others differ."""

    folder: Path
    prompts: list[list[int]]
    params: SamplingParams
    token_ids: list[list[int]]
    model: torch.nn.Module


@pytest.fixture(scope="module")
def on_cpu(random_checkpoint: Callable[..., Path]) -> OnCpu:
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (1, 5, 16, 100, 255, 256, 257, 511)]
    prompts = prompts + [prompts[-1] + [3, 4], prompts[-2]] + [[i, i + 1] * 20 for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, device="cpu") as llm:
        token_ids = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    return OnCpu(folder, prompts, params, token_ids, reference_model(folder))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 100}, {"max_num_seqs": 13}, {"overlap": False}],
    ids=str,
)
def test_greedy_tokens_differ_from_the_cpu_only_at_near_ties(on_cpu: OnCpu, backend: str, options: dict) -> None:
    skip_without(backend)
    folder, prompts, params, expected, model = on_cpu
    with LLM(folder, dtype="bfloat16", attention_backend=backend, **options) as llm:
        actual = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, mine, theirs in zip(prompts, actual, expected, strict=True):
        assert_differ_at_a_near_tie(model, prompt, mine, theirs)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", {"attention_bias": True, "num_attention_heads": 8, "num_key_value_heads": 1}),
        ("float16", {"num_attention_heads": 20, "num_key_value_heads": 1}),
    ],
)
def test_other_dtypes_and_shapes_say_the_same_as_the_cpu(
    random_checkpoint: Callable[..., Path], dtype: str, sizes: dict
) -> None:
    folder = random_checkpoint(head_dim=128, **sizes)
    prompts = [[i, i + 1, i + 2] * (1 + 11 * i) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    on_cpu, on_gpu = (tokens(folder, prompts, params, **options) for options in ({"device": "cpu"}, {"dtype": dtype}))
    assert num_equal(on_cpu, on_gpu) >= 9, "16 bits turn a near tie now and then"


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption_changes_no_answer_of_the_tiny_checkpoint(backend: str) -> None:
    skip_without(backend)
    examples = held_out_examples("primes", 64, seed=3)
    options = {"num_kvcache_blocks": 10, "max_model_len": 512, "max_num_batched_tokens": 300}
    with LLM(tiny_model_path(), attention_backend=backend, **options) as llm:
        llm.engine.scheduler.reserved_tokens = 0
        prompts = [[1] * 200 + llm.tokenizer(p)["input_ids"] for p in chat_prompts(llm, [e.question for e in examples])]
        tight = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
    with LLM(tiny_model_path(), attention_backend=backend, max_model_len=512) as llm:
        roomy = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions == 0
    same = sum(one.token_ids == two.token_ids for one, two in zip(tight, roomy, strict=True))
    assert same >= 60, f"{same} of 64 requests agree"


def test_the_engine_runs_without_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hide_flash_attn(name: str) -> ImportError | None:
        return ImportError("it is hidden by this test") if name.endswith("flash_attn") else import_error(name)

    monkeypatch.setattr(backend_selection, "import_error", hide_flash_attn)
    with LLM(tiny_model_path()) as llm:
        assert llm.engine.runner is not None
        assert llm.engine.runner.setup.backends.name == "triton"
        assert_answers_right(llm)


def assert_part_at_near_ties(one: RequestOutput, other: RequestOutput, near_tie: float = 0.1) -> bool:
    """Return whether two greedy answers are equal; where they first differ, the one's tokens must be nearly as likely.

    So it is between batches of different sizes, whose products add up in other orders. `one` has logprobs=5, or more.
    near_tie: by how much less the log-probability of the other's token may be.
    """
    its_logprobs = one.outputs[0].logprobs or []
    for mine, theirs, logprobs in zip(one.token_ids, other.token_ids, its_logprobs, strict=True):
        if mine != theirs:
            assert logprobs[mine].logprob - logprobs[theirs].logprob < near_tie
            return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_whose_logits_are_nan_harms_no_other(
    random_checkpoint: Callable[..., Path], tmp_path: Path, backend: str
) -> None:
    skip_without(backend)
    shutil.copytree(random_checkpoint(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    good, bad = [[11] * 20, [12] * 300, [13] * 3], [[7] * 20, [12] * 280 + [7]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    options = {"dtype": "bfloat16", "attention_backend": backend, "num_kvcache_blocks": 24, "max_model_len": 1024}
    with LLM(tmp_path, **options) as llm:
        expected = llm.generate(good, params, use_tqdm=False)
        for _ in range(3):
            outputs = llm.generate([bad[0], *good, bad[1]], params, use_tqdm=False)
            assert [output.finish_reason for output in outputs] == ["error", *["length"] * 3, "error"]
            assert outputs[0].token_ids == outputs[4].token_ids == []
            for one, other in zip(expected, outputs[1:4], strict=True):
                assert_part_at_near_ties(one, other)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_graphs_and_eager_give_the_same_sampled_tokens(random_checkpoint: Callable[..., Path], backend: str) -> None:
    skip_without(backend)
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    params = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True)
    prompts = [[i, i + 1, i + 2] for i in range(16)]  # as many as a graph has rows: products of the same shape
    options = {"dtype": "bfloat16", "attention_backend": backend}
    with_graphs, eager = (tokens(folder, prompts, params, enforce_eager=eager, **options) for eager in (False, True))
    agreement = num_equal(with_graphs, eager)
    assert agreement >= 14, f"{agreement} of 16 requests agree"


def test_twenty_repetitions_of_a_greedy_workload_give_the_same_tokens(random_checkpoint: Callable[..., Path]) -> None:
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 512, (1 + 37 * n % 400,), generator=generator).tolist() for n in range(96)]
    params = [SamplingParams(temperature=0, max_tokens=20 + n % 60, ignore_eos=True) for n in range(96)]
    with LLM(folder, dtype="bfloat16", max_num_seqs=64, max_model_len=1024) as llm:
        results = []
        for _ in range(20):
            llm.reset_prefix_cache()
            results.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert all(result == results[0] for result in results)


def test_a_seeded_request_gets_the_same_tokens_with_and_without_overlap(random_checkpoint: Callable[..., Path]) -> None:
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True)
    prompts, options = [[i, i + 1, i + 2] for i in range(40)], {"dtype": "bfloat16", "seed": 3, "max_model_len": 1024}
    one, two = (tokens(folder, prompts, params, overlap=overlap, **options) for overlap in (True, False))
    assert one == two


FREE = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
KINDS = [
    FREE,
    replace(FREE, top_k=20, top_p=0.95, temperature=0.6),
    replace(FREE, top_p=0.9, seed=3),
    replace(FREE, min_p=0.1, logprobs=2),
    replace(FREE, temperature=0, repetition_penalty=1.3),
    replace(FREE, presence_penalty=1.0, frequency_penalty=0.5, top_k=50),
    replace(FREE, temperature=0, logprobs=3, prompt_logprobs=1),
    replace(FREE, ignore_eos=False, stop_token_ids=list(range(0, 512, 2)), min_tokens=6),
]


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_mixed_sampling_settings_give_the_same_with_graphs_and_without(
    random_checkpoint: Callable[..., Path], backend: str
) -> None:
    skip_without(backend)
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    prompts = [[i, i + 1, i + 2] for i in range(16)]  # as many as a graph has rows: products of the same shape
    with_graphs, eager, one_by_one = (
        tokens(folder, prompts, KINDS * 2, dtype="bfloat16", attention_backend=backend, **options)
        for options in ({}, {"enforce_eager": True}, {"overlap": False})
    )
    assert with_graphs == one_by_one, "overlap changes nothing"
    agreement = num_equal(with_graphs, eager)
    assert agreement >= 14, f"{agreement} of 16 requests agree"
    for token_ids in one_by_one[7::8]:
        assert all(token_id % 2 for token_id in token_ids[:6])


def test_filters_alone_and_beside_plain_rows_are_the_same(random_checkpoint: Callable[..., Path]) -> None:
    """Rows whose logits need no copy: all of a batch, or some of it, in float16 logits of a large vocabulary."""
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128, vocab_size=151936)
    filtered, free = replace(FREE, top_k=20, top_p=0.95, seed=1), replace(FREE, seed=1)
    prompts = [[i, i + 1, i + 2] for i in range(32)]
    with LLM(folder, dtype="float16", max_model_len=1024) as llm:
        alone, mixed, plain = (
            [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            for params in (filtered, [filtered, free] * 16, free)
        )
    same = num_equal(mixed[::2], alone[::2]) + num_equal(mixed[1::2], plain[1::2])
    assert same >= 30, f"{same} of 32 agree"
    assert num_equal(alone, plain) < 16


def test_logprobs_are_those_of_the_cpu(random_checkpoint: Callable[..., Path]) -> None:
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    params = replace(FREE, logprobs=3, prompt_logprobs=2, top_k=20, max_tokens=12)
    prompts = [[i + 1, i + 2] * n for i, n in enumerate((1, 40, 130, 300))]
    with LLM(folder, dtype="bfloat16", max_num_batched_tokens=256) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        scores = llm.score(prompts, [output.token_ids for output in outputs], use_tqdm=False)
    model = reference_model(folder)
    for output, score in zip(outputs, scores, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids + output.token_ids], device="cuda")).logits[0, :-1]
        expected = logits.float().log_softmax(dim=1).cpu()
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        assert len(entries) == len(expected)
        errors = torch.tensor(
            [
                entry.logprob - row[token_id]
                for found, row in zip(entries, expected, strict=True)
                for token_id, entry in found.items()
            ]
        )
        assert errors.abs().max() < NEAR_TIE * logits.std().item()
        mine = [
            entry[token_id].logprob
            for entry, token_id in zip(output.outputs[0].logprobs, output.token_ids, strict=True)
        ]
        assert score.logprobs == pytest.approx(mine, abs=NEAR_TIE * logits.std().item())


def test_four_samples_share_the_blocks_of_their_prompt(random_checkpoint: Callable[..., Path]) -> None:
    with LLM(random_checkpoint(), dtype="bfloat16", max_model_len=2048) as llm:
        llm.add_request([5, 6, 7, 8] * 250, replace(FREE, n=4))
        for _ in range(4):
            llm.step()
        assert llm.get_metrics().num_used_blocks == 3 + 4
        while not llm.is_finished():
            outputs = llm.step()
    assert len({tuple(completion.token_ids) for completion in outputs[0].outputs}) == 4


class Answers(NamedTuple):
    """What requests with common prefixes got, and how often decode attention read a prefix for several rows."""

    token_ids: list[list[int]]  # of each prompt, the samples one after another
    num_passes: int  # launched, not replayed
    num_sharing_graphs: int


def answers_of_families(
    folder: Path,
    prompts: list[list[int]],
    params: list[SamplingParams],
    max_prefix_sharers: int | None,
    **options: object,
) -> Answers:
    """max_prefix_sharers: 0 to have each row read its prefix for itself; None for what the kernels can."""
    from nanoinfer.layers.attention import triton

    num_passes = 0

    def count(*args: object) -> object:
        nonlocal num_passes
        num_passes += 1
        return shared_prefix_attention(*args)

    shared_prefix_attention = triton.shared_prefix_attention
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(folder, dtype="bfloat16", attention_backend="triton", max_model_len=2048, **options) as llm,
    ):
        patch.setattr(triton, "shared_prefix_attention", count)
        llm.generate(prompts, replace(GREEDY, max_tokens=1), use_tqdm=False)  # from here on, prefixes are cached
        grouper = llm.engine.scheduler.sharer_finder
        assert grouper.max_prefix_sharers == 64 // 4
        grouper.min_saved_tokens = 0
        if max_prefix_sharers is not None:
            grouper.max_prefix_sharers = max_prefix_sharers
        outputs = llm.generate(prompts, params, use_tqdm=False)
        graphs = llm.engine.runner.model_runner.state.decode_graphs
        num_graphs = sum(key.shares_prefixes for key in graphs._graphs) if graphs else 0
    completions = [completion for output in outputs for completion in output.outputs]
    return Answers([completion.token_ids for completion in completions], num_passes, num_graphs)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("block_size", [16, 256])
def test_greedy_tokens_of_rows_that_share_prefixes_differ_from_each_alone_only_at_near_ties(
    random_checkpoint: Callable[..., Path], block_size: int, enforce_eager: bool
) -> None:
    """Families of 20, 5 and 1 prompts with common prefixes of 800, 530 and 300 tokens, some with several samples.

    They end at different times, so that groups shrink, are dissolved and are made anew.
    """
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for num_prompts, length in ((20, 800), (5, 530), (1, 300)):
        prefix = torch.randint(0, 512, (length,), generator=generator).tolist()
        tails = [torch.randint(0, 512, (1 + 13 * i,), generator=generator).tolist() for i in range(num_prompts)]
        prompts += [prefix + tail for tail in tails]
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    samples = replace(greedy, temperature=1e-3, n=4)  # as good as greedy
    params = [replace(greedy if i % 4 else samples, max_tokens=8 + 5 * i % 60) for i in range(len(prompts))]
    options = {"enforce_eager": enforce_eager, "kvcache_block_size": block_size}
    shared, alone = (answers_of_families(folder, prompts, params, rows, **options) for rows in (None, 0))
    assert shared.num_passes > 0
    assert (shared.num_sharing_graphs > 0) == (not enforce_eager)
    assert (alone.num_passes, alone.num_sharing_graphs) == (0, 0)
    model = reference_model(folder)
    sampled = [prompt for prompt, asked in zip(prompts, params, strict=True) for _ in range(asked.n)]
    for prompt, mine, theirs in zip(sampled, shared.token_ids, alone.token_ids, strict=True):
        assert_differ_at_a_near_tie(model, prompt, mine, theirs)
    agreement = num_equal(shared.token_ids, alone.token_ids)
    assert agreement >= 0.5 * len(sampled), f"{agreement} of {len(sampled)} agree"


def test_equal_runs_that_share_prefixes_give_equal_tokens(random_checkpoint: Callable[..., Path]) -> None:
    folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    prompts = [[5, 6, 7, 8] * 200 + [i] * (1 + i) for i in range(12)]
    params = [replace(FREE, n=1 + i % 3, seed=i, max_tokens=10 + 3 * i) for i in range(12)]
    one, two = (answers_of_families(folder, prompts, params, None) for _ in range(2))
    assert one.num_passes > 0
    assert one.token_ids == two.token_ids


# Whole blocks of inputs, which the kernels that read 4 bits want.
IN_BLOCKS = {
    **{"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
}


def run_all_small_prefills(llm: LLM) -> list[list[RequestOutput]]:
    """Three times the same steps: as many tokens as each CUDA graph of small prefill steps has, and one less.

    Each size is captured in the second run.
    """
    assert llm.engine.runner is not None
    small = llm.engine.runner.model_runner.state.buffers.prefill_graphs.small
    assert small is not None
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    runs: list[list[RequestOutput]] = []
    for _ in range(3):
        runs.append([])
        for num_tokens in (size - less for size in small.sizes for less in (0, 1)):
            ids = ([7, 5, 3, 2, 9, 4] * 400)[:num_tokens]
            prompts = [ids[start : start + 100] for start in range(0, num_tokens, 100)]
            runs[-1] += llm.generate(prompts, params, use_tqdm=False)
    assert sorted(small._graphs) == small.sizes
    return runs


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"attention_backend": "flash_attn"}),
        ("Qwen3ForCausalLM", {"quantization": "fp8", "kv_cache_dtype": "int8"}),
        ("Gemma2ForCausalLM", {}),
        ("Gemma3ForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"quantization": "fp8"}),
        ("GptOssForCausalLM", {}),
        ("Glm4MoeForCausalLM", {}),
        ("Qwen3_5ForCausalLM", {}),
        ("Qwen3_5MoeForCausalLM", {}),
        ("Qwen3NextForCausalLM", {}),
        ("Qwen3ForCausalLM", {"quantization": "int4"}),
        ("Qwen3MoeForCausalLM", {"quantization": "int4"}),
    ],
)
def test_small_prefill_steps_are_the_same_in_graphs_and_without(
    random_checkpoint: Callable[..., Path],
    checkpoint: Callable[..., Path],  # noqa: F811
    architecture: str,
    options: dict,
) -> None:
    skip_without(options.get("attention_backend", "auto"))
    if options.get("quantization") == "int4":
        if not has_hopper_kernels(torch.device("cuda")):
            pytest.skip("elsewhere such weights are widened for more than a few tokens")
        folder = checkpoint(architecture, 0, **IN_BLOCKS)
    elif architecture == "Qwen3ForCausalLM":
        folder = random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    else:
        folder = checkpoint(architecture, 0)
    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "num_kvcache_blocks": 60, **options}
    with LLM(folder, **options) as llm:
        first, captured, replayed = run_all_small_prefills(llm)
        has_experts = llm.engine.runner.model_runner.model.model.has_experts
    for one, two, three in zip(first, captured, replayed, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        assert one.prompt_logprobs == two.prompt_logprobs == three.prompt_logprobs
    with LLM(folder, enforce_eager=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([output.prompt_token_ids for output in first], params, use_tqdm=False)
    apart = [
        abs(mine[token].logprob - other[token].logprob)
        for one, plain in zip(first, outputs, strict=True)
        for token, mine, other in zip(
            one.prompt_token_ids[1:], one.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True
        )
    ]
    assert max(apart) < NEAR_TIE or has_experts  # of which a token may go to another, in a near tie
    assert sum(apart) / len(apart) < NEAR_TIE / 10


def test_a_new_thread_captures_graphs_whose_kernels_others_have_run(random_checkpoint: Callable[..., Path]) -> None:
    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "num_kvcache_blocks": 20}
    prompts, params = [[7, 5, 3] * 20], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(random_checkpoint(), **options) as llm, ThreadPoolExecutor(1) as thread:
        outputs = [llm.generate(prompts, params, use_tqdm=False)[0] for _ in range(STEPS_BEFORE_CAPTURE)]
        outputs += thread.submit(llm.generate, prompts, params, use_tqdm=False).result()
        assert llm.engine.runner is not None
        assert 64 in llm.engine.runner.model_runner.state.buffers.prefill_graphs.small._graphs
        llm.sleep()
        with ThreadPoolExecutor(1) as another:
            another.submit(llm.wake_up).result()
        outputs += llm.generate(prompts, params, use_tqdm=False)
    assert all(output.token_ids == outputs[0].token_ids for output in outputs)


def test_steps_whose_capture_fails_go_on_without_and_so_do_others(
    random_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "num_kvcache_blocks": 20}
    prompts, params = [[7, 5, 3] * 20], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    plain_pieces = prefill_graphs.plain_pieces

    def fail_in_the_middle(*arguments: Any) -> Iterator[None]:
        for index, _ in enumerate(plain_pieces(*arguments)):
            if torch.cuda.is_current_stream_capturing() and index == 1:
                raise RuntimeError("the test says so")
            yield

    with LLM(random_checkpoint(), **options) as llm:
        monkeypatch.setattr(prefill_graphs, "plain_pieces", fail_in_the_middle)
        stream = torch.cuda.current_stream()
        outputs = [llm.generate(prompts, params, use_tqdm=False)[0] for _ in range(STEPS_BEFORE_CAPTURE + 3)]
        assert torch.cuda.current_stream() == stream
    assert all(output.token_ids == outputs[0].token_ids for output in outputs)
    assert "go on without CUDA graphs" in caplog.text


def test_the_cache_takes_what_the_user_grants(random_checkpoint: Callable[..., Path]) -> None:
    free, total = torch.cuda.mem_get_info()
    # A vocabulary as large as Qwen3's: logits are the largest thing that a step makes.
    folder = random_checkpoint(vocab_size=151936)
    with LLM(folder, dtype="bfloat16", gpu_memory_utilization=0.5, max_num_seqs=512) as llm:
        assert llm.engine.runner is not None
        used = total - torch.cuda.mem_get_info()[0]
        assert 0.45 * total < used < 0.51 * total
        assert llm.engine.runner.model_runner.state.kv_cache.num_bytes > 0.4 * total
        run_all_small_prefills(llm)
        assert total - torch.cuda.mem_get_info()[0] < 0.51 * total
    assert torch.cuda.mem_get_info()[0] > free - 2**30  # close gives it back


def test_recurrent_states_as_large_as_the_cache_find_room(tmp_path: Path) -> None:
    """A sequence has 72 MiB of them, so fewer rows than were asked for get any, and together half of the memory."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, load_format="dummy", dtype="bfloat16", max_num_seqs=2048) as llm:
        states = llm.engine.runner.model_runner.state.tables.recurrent_states
        assert states.num_bytes > 0.4 * torch.cuda.mem_get_info()[1] * 0.9
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_a_construction_that_fails_gives_the_gpus_memory_back(
    random_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanoinfer.runner import device_runner

    def fail(*_: object) -> None:
        raise RuntimeError("the test says so")

    with LLM(random_checkpoint(), dtype="bfloat16", num_kvcache_blocks=8) as llm:  # what PyTorch keeps for good
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with monkeypatch.context() as patch:
        patch.setattr(device_runner, "DecodeGraphs", fail)  # the last thing made: the cache is there by then
        for _ in range(3):
            with pytest.raises(RuntimeError, match="the test says so"):
                LLM(random_checkpoint(), dtype="bfloat16", gpu_memory_utilization=0.5)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    with LLM(random_checkpoint(), dtype="bfloat16", gpu_memory_utilization=0.5) as llm:
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].token_ids


def test_too_little_memory_for_a_block_is_an_error_with_the_figures(random_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="left for the KV cache, and blocks of 256 tokens take"):
        LLM(random_checkpoint(), dtype="bfloat16", gpu_memory_utilization=1e-5)
