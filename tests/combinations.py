"""Random combinations of model, options and load, and what must hold for each of them, on any device.

A seed decides everything, so that a failure can be repeated. The same seed draws the same combination on a CPU and on a
GPU, but for the sizes of the model and the lengths of the prompts, which are small on a CPU.
"""

import random
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.ops.fp8.spec import dequantize_weight, fit_weight
from nanoinfer.ops.int4 import spec as int4
from nanoinfer.quantization import method_selection
from tests.models.test_architectures import ARCHITECTURES, LATENT, SMALL_WEIGHTS, draw_options, save_random_model
from tests.proposers import KnownTexts, engine_of


class Sizes(NamedTuple):
    """What models and loads may be like on a device. Lists of one field have the same length for every device."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    hidden_sizes: tuple[int, ...]
    mlp_sizes: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    windows: tuple[int, ...]
    max_heads_size: int  # all heads of a layer together
    max_positions: int
    max_step_tokens: tuple[int, ...]
    max_lens: tuple[int | None, ...]
    num_prompts: tuple[int, ...]
    max_load: int  # tokens of all prompts together


SIZES = {
    "cpu": Sizes(
        dtypes=("float32", "float32", "bfloat16"),
        head_dims=(8, 16, 24, 32, 40, 48, 64, 72),
        hidden_sizes=(32, 48, 64, 96, 160),
        mlp_sizes=(32, 48, 80),
        vocab_sizes=(64, 301, 256),
        windows=(1, 7, 16, 50, 100),
        max_heads_size=256,
        max_positions=400,
        max_step_tokens=(1, 7, 48, 100, 500, 16384),
        max_lens=(16, 33, 100, 256, None),
        num_prompts=(1, 2, 5, 12, 30),
        max_load=1500,
    ),
    "cuda": Sizes(
        dtypes=("bfloat16", "bfloat16", "float16"),
        head_dims=(64, 72, 80, 96, 128, 160, 192, 256),
        hidden_sizes=(64, 192, 512, 1024, 2304),
        mlp_sizes=(64, 320, 1408),
        vocab_sizes=(256, 1000, 5003),
        windows=(1, 7, 100, 300, 1500),
        max_heads_size=2304,
        max_positions=8192,
        max_step_tokens=(1, 7, 100, 500, 2048, 16384),
        max_lens=(32, 100, 512, 4096, None),
        num_prompts=(1, 2, 5, 17, 80),
        max_load=40_000,
    ),
}
NUM_JUDGED = 8  # sequences of a combination that transformers computes, too
EDITS: tuple[dict[str, Any], ...] = (  # what changes which tokens are drawn, and not how likely the model finds them
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01, "seed": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": {1: 5.0, 7: -100.0}, "min_tokens": 3, "stop_token_ids": [1, 2, 3]},
    {"temperature": 1.0, "allowed_token_ids": [3, 5, 8, 13, 21]},
)


@dataclass(frozen=True)
class Combination:
    """A model, the options of its engine, and what is asked of it."""

    seed: int
    device: str
    architecture: str
    model: dict[str, Any]  # options of transformers' config
    options: dict[str, Any]  # of LLM
    prompts: list[list[int]] = field(repr=False)
    params: list[SamplingParams] = field(repr=False)
    max_row_tokens: int  # of a decode step: those after the newest one are what the same requests got before
    speculative_config: dict[str, Any] | None  # of LLM; where it has one, max_row_tokens is 1

    @property
    def in_8_bits(self) -> bool:
        return self.options["quantization"] is not None or self.options["kv_cache_dtype"] != "auto"


def draw(seed: int, device: str) -> Combination:
    """Draw the combination of a seed. device: "cpu" or "cuda"."""
    rng, sizes = random.Random(seed), SIZES[device]
    architecture = rng.choice(ARCHITECTURES)
    model = _draw_model(rng, sizes, architecture, seed)
    options = _draw_engine(rng, sizes, model)
    if architecture == "GptOssForCausalLM":  # whose experts are not rounded
        options["quantization"] = None
    if architecture in LATENT:  # whose vectors have 16 bits
        options["kv_cache_dtype"] = "auto"
    limit = min(options["max_model_len"] or model["max_position_embeddings"], 1000 if device == "cpu" else 3500)
    prompts = _draw_prompts(rng, sizes, model["vocab_size"], limit, options)
    params = [_draw_params(rng, limit - len(prompt)) for prompt in prompts]
    max_row_tokens = random.Random(f"{seed} proposals").choice((1, 1, 2, 3, 5, 8))
    speculative_config = _draw_speculation(random.Random(f"{seed} speculation")) if max_row_tokens == 1 else None
    return Combination(seed, device, architecture, model, options, prompts, params, max_row_tokens, speculative_config)


def _draw_model(rng: random.Random, sizes: Sizes, architecture: str, seed: int) -> dict[str, Any]:
    group, num_kv_heads = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 16, 33)), rng.choice((1, 2, 3, 4, 8))
    head_dim, hidden_size = rng.choice(sizes.head_dims), rng.choice(sizes.hidden_sizes)
    mlp_size, vocab_size, window = (rng.choice(x) for x in (sizes.mlp_sizes, sizes.vocab_sizes, sizes.windows))
    num_kv_heads = max(1, min(num_kv_heads, sizes.max_heads_size // (group * head_dim)))
    model = draw_options(architecture, seed)
    model |= {"num_attention_heads": group * num_kv_heads, "num_key_value_heads": num_kv_heads}
    model |= {"intermediate_size": mlp_size, "vocab_size": vocab_size, "max_position_embeddings": sizes.max_positions}
    if architecture in ("Qwen2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"):  # heads make up the hidden size
        hidden_size = group * num_kv_heads * head_dim
    else:
        unit = 16 * group * num_kv_heads  # transformers wants a multiple of the heads
        hidden_size, model["head_dim"] = max(1, hidden_size // unit) * unit, head_dim
    if "global_head_dim" in model:
        model["global_head_dim"] = 2 * head_dim
    if "vocab_size_per_layer_input" in model:
        model["vocab_size_per_layer_input"] = vocab_size
    if architecture in LATENT:
        del model["head_dim"]  # which is another name of qk_rope_head_dim
        model["num_key_value_heads"] = model["num_attention_heads"]
    if model.get("sliding_window") not in (None, 4096):  # 4096: off
        model["sliding_window"] = window
    if "moe_intermediate_size" in model:
        model["moe_intermediate_size"] = mlp_size
    ropes = model.get("rope_parameters") or {}
    for rope in (ropes, ropes.get("full_attention") or {}):
        if rope.get("rope_type") == "yarn":  # whose context is the product of these two
            rope["factor"] = sizes.max_positions / rope["original_max_position_embeddings"]
    # Logits of about the same size for every hidden size; Gemma's embeddings are scaled and tied.
    spread = 0.4 if architecture.startswith("Gemma") else 1.5
    return {**model, "hidden_size": hidden_size, "initializer_range": spread / hidden_size**0.5}


def _draw_engine(rng: random.Random, sizes: Sizes, model: dict[str, Any]) -> dict[str, Any]:
    block_size, max_len = rng.choice((16, 16, 32, 48, 64, 128, 256, 256, 512)), rng.choice(sizes.max_lens)
    longest = max_len or model["max_position_embeddings"]
    # Room for the longest sequence and no other, for a few, or for many: small pools preempt.
    num_blocks = -(-longest // block_size) + rng.choice((0, 1, 3, 20, 200))
    return {
        "dtype": rng.choice(sizes.dtypes),
        "quantization": rng.choice((None, None, "fp8", "int4")),
        "kv_cache_dtype": rng.choice(("auto", "auto", "int8", "fp8")),
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": num_blocks,
        "max_model_len": max_len,
        "max_num_seqs": rng.choice((1, 2, 3, 4, 8, 13, 33, 100, 512)),
        "max_num_batched_tokens": rng.choice(sizes.max_step_tokens),
        "enforce_eager": rng.random() < 0.4,
        "overlap": rng.random() < 0.7,
        "enable_prefix_caching": rng.random() < 0.7,
        "attention_backend": rng.choice(("auto", "auto", "auto", "auto", "torch")),
    }


def _draw_speculation(rng: random.Random) -> dict[str, Any] | None:
    """Options that propose something nearly everywhere."""
    config = {"num_speculative_tokens": rng.choice((1, 2, 4, 7, 8, 24))}
    ngram = {"method": "ngram", "prompt_lookup_min": rng.choice((1, 2)), **config}
    suffix = {"method": "suffix", "suffix_decoding_max_tree_depth": rng.choice((2, 24)), **config}
    return rng.choice((None, ngram, suffix))


def _draw_prompts(
    rng: random.Random, sizes: Sizes, vocab_size: int, limit: int, options: dict[str, Any]
) -> list[list[int]]:
    """Prompts of all lengths, and of those around the edges of blocks; some begin alike, or are equal."""
    step_tokens, block_size = options["max_num_batched_tokens"], options["kvcache_block_size"]
    longest = max(1, min(limit - 2, 30 * step_tokens))  # of chunks of one token a long prompt would have too many

    def token_ids(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    def length() -> int:
        edge = block_size * rng.choice((1, 1, 2, 4)) + rng.choice((-1, 0, 1))
        return max(1, min(longest, rng.choice((1, 2, edge, edge, rng.randint(1, longest), rng.randint(1, longest)))))

    count, family = rng.choice(sizes.num_prompts), token_ids(length())
    share = rng.choice((0.0, 0.5, 0.9))  # of prompts that begin as the family does
    prompts: list[list[int]] = []
    while len(prompts) < count and sum(map(len, prompts)) < sizes.max_load:
        if rng.random() < share:
            prompts.append((family + token_ids(rng.randint(0, 20)))[:longest])
        else:
            prompts.append(rng.choice(prompts) if prompts and rng.random() < 0.1 else token_ids(length()))
    return prompts


def _draw_params(rng: random.Random, room: int) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 0.0, **rng.choice(EDITS)}
    max_tokens = min(room, rng.choice((1, 2, 5, 17, 30)))
    options["prompt_logprobs"] = rng.choice((None, None, None, 0))
    options["n"] = rng.choice((1, 2, 3)) if options["temperature"] > 0 else 1
    options["min_tokens"] = min(max_tokens, options.get("min_tokens", 0))
    return SamplingParams(**options, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False)


class Sequence(NamedTuple):
    """A completion with at least one token, and how likely the engine found them when it made them."""

    prompt: list[int]
    completion: list[int]
    logprobs: Tensor


def check(combination: Combination, folder: Path) -> str:
    """Run a combination in an empty folder, and assert that its answers are right; return a line about its errors."""
    save_random_model(folder, combination.architecture, combination.model, combination.seed)
    several: Any = nullcontext()
    if combination.max_row_tokens > 1:
        several = patch.object(EngineConfig, "max_row_tokens", combination.max_row_tokens)
    options = {"speculative_config": combination.speculative_config, **combination.options}
    with _context_lengths(combination), several, LLM(folder, device=combination.device, **options) as llm:
        if combination.seed % 2 == 1:
            _make_hits_likely(llm)
        with patch("nanoinfer.speculation.controller.MIN_GAIN", 0.0):  # propose what can be, whatever steps cost
            outputs = llm.generate(combination.prompts, combination.params, use_tqdm=False)
            if combination.speculative_config:  # "suffix" knows greedy answers now
                outputs = llm.generate(combination.prompts, combination.params, use_tqdm=False)
        if combination.max_row_tokens > 1:  # other seeds, or rounding, may change answers: then proposals are wrong
            vocab_size, first_id = combination.model["vocab_size"], len(outputs)
            known = KnownTexts(outputs, vocab_size, combination.seed, first_id=first_id, may_differ=True)
            engine_of(llm).proposer = known
            outputs = llm.generate(combination.prompts, combination.params, use_tqdm=False)
            engine_of(llm).proposer = None
        sequences = _sequences(combination, outputs, llm.max_model_len)
        by_prefill = _scores(llm, sequences)
        assert llm.is_finished()
        num_accepted = llm.get_metrics().num_accepted_tokens
        assert llm.get_metrics().num_used_blocks == 0, "blocks are in use when all requests have finished"
    result = _judge(combination, folder, sequences, by_prefill)
    return f"{result}, {num_accepted} proposals accepted" if num_accepted else result


def _make_hits_likely(llm: LLM) -> None:
    """Have prompts wait for each other, and states of hybrids kept, however little that spares."""
    scheduler = llm.engine.scheduler
    scheduler.min_awaited_tokens = scheduler.min_awaited_in_all = 1
    if states := scheduler.block_manager.state_group:
        states.min_saved_tokens = states.min_kept_tokens = 1


def _context_lengths(combination: Combination) -> AbstractContextManager[object]:
    """Have prefill kernels for long contexts run in every other combination on a GPU: contexts are short here."""
    if combination.device == "cuda" and combination.seed % 2 == 1:
        return patch("nanoinfer.layers.attention.triton.LONG_CONTEXT", 0)
    return nullcontext()


def _sequences(combination: Combination, outputs: list[RequestOutput], max_model_len: int) -> list[Sequence]:
    """The completions of all outputs, each without what leaves no room for a token after it."""
    assert len(outputs) == len(combination.prompts)
    sequences = []
    for prompt, params, output in zip(combination.prompts, combination.params, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert len(output.outputs) == params.n
        for completion in output.outputs:
            ids, entries = completion.token_ids, completion.logprobs or []
            assert completion.finish_reason in ("length", "stop"), completion
            assert len(ids) == len(entries)
            if completion.finish_reason == "length":
                assert len(ids) == params.max_tokens
            else:
                assert ids[-1] in (params.stop_token_ids or ())
            assert len(ids) >= params.min_tokens
            kept = min(len(ids), max_model_len - 1 - len(prompt))
            logprobs = torch.tensor([entry[token_id].logprob for entry, token_id in zip(entries, ids, strict=True)])
            assert logprobs.isfinite().all()
            if kept > 0:
                sequences.append(Sequence(prompt, ids[:kept], logprobs[:kept]))
    return sequences


def _scores(llm: LLM, sequences: list[Sequence]) -> list[Tensor]:
    """How likely an engine finds the completions by prefill alone."""
    pairs = [sequence.prompt for sequence in sequences], [sequence.completion for sequence in sequences]
    return [torch.tensor(score.logprobs) for score in llm.score(*pairs, use_tqdm=False)] if sequences else []


def _judge(combination: Combination, folder: Path, sequences: list[Sequence], by_prefill: list[Tensor]) -> str:
    """Hold log-probabilities of decode and of prefill against each other, and some of them against transformers'."""
    if not sequences:
        return "no room for completions"
    chosen = random.Random(combination.seed).sample(range(len(sequences)), min(NUM_JUDGED, len(sequences)))
    judged = [sequences[index] for index in chosen]
    whole = _transformers_logprobs(combination, folder, judged, torch.float32)
    exact = [logprobs[-len(sequence.completion) :] for logprobs, sequence in zip(whole, judged, strict=True)]
    allowed = _allowed_error(combination, folder, judged, whole, exact)
    by_decode = [sequence.logprobs for sequence in sequences]
    errors = [_mean_gap([side[index] for index in chosen], exact) for side in (by_decode, by_prefill)]
    apart = _mean_gap(by_decode, by_prefill)
    result = f"errors {errors[0]:.4f} and {errors[1]:.4f}, apart by {apart:.4f}, allowed {allowed:.4f}"
    assert max(errors) <= allowed, f"decode or prefill is too far from transformers: {result}"
    assert apart <= 2 * allowed, f"decode and prefill differ: {result}"
    for sequence, decode, prefill in zip(sequences, by_decode, by_prefill, strict=True):
        gap = _mean_gap([decode], [prefill])
        assert gap <= 20 * allowed, f"{gap:.4f} for one prompt of {len(sequence.prompt)} tokens: {result}"
    return result


def _allowed_error(
    combination: Combination, folder: Path, sequences: list[Sequence], whole: list[Tensor], exact: list[Tensor]
) -> float:
    """How far log-probabilities may be from the exact ones on average: 1.6 times what others lose by dtype and 8 bits.

    whole: the exact ones of all tokens after the first of each sequence; exact: those of the completions.
    """
    dtype: torch.dtype = getattr(torch, combination.options["dtype"])
    if dtype == torch.float32 and not combination.in_8_bits:
        return 2e-4
    expected = _mean_gap(_transformers_logprobs(combination, folder, sequences, dtype), whole)
    if combination.in_8_bits:
        expected += _error_of_8_bits(combination, folder, sequences, exact)
    has_experts = "num_experts_per_tok" in combination.model
    # Few tokens vary, and more so where rounding may choose another expert.
    few_tokens_vary = 1 + (6 if has_experts else 3) / sum(map(len, exact)) ** 0.5
    return 3e-3 + 1.6 * few_tokens_vary * expected


def _mean_gap(some: list[Tensor], others: list[Tensor]) -> float:
    return (torch.cat(some) - torch.cat(others)).abs().mean().item()


@torch.inference_mode()
def _transformers_logprobs(
    combination: Combination, folder: Path, sequences: list[Sequence], dtype: torch.dtype
) -> list[Tensor]:
    """How likely transformers finds all tokens after the first, with the weights rounded as the engine rounds them."""
    load, device = transformers.AutoModelForCausalLM.from_pretrained, combination.device
    model = load(folder, attn_implementation="eager", dtype=torch.float32)
    if (quantization := combination.options["quantization"]) is not None:
        for name, weight in model.model.layers.named_parameters():
            if weight.dim() > 1 and not any(part in name for part in SMALL_WEIGHTS):
                in_4_bits = quantization == "int4"
                weight.copy_(_in_4_bits(weight) if in_4_bits else dequantize_weight(*fit_weight(weight)))
    model = model.to(device=device, dtype=dtype).eval()
    found = []
    for prompt, completion, _ in sequences:
        ids = torch.tensor([prompt + completion], device=device)
        logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return found


def _in_4_bits(weight: Tensor) -> Tensor:
    return int4.dequantize(int4.quantize(weight, gcd(weight.shape[-1], int4.GROUP_SIZE)))


def _error_of_8_bits(combination: Combination, folder: Path, sequences: list[Sequence], exact: list[Tensor]) -> float:
    """What 8 bits cost, by the specifications, which compute in float32 on a CPU."""
    eight_bits = {name: combination.options[name] for name in ("quantization", "kv_cache_dtype")}
    room = {"max_model_len": 1 + max(len(sequence.prompt + sequence.completion) for sequence in sequences)}
    on_gpu = combination.device == "cuda" and method_selection.has_fp8_products(torch.device("cuda"))
    rounds_inputs = patch.object(method_selection, "has_fp8_products", lambda device: on_gpu)
    with rounds_inputs, LLM(folder, device="cpu", dtype="float32", **eight_bits, **room) as llm:
        return _mean_gap(_scores(llm, sequences), exact)


def run_for(seconds: float, first_seed: int, device: str, tmp_path: Path, show: Callable[[str], None]) -> None:
    """Check one combination after another for so long, at least one; show each before it runs, and how it went."""
    deadline, seed = time.monotonic() + seconds, first_seed
    while seed == first_seed or time.monotonic() < deadline:
        combination = draw(seed, device)
        show(f"--combinations-seed {seed}: {combination}, {len(combination.prompts)} prompts")
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            show(f"    {check(combination, folder)}")
        except Exception as error:
            again = f"--combinations-seed {seed} --combinations-seconds 0"
            raise AssertionError(f"{combination} failed; repeat it with the test's name and {again}") from error
        shutil.rmtree(folder)
        seed += 1
