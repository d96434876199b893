"""Puts the engines that `nanoinfer bench` can time behind one interface. Each is imported when it is asked for."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.bench.workloads import Load, Model, Workload
from nanoinfer.cli import option_string
from nanoinfer.errors import ConfigError

# Options that change what is measured, with the value that each has if it is not given.
OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "top_k": 0,
    "top_p": 1.0,
    "enforce_eager": False,
    "attention_backend": "auto",
    "model_impl": "auto",
    "compile": False,
    "speculative_config": None,
}
OURS = ("data_parallel_size", "attention_backend", "model_impl", "compile")
# By engine, the options that it lacks.
LACKING: dict[str, tuple[str, ...]] = {
    "nanoinfer": (),
    "nanovllm": (*OURS, "top_k", "top_p", "quantization", "kv_cache_dtype", "speculative_config"),
    "vllm": OURS,
    "transformers": (*OURS, "quantization", "kv_cache_dtype", "tensor_parallel_size", "speculative_config"),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """Says what the benchmark asks of an engine; the defaults are for one that has no metrics, or nothing to reset."""

    # Returns how many tokens came out, in the order of `output_lens`; one that embeds returns the embeddings.
    generate: Callable[[Workload], Any]
    metrics: Callable[[], dict[str, float]] = dict  # running totals of prefill and decode work
    reset: Callable[[], object] = lambda: None  # forgets cached prefixes
    close: Callable[[], object] = lambda: None


def load_engine(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    """Start the engine that `args` ask for. Raises ConfigError where it is not installed."""
    try:
        return ENGINES[args.engine](model, options, args)
    except ImportError as error:
        raise ConfigError(f"--engine {args.engine} cannot be imported here ({error}); install it first") from error


def check_engine(args: argparse.Namespace, loads: list[tuple[str, Load]]) -> None:
    """Raise ConfigError for options, or loads, that the engine does not have."""
    for name in LACKING[args.engine]:
        if getattr(args, name) != OPTIONS[name]:
            raise ConfigError(f"--engine {args.engine} has no {option_string(name)}; leave it out")
    if args.engine == "vllm" and args.quantization in ("int4", "int8"):
        bits = args.quantization.removeprefix("int")
        raise ConfigError(
            f"--engine vllm rounds no weights to integers of {bits} bits; give it such a checkpoint by --model"
        )
    for name, load in loads if args.engine in ("nanovllm", "transformers") else ():
        if load.num_samples > 1:
            raise ConfigError(
                f"--engine {args.engine} draws one sample of a prompt, and the load {name} has {load.num_samples}; "
                "choose other loads, and leave --n out"
            )


def engine_options(model: Model, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an engine: those that all have, and others where they are given.

    Raises ConfigError for requests that the model cannot take.
    """
    longest, limit = load.longest, model.config.max_model_len
    if longest > limit:
        lengths = "--input-len and --output-len" if load.shared_prefix == 0 else "--shared-prefix and both lengths"
        raise ConfigError(f"{lengths} add up to {longest}, and {model.name} takes {limit}; ask for fewer tokens")
    names = *OURS, "kv_cache_dtype", "speculative_config"
    given = {name: value for name in names if (value := getattr(args, name)) != OPTIONS[name]}
    return {
        "max_model_len": min(max(4096, longest), limit),  # 4096 is what nano-vllm's benchmark sets
        "max_num_seqs": load.max_num_seqs,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enforce_eager": args.enforce_eager,
        **given,
    }


def make_params(kind: Any, workload: Workload, **options: Any) -> list[Any]:
    """Return one object of an engine's own class of sampling parameters for each request."""
    options |= {"prompt_logprobs": workload.prompt_logprobs} if workload.prompt_logprobs is not None else {}
    return [kind(temperature=0.6, ignore_eos=True, max_tokens=count, **options) for count in workload.max_tokens]


def complete(
    llm: Any, prompts: list[Any], workload: Workload, args: argparse.Namespace, kind: Any, constraint_kind: Any
) -> list[int]:
    """Have an engine with vLLM's interface generate, and return how many tokens each sample has.

    kind, constraint_kind: its classes of sampling parameters and of constraints. Raises RuntimeError where a sample
    ends in an error.
    """
    options: dict[str, Any] = {"n": workload.num_samples, "top_k": args.top_k, "top_p": args.top_p}
    options["detokenize"] = workload.detokenize
    params = make_params(kind, workload, **options)
    if workload.constraint:
        options["structured_outputs"] = constraint_kind(**workload.constraint)
        constrained = replace(workload, max_tokens=workload.max_tokens[: workload.num_constrained])
        params[: workload.num_constrained] = make_params(kind, constrained, **options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    if failed := [sample for sample in samples if sample.finish_reason == "error"]:
        raise RuntimeError(f"{len(failed)} of {len(samples)} samples failed; the first: {failed[0]}")
    return [len(sample.token_ids) for sample in samples]


def prompts_and_answers(workload: Workload) -> tuple[list[list[int]], list[list[int]]]:
    """Return each answer to be scored, and the prompt before it."""
    pairs = [(prompt, answer) for prompt, its in zip(workload.prompts, workload.answers, strict=True) for answer in its]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def load_nanoinfer(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    from nanoinfer import LLM, SamplingParams, StructuredOutputsParams

    llm = LLM(model.folder, **model.options, **options)

    def generate(workload: Workload) -> list[int]:
        if workload.answers:
            return [len(score.logprobs) for score in llm.score(*prompts_and_answers(workload), use_tqdm=False)]
        return complete(llm, [*workload.prompts], workload, args, SamplingParams, StructuredOutputsParams)

    def metrics() -> dict[str, float]:
        totals = asdict(llm.get_metrics())
        no_totals = "num_used_blocks", "num_blocks", "num_snapshots", "replicas", "num_accepted_tokens_per_pos"
        for name in no_totals:
            totals.pop(name, None)
        return totals

    return Engine(generate, metrics, llm.reset_prefix_cache, llm.close)


def load_nanovllm(model: Model, options: dict[str, Any], _args: argparse.Namespace) -> Engine:
    from nanovllm import LLM, SamplingParams

    llm = LLM(str(model.folder), **options)
    if model.random_weights:
        # It leaves weights that it finds no file for as the memory was, and products of zeros run faster.
        for parameter in llm.model_runner.model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, model.config.initializer_range)

    def generate(workload: Workload) -> list[int]:
        outputs = llm.generate(workload.prompts, make_params(SamplingParams, workload), use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]

    return Engine(generate)


def load_vllm(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    takes_text = "tokenizer" in args
    llm = LLM(model=str(model.folder), skip_tokenizer_init=not takes_text, **model.options, **options)

    def generate(workload: Workload) -> list[int]:
        if workload.answers:  # it has no call for that
            pairs = [*zip(*prompts_and_answers(workload), strict=True)]
            inputs = [{"prompt_token_ids": prompt + answer} for prompt, answer in pairs]
            llm.generate(inputs, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
            return [len(answer) for _, answer in pairs]
        if takes_text:
            return complete(llm, workload.prompts, workload, args, SamplingParams, StructuredOutputsParams)
        inputs = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        ids_alone = replace(workload, detokenize=False)
        return complete(llm, inputs, ids_alone, args, SamplingParams, StructuredOutputsParams)

    return Engine(generate, reset=llm.reset_prefix_cache)


def load_transformers(model: Model, _options: dict[str, Any], args: argparse.Namespace) -> Engine:
    """Use its own `generate` on left-padded batches of requests of like length: a batch runs until its longest ends."""
    import torch
    from transformers import AutoConfig, GenerationConfig, Qwen3ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if model.random_weights:
        with device:
            net = Qwen3ForCausalLM(AutoConfig.from_pretrained(model.folder))
    else:
        net = Qwen3ForCausalLM.from_pretrained(model.folder)
    net = net.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    net.generation_config.eos_token_id = None  # every row runs to the end

    def generate(workload: Workload) -> list[int]:
        requests = sorted(zip(workload.max_tokens, workload.prompts, strict=True), key=lambda request: request[0])
        for start in range(0, len(requests), 64):
            batch = requests[start : start + 64]
            steps, width = batch[-1][0], max(len(prompt) for _, prompt in batch)
            padded = torch.tensor([[0] * (width - len(prompt)) + prompt for _, prompt in batch], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in batch], device=device)
            sampling = {"do_sample": True, "temperature": 0.6, "top_k": args.top_k, "top_p": args.top_p}
            options = GenerationConfig(**sampling, max_new_tokens=steps, pad_token_id=0)
            output = net.generate(padded, attention_mask=mask, generation_config=options)
            assert output.shape[1] == width + steps, f"generate stopped at {output.shape[1] - width} of {steps} tokens"
        return workload.max_tokens  # what a row got beyond its own max_tokens is not counted

    return Engine(generate)


def load_sentence_transformers(folder: Path, device: str) -> Iterator[tuple[str, Engine]]:
    """Yield engines that embed, with what tells each apart: its attention and the size of its batches."""
    from sentence_transformers import SentenceTransformer

    for attention in ("sdpa", "flash_attention_2"):
        options = {"attn_implementation": attention, "dtype": "bfloat16" if device == "cuda" else "float32"}
        try:
            model = SentenceTransformer(str(folder), device=device, model_kwargs=options)
        except (ImportError, ValueError) as error:
            print(f"  sentence-transformers with {attention} is left out: {str(error).splitlines()[0]}")
            continue
        for size in (32, 128, 512):

            def embed(workload: Workload, model: Any = model, size: int = size) -> Any:
                return model.encode(workload.prompts, batch_size=size, normalize_embeddings=True)

            yield f"sentence-transformers ({attention}, batches of {size})", Engine(embed)


ENGINES = {"nanoinfer": load_nanoinfer, "nanovllm": load_nanovllm, "vllm": load_vllm, "transformers": load_transformers}
