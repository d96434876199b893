"""Times embeddings: texts in, vectors out, with sentence-transformers beside it where that is installed.

Both read the same folder: random weights that transformers writes, and a tokenizer whose every word is one token. So
tokenization counts, and lengths are known. sentence-transformers gets the best of its batch sizes and attentions.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from nanoinfer.bench.floor import measure_rates
from nanoinfer.bench.throughput import describe_machine
from nanoinfer.bench.workloads import SIZES
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.errors import ConfigError

BATCH_SIZES = (32, 128, 512)
NUM_RUNS = 5  # short texts take the host a fifth more time or less from run to run
ATTENTIONS = ("sdpa", "flash_attention_2")
VOCAB_SIZE = 8192  # words; the models' own tables are larger, which costs neither engine anything
SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]


class TextLoad(NamedTuple):
    """How many texts, of how many tokens."""

    num_texts: int
    shortest: int
    longest: int


TEXTS = {
    "cuda": {"short": TextLoad(8192, 20, 60), "long": TextLoad(2048, 512, 2048)},
    "cpu": {"short": TextLoad(64, 20, 60), "long": TextLoad(4, 100, 200)},
}
# By name, the class of a model and what its config says. bert-base has more positions than its 512, for long texts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6B": ("Qwen3Model", {key: SIZES["0.6B"][key] for key in SIZES["0.6B"] if key != "architectures"}),
    "bert-base": ("BertModel", {"vocab_size": 30522, "max_position_embeddings": 2048}),
    "modernbert-large": (
        "ModernBertModel",
        {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
    ),
    "tiny": (
        "BertModel",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "max_position_embeddings": 256},
    ),
}


def run(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time the loads that are asked for, print a line for each engine, and return all figures."""
    name = args.embedding_model or ("qwen3-0.6B" if device == "cuda" else "tiny")
    figures: dict[str, Any] = {"model": name, **describe_machine(device)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder, name, args.seed)
        config = _read_config(folder)
        rates = measure_rates(device, config)
        for load_name in args.texts or TEXTS[device]:
            load = TEXTS[device][load_name]
            texts = draw_texts(load, args.seed)
            floor = prefill_flops(config, [len(text.split()) + 1 for text in texts]) / rates.matrix_rate
            figures[load_name] = time_load(folder, texts, floor, device, args)
    return figures


def time_load(folder: Path, texts: list[str], floor: float, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time both engines on the same texts. floor: the least seconds."""
    from nanoinfer import LLM

    with LLM(folder, max_num_seqs=args.max_num_seqs) as llm:
        seconds, ours = _timed(lambda: [output.embedding for output in llm.embed(texts, use_tqdm=False)])
    num_tokens = sum(len(text.split()) + 1 for text in texts)
    figures: dict[str, Any] = {"floor_seconds": floor, "num_tokens": num_tokens}
    figures["nanoinfer"] = _report("nanoinfer", seconds, len(texts), num_tokens, floor)
    if find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed, and is left out")
        return figures
    best = _time_sentence_transformers(folder, texts, device)
    figures["sentence-transformers"] = _report(best[1], best[0], len(texts), num_tokens, floor)
    figures["speedup"] = best[0] / seconds
    cosine = min(float(a @ b) for a, b in zip(ours, best[2], strict=True))
    figures["lowest_cosine"] = cosine
    print(f"  {figures['speedup']:.2f} times as fast; the least alike of both engines' embeddings: cosine {cosine:.5f}")
    return figures


def _time_sentence_transformers(folder: Path, texts: list[str], device: str) -> tuple[float, str, Any]:
    """Return the least seconds of all batch sizes and attentions, what they were, and the embeddings."""
    from sentence_transformers import SentenceTransformer

    best: tuple[float, str, Any] | None = None
    for attention in ATTENTIONS:
        options = {"attn_implementation": attention, "dtype": "bfloat16" if device == "cuda" else "float32"}
        try:
            model = SentenceTransformer(str(folder), device=device, model_kwargs=options)
        except (ImportError, ValueError) as error:
            print(f"  sentence-transformers with {attention} is left out: {str(error).splitlines()[0]}")
            continue
        for size in BATCH_SIZES:
            how = f"sentence-transformers ({attention}, batches of {size})"

            def encode(model: Any = model, size: int = size) -> Any:
                return model.encode(texts, batch_size=size, normalize_embeddings=True)

            seconds, vectors = _timed(encode)
            if best is None or seconds < best[0]:
                best = seconds, how, vectors
    if best is None:
        raise ConfigError("sentence-transformers has no attention that runs here; uninstall it, or mend it")
    return best


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median seconds of NUM_RUNS runs after one that warms up, and a result, which is on the host."""
    work()
    times = []
    for _ in range(NUM_RUNS):
        started = perf_counter()
        result = work()
        times.append(perf_counter() - started)
    return statistics.median(times), result


def _report(name: str, seconds: float, num_texts: int, num_tokens: int, floor: float) -> dict[str, Any]:
    print(
        f"  {name}: {num_texts / seconds:,.0f} texts and {num_tokens / seconds:,.0f} tokens a second, "
        f"{floor / seconds:.0%} of the floor"
    )
    return {"name": name, "seconds": seconds, "texts_per_second": num_texts / seconds}


def prefill_flops(config: ModelConfig, lens: list[int]) -> float:
    """Count the operations of all products and of attention, which is of half of all pairs where it is causal."""
    width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    num_mlp = 3 if config.encoder is None or config.encoder.first_position is None else 2
    layer = 2 * config.hidden_size * (width + kv_width) + num_mlp * config.hidden_size * config.intermediate_size
    flops = 2.0 * config.num_hidden_layers * layer * sum(lens)
    for index in range(config.num_hidden_layers):
        encoder, window = config.encoder, None
        if encoder is not None and encoder.local_layers and encoder.local_layers[index]:
            window = 2 * (encoder.window or 0) - 1
        pairs = sum(length * min(length, window or length) for length in lens)
        flops += 4.0 * width * (pairs if encoder is not None else pairs / 2)
    return flops


def draw_texts(load: TextLoad, seed: int) -> list[str]:
    """Return random words: one token each, and one more that the tokenizer adds at the end."""
    rng = random.Random(seed)
    lens = [rng.randint(load.shortest, load.longest) - 1 for _ in range(load.num_texts)]
    return [" ".join(f"w{rng.randrange(VOCAB_SIZE - len(SPECIAL))}" for _ in range(length)) for length in lens]


def write_model(folder: Path, name: str, seed: int) -> None:
    """Write a model of random weights, a tokenizer, and the files of sentence-transformers for it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    architecture, options = MODELS[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model_class(model_class.config_class(**options)).to(dtype).save_pretrained(folder)
    words = [*SPECIAL, *(f"w{index}" for index in range(VOCAB_SIZE - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[1], sep_token=SPECIAL[3])
    fast.save_pretrained(folder)
    is_decoder = architecture == "Qwen3Model"
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": _read_config(folder).hidden_size,
        "pooling_mode_lasttoken": is_decoder,
        "pooling_mode_mean_tokens": not is_decoder,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


def _read_config(folder: Path) -> ModelConfig:
    from nanoinfer.models import SUPPORTED

    return ModelConfig.from_folder(folder, SUPPORTED)
