"""Makes what a benchmark runs: a model, and requests of chosen sizes, of random tokens or words."""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoinfer import tiny_model_path
from nanoinfer.checkpoint.hub import resolve_model_folder
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Says what the requests of a run have in common.

    shared_prefix: how many tokens all prompts begin with.
    num_samples: how many samples of each prompt are drawn; those of a prompt are equally long.
    prompt_logprobs, detokenize: as in SamplingParams.
    constraint: that of the first `num_constrained` requests, as StructuredOutputsParams takes it.
    """

    shared_prefix: int = 0
    num_samples: int = 1
    prompt_logprobs: int | None = None
    detokenize: bool = True
    constraint: dict[str, Any] | None = None
    num_constrained: int = 0


@dataclass(frozen=True, slots=True)
class Load(RequestOptions):
    """Says how many requests a run has, and how many tokens; lengths are uniform from the least to the most.

    input_len: without the shared prefix; in words, if `is_text`.
    max_num_seqs: the most sequences that run at once. nano-vllm's is 512; every engine that takes this option is given
        it. A request has as many sequences as samples.
    num_answers: how many answers to each prompt are scored, in place of completions; `output_len` is theirs.
    is_text: whether prompts are texts, and not token ids.
    """

    num_seqs: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    max_num_seqs: int = 512
    num_answers: int = 0
    is_text: bool = False

    @property
    def longest(self) -> int:
        """Return the most tokens that a request can have at its end."""
        return self.shared_prefix + self.input_len[1] + self.output_len[1]


# By device and name; each load of a name is a run of its own. The loads of a CPU are the same kinds of work, and take
# seconds with the tiny checkpoint.
LOADS: dict[str, dict[str, list[Load]]] = {
    "cuda": {
        "default": [Load(256, (100, 1024), (100, 1024))],  # nano-vllm's
        "small": [Load(num_seqs, (128, 512), (256, 256)) for num_seqs in (1, 4, 16)],
        "steady": [Load(4096, (100, 1024), (100, 1024))],
        "shared": [Load(256, (100, 1024), (100, 1024), shared_prefix=2048)],
        "samples": [Load(32, (1100, 1100), (512, 512), num_samples=8)],
        "long": [Load(8, (32768, 32768), (512, 512))],
        "read": [Load(512, (1500, 2500), (1, 1))],
        "fewshot": [Load(2048, (50, 150), (4, 4), shared_prefix=2000)],
        "short": [Load(4096, (20, 60), (8, 8))],
        "logprobs": [Load(128, (2000, 2000), (1, 1), prompt_logprobs=1)],
        "logprobs_ids": [Load(128, (2000, 2000), (1, 1), prompt_logprobs=1, detokenize=False)],
        "score": [Load(1024, (500, 500), (10, 10), num_answers=4)],
        "book": [Load(8, (30000, 30000), (16, 16))],
    },
    "cpu": {
        "default": [Load(16, (64, 64), (64, 64))],
        "small": [Load(num_seqs, (32, 128), (32, 32)) for num_seqs in (1, 4, 16)],
        "steady": [Load(64, (8, 64), (8, 64), max_num_seqs=8)],
        "shared": [Load(16, (64, 64), (32, 32), shared_prefix=256)],
        "samples": [Load(4, (275, 275), (32, 32), num_samples=4)],
        "long": [Load(2, (2048, 2048), (32, 32))],
        "read": [Load(16, (150, 250), (1, 1))],
        "fewshot": [Load(32, (5, 15), (4, 4), shared_prefix=200)],
        "short": [Load(64, (2, 6), (8, 8))],
        "logprobs": [Load(8, (200, 200), (1, 1), prompt_logprobs=1)],
        "logprobs_ids": [Load(8, (200, 200), (1, 1), prompt_logprobs=1, detokenize=False)],
        "score": [Load(16, (50, 50), (10, 10), num_answers=4)],
        "book": [Load(2, (1000, 1000), (16, 16))],
    },
}


def _text_jobs(
    num_seqs: int,
    num_words: tuple[int, int],
    num_tokens: int,
    name: str,
    constraint: dict[str, Any],
    num_constrained: int,
) -> dict[str, Load]:
    plain = Load(num_seqs, num_words, (num_tokens, num_tokens), is_text=True)
    return {"plain": plain, name: replace(plain, constraint=constraint, num_constrained=num_constrained)}


REGEX = {"regex": "[a-zA-Z0-9 ,.]*"}
FIELDS: list[dict[str, Any]] = [{"type": "integer"}, {"type": "string", "maxLength": 12}, {"enum": ["low", "high"]}]
PROPERTIES = {f"field_{index}": FIELDS[index % 3] for index in range(30)}
JSON: dict[str, Any] = {
    "json": {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
}
# Jobs of text by device; those of a group are compared.
TEXT_JOBS = {
    "cuda": [
        _text_jobs(1024, (100, 400), 256, "regular expression on all", REGEX, 1024),
        _text_jobs(256, (100, 400), 256, "regular expression on one", REGEX, 1),
        _text_jobs(256, (100, 400), 400, "JSON of 30 fields on all", JSON, 256),
    ],
    "cpu": [
        _text_jobs(16, (10, 40), 32, "regular expression on all", REGEX, 16),
        _text_jobs(16, (10, 40), 32, "JSON of 30 fields on all", JSON, 16),
    ],
}
# Texts to embed, by device and name; nothing comes out of them.
EMBEDDED_TEXTS = {
    "cuda": {"short": Load(8192, (20, 60), (0, 0)), "long": Load(2048, (512, 2048), (0, 0))},
    "cpu": {"short": Load(64, (20, 60), (0, 0)), "long": Load(4, (100, 200), (0, 0))},
}


def loads_of(args: argparse.Namespace, device: str) -> list[tuple[str, Load]]:
    """Return the loads that a command is asked for, with their names."""
    if "names" in args:
        return [(name, load) for name in args.names or LOADS[device] for load in choose_loads(name, device)]
    sizes = ("num_seqs", "input_len", "output_len", "shared_prefix", "num_samples", "max_num_seqs")
    loads = choose_loads(args.load, device, **{size: getattr(args, size) for size in sizes})
    return [(args.load, load) for load in loads]


def choose_loads(load_name: str, device: str, **sizes: int | None) -> list[Load]:
    """Return the loads of this name; `sizes` that are given replace the fields of Load that they are named after.

    input_len and output_len, if given, are the most tokens. The least are those of a GPU's load, or the most if fewer.
    """
    loads, on_gpu = LOADS[device][load_name], LOADS["cuda"][load_name][0]
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    for lens in ("input_len", "output_len"):
        if most := changes.get(lens):
            changes[lens] = (min(getattr(on_gpu, lens)[0], most), most)
    return [replace(load, **changes) for load in (loads[:1] if "num_seqs" in changes else loads)]


@dataclass(frozen=True, slots=True)
class Workload(RequestOptions):
    """Holds the requests of one run: their prompts, token ids or texts, and how many tokens each sample has.

    answers: of each prompt those that are scored; a prompt that has any is not completed.
    """

    seed: int
    prompts: list[Any]
    max_tokens: list[int]
    answers: list[list[list[int]]] = field(default_factory=list)

    @property
    def num_input_tokens(self) -> int:
        """Return how many tokens the prompts have, each counted once for all its samples."""
        return sum(map(len, self.prompts))

    @property
    def output_lens(self) -> list[int]:
        """Return how many tokens each sample of the first prompt has, then each one of the next prompts.

        If answers are scored, nothing is generated, and the numbers of their tokens come instead.
        """
        if self.answers:
            return [len(answer) for answers in self.answers for answer in answers]
        return [max_tokens for max_tokens in self.max_tokens for _ in range(self.num_samples)]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def draw_workload(seed: int, load: Load, vocab_size: int) -> Workload:
    """Draw the requests of a load as nano-vllm's benchmark draws its own, so that figures can be compared.

    The shared prefix is drawn last, so that the rest is the same without it. Ids stay inside the vocabulary.
    """
    rng, max_id = random.Random(seed), min(10000, vocab_size - 1)

    def draw_ids(count: int) -> list[int]:
        return [rng.randint(0, max_id) for _ in range(count)]

    prompts: list[Any] = [
        " ".join(rng.choices(words_of_python(), k=rng.randint(*load.input_len)))
        if load.is_text
        else draw_ids(rng.randint(*load.input_len))
        for _ in range(load.num_seqs)
    ]
    max_tokens = [rng.randint(*load.output_len) for _ in range(load.num_seqs)]
    if load.shared_prefix:
        prefix = draw_ids(load.shared_prefix)
        prompts = [prefix + prompt for prompt in prompts]
    options = {option.name: getattr(load, option.name) for option in fields(RequestOptions)}
    if not load.num_answers:
        return Workload(seed, prompts, max_tokens, **options)
    answers = [[draw_ids(count) for _ in range(load.num_answers)] for count in max_tokens]
    return Workload(seed, prompts, [1] * load.num_seqs, answers, **options)


@cache
def words_of_python() -> list[str]:
    """Return the words of Python's documentation. Texts of them in random order do not begin alike."""
    from pydoc_data.topics import topics

    return " ".join(topics[name] for name in sorted(topics)).split()


# What a config.json says of every size, in the order of `_config`.
COMMON_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)


def _config(architecture: str, *sizes: int | None, **others: Any) -> dict[str, Any]:
    """Return a config.json. sizes: of COMMON_FIELDS; None: it does not say. others: fields that it has, too."""
    given = {name: size for name, size in zip(COMMON_FIELDS, sizes, strict=True) if size is not None}
    return {"architectures": [architecture], **given, **others}


QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000.0, "tie_word_embeddings": False}
TIED = QWEN3 | {"tie_word_embeddings": True}
MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA3 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4: dict[str, Any] = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}
GEMMA4_MOE = GEMMA4 | {"num_global_key_value_heads": 2, "enable_moe_block": True}
GEMMA4_MOE |= {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
GEMMA4_E: dict[str, Any] = {"head_dim": 256, "global_head_dim": 512, "final_logit_softcapping": 30.0}
GEMMA4_E2B = GEMMA4_E | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
GEMMA4_E2B |= {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}
GPT_OSS: dict[str, Any] = {"num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}}
# What the config.json of a size says; those without another name are Qwen3's.
SIZES = {
    "0.6B": _config("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, 40960, **TIED),
    "1.7B": _config("Qwen3ForCausalLM", 151936, 2048, 6144, 28, 16, 8, 40960, **TIED),
    "4B": _config("Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8, 40960, **TIED),
    "8B": _config("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 40960, **QWEN3),
    "14B": _config("Qwen3ForCausalLM", 151936, 5120, 17408, 40, 40, 8, 40960, **QWEN3),
    "32B": _config("Qwen3ForCausalLM", 151936, 5120, 25600, 64, 64, 8, 40960, **QWEN3),
    "30B-A3B": _config("Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, 40960, **MOE),
    "llama-8B": _config(  # Llama 3.1
        *("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 131072),
        model_type="llama",
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
    ),
    "qwen3.5-9B": _config("Qwen3_5ForCausalLM", 248320, 4096, 12288, 32, 16, 4, 32768),
    "qwen3.5-27B": _config("Qwen3_5ForCausalLM", 248320, 5120, 17408, 64, 24, 4, 32768, linear_num_value_heads=48),
    "qwen3.5-35B-A3B": _config("Qwen3_5MoeForCausalLM", 248320, 2048, None, 40, 16, 2, 32768),
    "qwen3-next-80B-A3B": _config("Qwen3NextForCausalLM", 151936, 2048, 5120, 48, 16, 2, 32768),
    "gemma3-12B": _config("Gemma3ForCausalLM", 262208, 3840, 15360, 48, 16, 8, 131072, **GEMMA3),
    "gemma4-E2B": _config("Gemma4ForCausalLM", 262144, 1536, 6144, 35, 8, 1, 131072, **GEMMA4_E2B),
    "gemma4-E4B": _config(
        "Gemma4ForCausalLM", 262144, 2560, 10240, 42, 8, 2, 131072, **GEMMA4_E, num_kv_shared_layers=18
    ),
    "gemma4-12B": _config("Gemma4UnifiedForCausalLM", 262144, 3840, 15360, 48, 16, 8, 262144, **GEMMA4),
    "gemma4-26B-A4B": _config("Gemma4ForCausalLM", 262144, 2816, 2112, 30, 16, 8, 262144, **GEMMA4_MOE),
    "gpt-oss-20b": _config("GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8, None, **GPT_OSS),
    "glm-4.5-air": _config(
        *("Glm4MoeForCausalLM", 151552, 4096, 10944, 46, 96, 8, None),
        head_dim=128,
        attention_bias=True,
        rope_theta=1000000.0,
    ),
    "glm-4.7-flash": _config(
        *("Glm4MoeLiteForCausalLM", 154880, 2048, 10240, 47, 20, 20, None),
        rope_theta=1000000.0,
    ),
    "deepseek-v2-lite": _config(
        *("DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16, 16, 163840),
        q_lora_rank=None,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        rope_scaling={
            **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "qwen2-7B": _config(  # Qwen2.5
        *("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 32768), model_type="qwen2", rope_theta=1000000.0
    ),
}


@dataclass(frozen=True, slots=True)
class Model:
    """Names a model; `folder` holds its config.json and, unless `random_weights`, its checkpoint.

    quantization: how its weights are rounded when they are loaded; None: not at all.
    """

    name: str
    folder: Path
    config: ModelConfig
    random_weights: bool
    quantization: str | None = None

    def __str__(self) -> str:
        rounded = f", {self.quantization}" if self.quantization else ""
        return f"{self.name} ({'random' if self.random_weights else 'its own'} weights{rounded})"

    @property
    def options(self) -> dict[str, Any]:
        """Return all options of nanoinfer and vLLM that belong to the model."""
        return {"load_format": "dummy" if self.random_weights else "auto", "quantization": self.quantization}


def choose_model(
    model: str | None, size: str | None, device: str, scratch: Path, quantization: str | None = None
) -> Model:
    """Return the model asked for; if none is, Qwen3-0.6B on a GPU and the bundled tiny checkpoint on a CPU.

    A size gets random weights, and its config.json is written to the folder `scratch`: a forward pass is as fast with
    random weights as with trained ones.
    """
    from nanoinfer.models.native_config import read_native_folder  # imports PyTorch, which --help need not wait for

    if model is None and (size or device == "cuda"):
        size = size or "0.6B"
        write_config(size, scratch)
        name = f"Qwen3-{size}" if size[0].isdigit() else size
        config = read_native_folder(scratch, quantization=quantization)
        return Model(name, scratch, config, True, quantization)
    folder = resolve_model_folder(model or str(tiny_model_path()))
    config = read_native_folder(folder, quantization=quantization)
    if config.refusal_reason is not None:
        raise ConfigError(f"model={model!r}: {config.refusal_reason}")
    return Model(model or "tiny-qwen3", folder, config, False, quantization)


@contextmanager
def model_of(args: argparse.Namespace, device: str) -> Iterator[Model]:
    """Choose the model that a command is asked for; its files are there while the block runs."""
    with TemporaryDirectory() as scratch:
        yield choose_model(args.model, args.size, device, Path(scratch), args.quantization)


def write_config(size: str, folder: Path) -> None:
    """Write the config.json of a size, with the tokenizer of the tiny checkpoint beside it.

    With a tokenizer every engine turns its output into text, as nano-vllm does in its own benchmark.
    """
    config = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_path() / name, folder / name)


# The class of each model that embeds, and what its config says. bert-base has more positions than its 512, for long
# texts.
EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6B": ("Qwen3Model", SIZES["0.6B"] | {"architectures": ["Qwen3Model"]}),
    "bert-base": ("BertModel", {"vocab_size": 30522, "max_position_embeddings": 2048}),
    "modernbert-large": (
        "ModernBertModel",
        {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
    ),
    "tiny": (
        "BertModel",
        {"vocab_size": 8192, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "max_position_embeddings": 256},
    ),
}
SPECIAL_TOKENS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
NUM_WORDS = 8188  # of the tokenizer; the models' own tables are larger, which costs no engine anything


def write_embedder(folder: Path, name: str, seed: int) -> None:
    """Write a model of random weights, a tokenizer, and the files of sentence-transformers for it.

    The words "w0", "w1" and so on are a token each, and the tokenizer adds one at the end of a text.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    architecture, options = EMBEDDERS[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(seed)
    config = model_class.config_class(**options)
    model_class(config).to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(folder)
    words = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", sep_token="[SEP]")
    fast.save_pretrained(folder)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": config.hidden_size,
        "pooling_mode_lasttoken": architecture == "Qwen3Model",
        "pooling_mode_mean_tokens": architecture != "Qwen3Model",
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


def as_texts(workload: Workload) -> Workload:
    """Return a workload with texts for prompts, of as many tokens by the tokenizer of `write_embedder`."""
    return replace(workload, prompts=[" ".join(f"w{word}" for word in ids[1:]) for ids in workload.prompts])
