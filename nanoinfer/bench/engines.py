"""The engines that `nanoinfer bench` can time, behind one small interface. Each is imported when it is asked for."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from nanoinfer.bench.workloads import Load, Model, Workload
from nanoinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Engine:
    """Says what the benchmark asks of an engine; the defaults are for one that has no metrics, or nothing to reset."""

    generate: Callable[[Workload], list[int]]  # returns how many tokens came out, in the order of `output_lens`
    metrics: Callable[[], dict[str, float]] = dict  # running totals of prefill and decode work
    reset: Callable[[], object] = lambda: None  # forgets cached prefixes
    close: Callable[[], object] = lambda: None


def load_engine(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    """Start the engine that `args` ask for. Raises ConfigError where it is not installed."""
    try:
        return ENGINES[args.engine](model, options, args)
    except ImportError as error:
        raise ConfigError(f"--engine {args.engine} cannot be imported here ({error}); install it first") from error


def own_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of a command that nanoinfer alone has; checkouts of other versions may lack some."""
    given = {name: getattr(args, name) for name in ("attention_backend", "model_impl", "compile")}
    return {name: value for name, value in given.items() if value not in ("auto", False)}


def check_engine(args: argparse.Namespace, loads: list[tuple[str, Load]]) -> None:
    """Raise ConfigError for options, or loads, that the engine does not have."""
    if args.engine != "nanoinfer" and (own := own_options(args)):
        option = "--" + next(iter(own)).replace("_", "-")
        raise ConfigError(f"{option} is an option of nanoinfer; leave it out for --engine {args.engine}")
    if args.engine == "nanovllm" and (args.top_k, args.top_p) != (0, 1):
        raise ConfigError("--engine nanovllm has no --top-k and --top-p; leave them out")
    if args.engine != "nanoinfer" and args.data_parallel_size > 1:
        raise ConfigError(f"--data-parallel-size is an option of nanoinfer; leave it out for --engine {args.engine}")
    if args.engine in ("nanovllm", "transformers") and args.quantization:
        raise ConfigError(f"--engine {args.engine} has no --quantization; leave it out")
    if args.engine == "vllm" and args.quantization == "int4":
        raise ConfigError("--engine vllm rounds no weights to 4 bits; give it a checkpoint in 4 bits by --model")
    if args.engine in ("nanovllm", "transformers") and args.kv_cache_dtype != "auto":
        raise ConfigError(f"--engine {args.engine} has no --kv-cache-dtype; leave it out")
    if args.engine == "transformers" and args.tensor_parallel_size > 1:
        raise ConfigError("--engine transformers runs on one GPU; leave --tensor-parallel-size out")
    for name, load in loads if args.engine in ("nanovllm", "transformers") else ():
        if load.num_samples > 1:
            raise ConfigError(
                f"--engine {args.engine} draws one sample of a prompt, and the load {name} has {load.num_samples}; "
                "choose other loads, and leave --n out"
            )


def engine_options(model: Model, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that all engines are given. Raises ConfigError for requests that the model cannot take."""
    longest, limit = load.longest, model.config.max_model_len
    if longest > limit:
        lengths = "--input-len and --output-len" if load.shared_prefix == 0 else "--shared-prefix and both lengths"
        raise ConfigError(f"{lengths} add up to {longest}, and {model.name} takes {limit}; ask for fewer tokens")
    cache = {} if args.kv_cache_dtype == "auto" else {"kv_cache_dtype": args.kv_cache_dtype}
    replicas = {"data_parallel_size": args.data_parallel_size} if args.data_parallel_size > 1 else {}
    return {
        "max_model_len": min(max(4096, longest), limit),  # 4096 is what nano-vllm's benchmark sets
        "max_num_seqs": load.max_num_seqs,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enforce_eager": args.enforce_eager,
        **cache,
        **replicas,
    }


def make_params(kind: Any, workload: Workload, **options: Any) -> list[Any]:
    """Return one object of an engine's own class of sampling parameters for each request."""
    options |= {"prompt_logprobs": workload.prompt_logprobs} if workload.prompt_logprobs is not None else {}
    return [kind(temperature=0.6, ignore_eos=True, max_tokens=count, **options) for count in workload.max_tokens]


def prompts_and_answers(workload: Workload) -> tuple[list[list[int]], list[list[int]]]:
    """Return each answer to be scored, and the prompt before it."""
    pairs = [(prompt, answer) for prompt, its in zip(workload.prompts, workload.answers, strict=True) for answer in its]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def load_nanoinfer(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    from nanoinfer import LLM, SamplingParams

    llm = LLM(model.folder, **model.options, **own_options(args), **options)

    def generate(workload: Workload) -> list[int]:
        if workload.answers:
            return [len(score.logprobs) for score in llm.score(*prompts_and_answers(workload), use_tqdm=False)]
        options = {"n": workload.num_samples, "top_k": args.top_k, "top_p": args.top_p}
        params = make_params(SamplingParams, workload, detokenize=workload.detokenize, **options)
        outputs = llm.generate([*workload.prompts], params, use_tqdm=False)
        return [len(sample.token_ids) for output in outputs for sample in output.outputs]

    def metrics() -> dict[str, float]:
        totals = asdict(llm.get_metrics())
        for name in ("num_used_blocks", "num_blocks", "num_snapshots", "replicas"):  # which are no totals
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

    llm = LLM(model=str(model.folder), skip_tokenizer_init=True, **model.options, **options)

    def generate(workload: Workload) -> list[int]:
        if workload.answers:  # it has no call for that
            pairs = [*zip(*prompts_and_answers(workload), strict=True)]
            inputs = [{"prompt_token_ids": prompt + answer} for prompt, answer in pairs]
            llm.generate(inputs, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
            return [len(answer) for _, answer in pairs]
        inputs = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        options = {"n": workload.num_samples, "top_k": args.top_k, "top_p": args.top_p}
        params = make_params(SamplingParams, workload, detokenize=False, **options)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(sample.token_ids) for output in outputs for sample in output.outputs]

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


ENGINES = {"nanoinfer": load_nanoinfer, "nanovllm": load_nanovllm, "vllm": load_vllm, "transformers": load_transformers}
