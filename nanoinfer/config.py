"""The options of an engine: validated once, never changed.

Nothing that a run finds out (how many blocks fit, how long a sequence may be) is written back here. Each option is
explained where it is declared; docstrings and the command line's --help are made from that.
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, get_args, get_origin

from nanoinfer.errors import ConfigError, check_names
from nanoinfer.structured_outputs import switches_of_all
from nanoinfer.vllm_names import LLM_NAMES as VLLM_NAMES

# The only values of options, where there are such.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ExecutorBackend = Literal["mp", "external_launcher"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "int8"]
AttentionBackendName = Literal["auto", "flash_attn", "triton", "torch"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
RunnerKind = Literal["auto", "generate", "pooling"]
ModelImplementation = Literal["auto", "nanoinfer", "transformers"]
Quantization = Literal["fp8", "int8", "int4"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
DTYPES = get_args(Dtype)[1:]
QUANTIZATIONS = get_args(Quantization)
REASONING_NAMES = ("reasoning_start_str", "reasoning_end_str")
OLD_REASONING_NAMES = {f"think_{which}_str": f"reasoning_{which}_str" for which in ("start", "end")}  # vLLM's first
REASONING_EXAMPLE = "{'reasoning_start_str': '<think>', 'reasoning_end_str': '</think>'}"
SLEEP_TAGS = ("weights", "kv_cache")  # what wakes up, in order: the cache comes with graphs, which read the weights
Given = TypeVar("Given", contravariant=True)  # the type of an option as users give it
Kept = TypeVar("Kept", covariant=True)
Options = ParamSpec("Options")


class TorchDtype(Protocol):
    """Stands for torch.dtype, by what no string has: this file does without PyTorch."""

    @property
    def itemsize(self) -> int: ...


class TorchDevice(Protocol):
    """Stands for torch.device."""

    @property
    def index(self) -> int: ...
    @property
    def type(self) -> str: ...


class Converted(Protocol[Given, Kept]):
    """Types an option that is kept in another type than it may be given in: `Converted[given, kept]`.

    Type checkers take it for a descriptor, which says both. At run time it is the second type alone.
    """

    def __get__(self, config: Any, owner: Any) -> Kept: ...
    def __set__(self, config: Any, given: Given) -> None: ...
    def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
        return types[1]


class Range(NamedTuple):
    """Says which numbers an option takes. rule: which, and what to use instead, in words."""

    kind: type
    holds: Callable[[Any], bool]
    rule: str


# Of max_num_batched_tokens and max_num_seqs: where nobody has chosen others, small GPUs have less.
DEFAULT_STEP_TOKENS, DEFAULT_ROWS = 16384, 512
COUNTS = Range(Integral, lambda value: 1 <= value < 2**31, "must be a whole number of at least 1, and below 2**31")


def option(default: Any, explained: str, numbers: Range | None = None, is_neutral: bool = False) -> Any:
    """Declare a field of EngineConfig together with its explanation.

    numbers: those that it takes, if they are not COUNTS. is_neutral: whether it changes no answer, beyond rounding, of
    a request that is served with and without it.
    """
    return field(default=default, metadata={"help": explained, "numbers": numbers, "is_neutral": is_neutral})


neutral_option = partial(option, is_neutral=True)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Holds the options of `LLM`, validated. Raises ConfigError (a ValueError) for a value out of range."""

    model: Converted[str | Path, str] = option(
        MISSING, 'A local folder, the id of a model on the Hugging Face hub, or "tiny" for the included one.'
    )
    _: KW_ONLY
    dtype: Converted[Dtype | TorchDtype, Dtype] = option(
        "auto",
        'The type of weights, activations and KV cache; "auto" is the checkpoint\'s own on CUDA. On a CPU it is '
        "float32, or bfloat16 for large models in bfloat16 or in 4 or 8 bits, if the CPU multiplies it (AMX, "
        "AVX512-BF16).",
    )
    device: Converted[str | TorchDevice, str] = neutral_option(
        "auto", '"cpu", "cuda", "cuda:N", or "auto": CUDA if there is a GPU, else the CPU.'
    )
    tensor_parallel_size: int = neutral_option(
        1, "The number of GPUs that the model is split over, counted from `device` on; on a CPU, of processes."
    )
    distributed_executor_backend: ExecutorBackend = neutral_option(
        "mp",
        '"mp" starts a process for each further GPU; with "external_launcher" the processes are there (torchrun), and '
        "those that share a model all make the same calls.",
    )
    data_parallel_size: int = neutral_option(
        1,
        "The number of replicas: engines in processes of their own, each with the whole model, that share requests. "
        "Each has tensor_parallel_size GPUs, counted from `device` on, and runs up to max_num_seqs sequences.",
    )
    max_model_len: int | None = neutral_option(
        None,
        "The most tokens in a sequence, prompt and completion together; if not given, the model's own limit, lowered "
        "to what the KV cache can hold.",
    )
    max_num_seqs: int = neutral_option(DEFAULT_ROWS, "The most sequences that run at the same time.")
    max_num_batched_tokens: int = neutral_option(
        DEFAULT_STEP_TOKENS,
        "The most prompt tokens in one step; longer prompts are computed in chunks. On a GPU with too little memory "
        "for them, the defaults of this and of max_num_seqs are lowered.",
    )
    gpu_memory_utilization: float = neutral_option(
        0.9,
        "The share of the GPU's memory that the engine may use, in (0, 1]; other programs do not count.",
        Range(Real, lambda value: 0 < value <= 1, "must lie in (0, 1]; 0.9 suits a GPU of your own"),
    )
    kvcache_block_size: int = neutral_option(
        256, "The number of tokens in a block of the KV cache; a multiple of 16, and of 256 for flash_attn."
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        'The type of keys and values in the KV cache: "auto" is that of the model; "int8" and "fp8" ("fp8_e4m3" is the '
        "same) round them to 8 bits, with a scale for each token and KV head, so that nearly twice the tokens fit.",
    )
    num_kvcache_blocks: int | None = neutral_option(
        None, "The number of blocks in the KV cache, of all layers; if not given, as many as fit into memory."
    )
    enable_prefix_caching: bool = neutral_option(True, "Reuse the KV blocks of prefixes that were computed before.")
    enforce_eager: bool = neutral_option(False, "Run without CUDA graphs.")
    attention_backend: AttentionBackendName = neutral_option(
        "auto",
        '"triton" uses our own kernels (before Hopper, prefill uses flash-attn where that is installed); "flash_attn" '
        'uses flash-attn alone; "torch" uses plain PyTorch; "auto" takes the fastest that can serve.',
    )
    overlap: bool = neutral_option(
        True,
        "Launch each step before the tokens of the last one are collected, so that the GPU never waits for the host.",
    )
    load_format: LoadFormat = option(
        "auto",
        '"auto" and "safetensors" read the checkpoint; "dummy" draws random weights and needs only config.json.',
    )
    runner: RunnerKind = neutral_option(
        "auto",
        '"generate" completes prompts; "pooling" makes embeddings, classes or rewards alone, without a language-model '
        'head; "auto" is what the model is for: pooling if it has no such head, or files of sentence-transformers.',
    )
    model_impl: ModelImplementation = option(
        "auto",
        '"nanoinfer" runs the layers that are written here, "transformers" those of the package transformers, with our '
        'attention, cache and sampling; "auto" takes ours where there are any.',
    )
    compile: bool = neutral_option(
        False,
        "Compile the layers of a model of transformers by torch.compile; the first start then takes a minute longer.",
    )
    quantization: Quantization | None = option(
        None,
        '"fp8" rounds the weights of linear layers to 8 bits while they are loaded, "int4" to 4, and "int8", which is '
        "for CPUs, to integers of 8. A checkpoint that has them in 8 or 4 bits says how they are read, and needs no "
        "option.",
    )
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        'What log-probabilities are of: "raw_logprobs" is the model\'s own distribution, "processed_logprobs" the one '
        'that tokens are drawn from, after biases, penalties, grammars, temperature and filters; "raw_logits" and '
        '"processed_logits" are the logits of either, in the same places.',
    )
    max_logprobs: int = neutral_option(
        -1,
        "The most `logprobs` and `prompt_logprobs` that a request may ask for; -1 is as many as the vocabulary has.",
        Range(
            Integral, lambda value: -1 <= value < 2**31, "must be a whole number of at least -1; use -1 for no limit"
        ),
    )
    enable_return_routed_experts: bool = neutral_option(
        False, "Return which experts computed each token, as `routed_experts` of every completion."
    )
    enable_lora: bool = neutral_option(
        False, "Serve adapters of peft (LoRA), which calls name by `lora_request`, beside the model itself."
    )
    max_loras: int = neutral_option(
        1, "The most adapters on the device at a time; requests of further ones wait. Each slot takes memory."
    )
    max_lora_rank: int = neutral_option(16, "The highest rank of an adapter; each slot takes memory for it.")
    revision: str | None = option(
        None,
        "The branch, tag or commit of the model on the hub; if not given, the main branch. The tokenizer's too, unless "
        "`tokenizer` names another one.",
    )
    tokenizer: Converted[str | Path | None, str | None] = option(
        None,
        "A local folder, or the id of a repository on the hub, that has the tokenizer and its chat template; if not "
        "given, the model's own.",
    )
    download_dir: Converted[str | Path | None, str | None] = neutral_option(
        None, "The folder that keeps what is downloaded from the hub; if not given, the cache of huggingface_hub."
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "A dict, in JSON on the command line, of fields that replace those of config.json. A dict for a nested config, "
        "such as text_config, replaces fields of that one. A field that nanoinfer does not read is an error.",
    )
    structured_outputs_config: Mapping[str, Any] | None = option(
        None,
        "A dict, in JSON on the command line, of switches for the JSON of all requests: disable_any_whitespace and "
        "disable_additional_properties, as StructuredOutputsParams has them.",
    )
    response_template: str | Mapping[str, Any] | None = option(
        None,
        "How answers are told apart into thought, answer and tool calls: the name of a family of models (qwen3, "
        "deepseek-r1, gpt-oss, glm-4.5, minimax-m2, mistral), a response template of transformers as a dict, in JSON "
        'on the command line, or "auto": the tokenizer\'s own, else the family that the chat template is written for. '
        "If not given, that of `auto`, but files of run-batch keep the whole text as the content.",
    )
    grammar_timeout: float = neutral_option(
        60.0,
        "The most seconds that the grammar of a request may take to compile; beyond, the request is an error.",
        Range(Real, lambda value: 0 < value < 10**6, "must be seconds, above 0 and below 10**6; 60 is usual"),
    )
    reasoning_config: Mapping[str, Any] | None = option(
        None,
        "A dict, in JSON on the command line, of the texts that the model writes before and after a thought, "
        "reasoning_start_str and reasoning_end_str; if not given, those of the family that response_template names, or "
        "that the chat template is written for. Where this option or response_template is given, structured outputs "
        "begin after the thought.",
    )
    speculative_config: Mapping[str, Any] | None = neutral_option(
        None,
        "A dict, in JSON on the command line, that has tokens proposed: from texts that repeat themselves, and where a "
        "form leaves no choice. It has vLLM's options for the methods 'ngram' and 'suffix', such as "
        "num_speculative_tokens, the most for a row. "
        "Tokens are as without it; proposals are made where steps have been found to pay for them.",
    )
    limit_mm_per_prompt: Mapping[str, int] | None = neutral_option(
        None,
        'The most images in a prompt, as {"image": 4}, in JSON on the command line. If not given, prompts are texts '
        "alone, and the part of the model that sees is not loaded.",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        "A dict, in JSON on the command line, of options of the model's image processor that replace those of its "
        'files, such as {"size": {"longest_edge": 1003520, "shortest_edge": 65536}}.',
    )
    mm_processor_cache_gb: float = neutral_option(
        4.0,
        "The most GiB of host memory for processed images: those that wait for the model, and, as long as there is "
        "room, earlier ones in case they come again. Those that wait may take 1 in any case, and the images of one "
        "prompt more.",
        Range(Real, lambda value: 0 <= value < 10**6, "must be GiB, at least 0 and below 10**6; 4 is usual"),
    )
    renderer_num_workers: int | None = neutral_option(
        None,
        "The number of threads that load and process images ahead of need; if not given, one for each core of the CPU "
        "but one, and at most 16.",
    )
    allowed_media_domains: Converted[Sequence[str] | str | None, tuple[str, ...] | None] = neutral_option(
        None,
        "The hosts that images may be downloaded from, separated by commas on the command line; if not given, none.",
    )
    allowed_local_media_path: Converted[str | Path | None, str | None] = neutral_option(
        None, "The folder that image files of prompts must lie in; if not given, any file may be read."
    )
    trace: Converted[str | Path | None, str | None] = neutral_option(
        None, "An HTML file that shows the whole run, step by step and request by request; written by `close`."
    )
    seed: int = option(
        0,
        "The number from which the random streams of all requests derive.",
        Range(
            Integral,
            lambda value: -(2**63) <= value < 2**63,
            "is not an int of 64 bits; use a whole number such as 0",
        ),
    )

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)
        keep("model", str(self.model))
        keep("device", str(self.device))
        keep("dtype", str(self.dtype).removeprefix("torch."))
        if self.distributed_executor_backend is None:  # as vLLM's users may write
            keep("distributed_executor_backend", "mp")
        if self.hf_overrides is not None:
            keep("hf_overrides", _as_json(self.hf_overrides))
        for item in fields(self):
            keep(item.name, _checked(item, getattr(self, item.name)))
        keep("structured_outputs_config", switches_of_all(self.structured_outputs_config))
        if self.response_template is not None:
            from nanoinfer.responses.families import as_response_template  # few ask for it

            keep("response_template", as_response_template(self.response_template))
        keep("reasoning_config", _checked_reasoning(self.reasoning_config))
        if self.speculative_config is not None:
            from nanoinfer.speculative_config import as_speculative_config  # few ask for it

            keep("speculative_config", as_speculative_config(self.speculative_config))
            self._check_speculation()
        keep("limit_mm_per_prompt", _checked_limits(self.limit_mm_per_prompt))
        keep("mm_processor_kwargs", as_processor_kwargs(self.mm_processor_kwargs, ConfigError))
        keep("allowed_media_domains", _checked_domains(self.allowed_media_domains))
        if self.distributed_executor_backend != "mp" and self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} starts processes, and with distributed_executor_backend="
                "'external_launcher' they are there already; use 1, and each process has an engine of its own"
            )
        if self.max_model_len == 1:
            raise ConfigError("max_model_len=1 has no room for a prompt and a completion; use at least 2")
        if self.trace is not None:
            _check_trace(Path(self.trace))
        if self.kvcache_block_size % 16 != 0:
            nearest = max(16, round(self.kvcache_block_size / 16) * 16)
            raise ConfigError(f"kvcache_block_size={self.kvcache_block_size} is no multiple of 16; use {nearest}")

    def _check_speculation(self) -> None:
        """Raise ConfigError for other options that exclude speculative_config."""
        if self.runner == "pooling":
            raise ConfigError("runner='pooling' generates nothing to be proposed; leave speculative_config out")
        if self.distributed_executor_backend == "external_launcher" and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"with distributed_executor_backend='external_launcher', {self.tensor_parallel_size} processes that "
                "share a model must schedule the same steps, and speculative_config decides by the times of steps; "
                "leave it out, or use tensor_parallel_size=1"
            )

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images: `limit_mm_per_prompt` says how many."""
        return bool(self.limit_mm_per_prompt)

    @property
    def max_row_tokens(self) -> int:
        """The most tokens of a row that decode steps compute: its newest one, and those of a proposer."""
        return 1 + (self.speculative_config["num_speculative_tokens"] if self.speculative_config else 0)

    def settings_of_answers(self) -> dict[str, Any]:
        """Return the options that answers depend on, where they are not the default; folders in one spelling."""
        given = {name: getattr(self, name) for name in ANSWERS_DEPEND_ON}
        paths = {name: given[name] and str(Path(given[name])) for name in ("model", "tokenizer")}
        defaults = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in {**given, **paths}.items() if value != defaults[name]}

    @classmethod
    def from_options(cls, model: str | Path, options: Mapping[str, Any]) -> "EngineConfig":
        """Build the config of `LLM(model, **options)`; an unknown option is a TypeError that names a similar one."""
        known = [item.name for item in fields(cls) if item.name != "model"]
        return cls(model=str(model), **check_names("LLM", options, known, VLLM_NAMES))


def only_values(kind: Any) -> tuple[Any, ...]:
    """Return the values that the Literal in an option's type allows; none where it has no Literal."""
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return tuple(value for part in literals for value in get_args(part))


def showing_options_of(
    config: Callable[Options, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Return a decorator of a method: editors and type checkers then know its options as those of `config`."""
    return lambda method: method


ANSWERS_DEPEND_ON = tuple(item.name for item in fields(EngineConfig) if not item.metadata["is_neutral"])


def _checked(item: Field[Any], value: Any) -> Any:
    """Return the value of an option as it is kept. Raises ConfigError where its type or its range is wrong."""
    name, kind, choices = item.name, item.type, only_values(item.type)
    if choices and value not in (*choices, item.default):
        raise ConfigError(f"{name}={value!r} is not known; use one of {', '.join(choices)}")
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a bool; use True or False")
    if value is None and item.default is None:
        return None
    if kind == str | None:
        if not isinstance(value, str | Path) or not str(value):
            raise ConfigError(f"{name}={value!r} is no text; use a string that is not empty")
        return str(value)
    is_whole = int in (kind, *get_args(kind))
    if not is_whole and kind is not float:
        return value
    numbers, holds, rule = item.metadata["numbers"] or COUNTS
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    number = int(value) if is_number and is_whole else value  # NumPy's integers, say
    if not is_number or not holds(number):
        raise ConfigError(f"{name}={value!r} {rule}")
    return number


def _check_trace(path: Path) -> None:
    """Raise ConfigError for a path at which there cannot be a file."""
    reason = ""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # the name is too long, say, or has a null byte
        reason = f", with a name that the system takes ({getattr(error, 'strerror', None) or error})"
    if reason or path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"trace={str(path)!r} cannot be written; give a file in a folder that exists{reason}")


def _checked_reasoning(config: Any) -> dict[str, str] | None:
    """Return reasoning_config with the names that it has here. Raises ConfigError."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"reasoning_config={config!r:.200} is no dict; use {REASONING_EXAMPLE}, say")
    renamed = {OLD_REASONING_NAMES.get(str(name), str(name)): value for name, value in config.items()}
    try:
        given = check_names(
            "reasoning_config", renamed, REASONING_NAMES, {"reasoning_parser": "response_template of LLM"}
        )
    except TypeError as error:
        raise ConfigError(str(error)) from None
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"reasoning_config has {name}={value!r:.200}, no text; use {REASONING_EXAMPLE}, say")
    return given or None


def _checked_limits(limits: Any) -> dict[str, int] | None:
    """Return limit_mm_per_prompt if it allows images, else None. Raises ConfigError for what is not a limit."""
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise ConfigError(f"limit_mm_per_prompt={limits!r:.200} is no dict; use {{'image': 4}}, say")
    for name, limit in limits.items():
        if not isinstance(limit, Integral) or isinstance(limit, bool) or limit < 0:
            raise ConfigError(f"limit_mm_per_prompt has {name}={limit!r:.200}; use a whole number of at least 0")
        if name != "image" and limit:
            raise ConfigError(f"limit_mm_per_prompt has {name}={limit}, and only images are read; leave {name} out")
    num_images = int(limits.get("image", 0))
    return {"image": num_images} if num_images else None


def as_processor_kwargs(given: Any, error_class: type[ValueError]) -> dict[str, Any] | None:
    """Return mm_processor_kwargs as a dict, None if there are none. Raises an error of this class for what is none."""
    if not (given is None or (isinstance(given, Mapping) and all(isinstance(name, str) for name in given))):
        raise error_class(f"mm_processor_kwargs={given!r:.200} is no dict of names; use {{'max_pixels': 1003520}}, say")
    return dict(given) if given else None


def _checked_domains(domains: Any) -> tuple[str, ...] | None:
    """Return allowed_media_domains as a tuple, None if there are none. Raises ConfigError for what is no host."""
    given = domains.split(",") if isinstance(domains, str) else domains
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(host, str) for host in given):
        raise ConfigError(f"allowed_media_domains={domains!r:.200} is no list of hosts; use ['example.org'], say")
    hosts = tuple(host.strip().lower() for host in given if host.strip())
    for host in hosts:
        if any(character in host for character in "/:@ "):
            raise ConfigError(f"allowed_media_domains has {host!r}, no host alone; use 'example.org', say")
    return hosts or None


def _as_json(overrides: Any) -> dict[str, Any]:
    """Return a copy that later changes do not reach, with what a config.json could hold and nothing else."""
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"hf_overrides={overrides!r} is no dict; use one such as {{'max_position_embeddings': 8192}}")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(overrides), sort_keys=True))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"hf_overrides has what JSON cannot hold ({error}); use values as in config.json") from None
    return copy


def describe_options() -> str:
    """Explain every option of EngineConfig in a paragraph of its own, for docstrings."""
    paragraphs = []
    for item in fields(EngineConfig):
        default = "" if item.default is MISSING else f"={item.default!r}"
        paragraph = f"{item.name}{default}: {item.metadata['help']}"
        paragraphs.append(textwrap.fill(paragraph, 116, subsequent_indent="    "))
    return "\n".join(paragraphs)


EngineConfig.__doc__ = f"{EngineConfig.__doc__}\n\n{describe_options()}\n"
