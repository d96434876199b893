"""`nanoinfer bench images`: how fast pictures are read, against the floor of what sees and of the language model.

The model is Qwen3-VL's with random weights, and its image processor is the real one. The pictures are JPEG files of
colours that run into each other, so a run does all that a user's does: decode, process, encode, prefill, decode.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.bench.floor import GIB, Rates, compute_floor, measure_rates
from nanoinfer.bench.report import describe_machine, find_device
from nanoinfer.bench.trace import GPU_WORK, LONGEST_LAUNCH_LATENCY, Span, StepTrace, measure_gaps, top_kernels
from nanoinfer.bench.workloads import Workload
from nanoinfer.errors import ConfigError
from nanoinfer.integers import ceil_div
from nanoinfer.metrics import StepEvent
from nanoinfer.models.native_config import read_native_config

QUESTION = "<|vision_start|><|image_pad|><|vision_end|>What is the total of this receipt?"
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
OUTPUT_LEN = 30
# By device: how many pictures, their sizes, and how many more are read to warm up, and while the GPU is watched.
PICTURES = {"cuda": (1000, (1024, 768)), "cpu": (24, (256, 192))}
NUM_WARMING = 12
MAX_WATCHED, UNWATCHED_STEPS, NUM_WATCHED_STEPS = 200, 6, 16  # pictures; steps before those that are watched
# Of Qwen3-VL-8B; and one that a CPU computes in seconds.
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
}
TINY_TEXT: dict[str, Any] = {"vocab_size": 1152, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
TINY_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TINY_TEXT |= {"rope_scaling": {**TEXT["rope_scaling"], "mrope_section": [6, 5, 5]}}
TINY_VISION: dict[str, Any] = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
TINY_VISION |= {"out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}
SIZES = {"8B": (TEXT, VISION), "tiny": (TEXT | TINY_TEXT, VISION | TINY_VISION)}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Read the pictures twice, and some more with the GPU watched; print and return all figures."""
    if find_spec("PIL") is None:
        raise ConfigError("pictures need Pillow: pip install 'nanoinfer[images]'")
    device = find_device()
    usual, picture_size = PICTURES[device]
    num_images, size = args.num_images or usual, args.size or ("8B" if device == "cuda" else "tiny")
    num_watched = min(num_images, MAX_WATCHED) if device == "cuda" else 0
    figures: dict[str, Any] = {"model": f"Qwen3-VL-{size}", "num_images": num_images, "picture_size": picture_size}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = write_model(folder, size)
        paths = write_pictures(folder, NUM_WARMING + num_images + num_watched, picture_size, args.seed)
        warming, timed, watched = (
            paths[:NUM_WARMING],
            paths[NUM_WARMING : NUM_WARMING + num_images],
            paths[NUM_WARMING + num_images :],
        )
        rates = measure_rates(device, read_native_config(config))
        print(f"Floor: the least time that the hardware allows, at {rates}")
        options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1}, "load_format": "dummy", "max_model_len": 4096}
        if device == "cpu":
            options["num_kvcache_blocks"] = 64
        with LLM(folder, device=device, **options) as llm:
            print(f"{llm!r}: pictures of {picture_size[0]} x {picture_size[1]} pixels")
            figures["processing"] = time_processing(llm, warming)
            prompt = read(llm, warming)[0].prompt_token_ids
            floor = figures["floor"] = find_floor(config, prompt, num_images, llm.engine.config.max_num_seqs, rates)
            figures["first"] = time_reading(llm, timed, "at first", floor["seconds"])
            # What was read last is still in the cache.
            num_blocks = ceil_div(len(prompt), llm.engine.config.kvcache_block_size) + 1
            still_cached = timed[-max(1, llm.get_metrics().num_blocks // (2 * num_blocks)) :]
            figures["again"] = time_reading(llm, still_cached, "again")
            figures["gpu"] = watch(llm, watched, folder) if watched else None
    return {**figures, **describe_machine(device)}


def write_model(folder: Path, size: str) -> dict[str, Any]:
    """Write a tokenizer, the tiny checkpoint's with more tokens, a processor, and the config.json; return that."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tiny_model_path() / "tokenizer.json"), eos_token="<|im_end|>"
    )
    tokenizer.add_tokens([*IMAGE_TOKENS], special_tokens=True)
    tokenizer.save_pretrained(folder)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = tokenizer.convert_tokens_to_ids([*IMAGE_TOKENS])
    text, vision = SIZES[size]
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {**text, "eos_token_id": tokenizer.eos_token_id},
        "vision_config": vision,
        "tie_word_embeddings": False,
        **dict(zip(names, ids, strict=True)),
    }
    for name, content in (("config.json", config), ("preprocessor_config.json", PROCESSOR)):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return config


def write_pictures(folder: Path, num_pictures: int, size: tuple[int, int], seed: int) -> list[Path]:
    """Write different pictures of (width, height) pixels as JPEG files: soft colours with some noise on them."""
    from PIL import Image

    width, height = size
    noise = np.random.default_rng(seed).integers(0, 24, (height, width, 3), dtype=np.uint8)

    def write(index: int) -> Path:
        colours = np.random.default_rng([seed, index]).integers(0, 232, (12, 16, 3), dtype=np.uint8)
        soft = np.asarray(Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR))
        path = folder / f"{index}.jpg"
        Image.fromarray(soft + noise).save(path, quality=85)
        return path

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return [*threads.map(write, range(num_pictures))]


def read(llm: LLM, paths: list[Path]) -> list[Any]:
    """Ask about each picture, and return the outputs."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    prompts = [{"prompt": QUESTION, "multi_modal_data": {"image": str(path)}} for path in paths]
    outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == OUTPUT_LEN for output in outputs), "a picture got fewer tokens"
    return outputs


def time_processing(llm: LLM, paths: list[Path]) -> dict[str, float]:
    """Return the milliseconds that one core takes to load and process a picture, and how many threads do so."""
    reader: Any = llm.preparer.prompt_processor.image_reader
    num_threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for path in paths:
        started = perf_counter()
        reader._load(str(path), reader._options)
        times.append(1e3 * (perf_counter() - started))
    torch.set_num_threads(num_threads)
    median = statistics.median(times)
    print(f"One core loads and processes a picture in {median:.1f} ms, and {reader.num_workers} threads do so")
    return {"milliseconds": median, "num_workers": reader.num_workers}


def time_reading(llm: LLM, paths: list[Path], name: str, floor: float | None = None) -> dict[str, Any]:
    """Time the pictures, and print how fast they were read. floor: the least seconds."""
    memory: list[int] = []
    before = llm.get_metrics()
    end = llm.on_step(lambda _: memory.append(resident_bytes()))
    started = perf_counter()
    read(llm, paths)
    seconds = perf_counter() - started
    end()
    after = llm.get_metrics()
    num_cached = after.cached_tokens - before.cached_tokens
    hits = num_cached / (after.num_prompt_tokens - before.num_prompt_tokens)
    early, late = memory[len(memory) // 5], memory[-1]
    share = "" if floor is None else f", {floor / seconds:.1%} of the floor"
    print(
        f"{name}: {len(paths)} pictures, {len(paths) / seconds:.2f} a second{share}; prefix hits {hits:.1%}; host "
        f"memory after a fifth {early / GIB:.2f} GiB, at the end {late / GIB:.2f}, at most {max(memory) / GIB:.2f}",
        flush=True,
    )
    return {
        "num_images": len(paths),
        "seconds": seconds,
        "images_per_second": len(paths) / seconds,
        "share_of_floor": None if floor is None else floor / seconds,
        "hits": hits,
        "host_bytes": {"after_a_fifth": early, "last": late, "most": max(memory)},
    }


def resident_bytes() -> int:
    """Return how much of the host's memory this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def find_floor(
    config: dict[str, Any], prompt: list[int], num_images: int, max_num_seqs: int, rates: Rates
) -> dict[str, float]:
    """Print and return the least seconds that pictures with this prompt take, in all and by part."""
    num_patches = prompt.count(config["image_token_id"]) * config["vision_config"]["spatial_merge_size"] ** 2
    workload = Workload(0, [prompt] * num_images, [OUTPUT_LEN] * num_images)
    text = compute_floor(read_native_config(config), workload, rates, max_num_seqs)
    tower = num_images * tower_flops(config["vision_config"], num_patches) / rates.matrix_rate
    parts = {"tower": tower, "prefill": text.prefill_seconds, "decode": text.decode_seconds}
    seconds = sum(parts.values())
    shown = ", ".join(f"{name} {part / num_images * 1e3:.2f}" for name, part in parts.items())
    print(
        f"A picture has {num_patches:,} patches, and {len(prompt):,} tokens with its question; the floor is "
        f"{num_images / seconds:.1f} pictures a second ({shown} ms a picture)"
    )
    return {**parts, "seconds": seconds}


def tower_flops(vision: Mapping[str, Any], num_patches: int) -> float:
    """Count the operations of what sees, for a picture of so many patches: all products, and attention of all pairs."""
    hidden, merged = vision["hidden_size"], vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    of_layer = 4 * hidden**2 + 2 * hidden * vision["intermediate_size"]
    attention = 2 * hidden * num_patches  # queries with keys, then with values
    products = num_patches * (patch * hidden + vision["depth"] * (of_layer + attention))
    num_mergers = 1 + len(vision["deepstack_visual_indexes"])
    of_merger = merged**2 + merged * vision["out_hidden_size"]
    return 2.0 * (products + num_mergers * of_merger * num_patches // vision["spatial_merge_size"] ** 2)


def watch(llm: LLM, paths: list[Path], folder: Path) -> dict[str, Any] | None:
    """Read pictures while the GPU's work in some steps is recorded; print and return how long it idled there."""
    profiler = profile(activities=[ProfilerActivity.CUDA])
    places = count()

    def note(_: StepEvent) -> None:
        place = next(places)
        if place == UNWATCHED_STEPS:
            profiler.start()
        elif place == UNWATCHED_STEPS + NUM_WATCHED_STEPS:
            profiler.stop()

    end = llm.on_step(note)
    read(llm, paths)
    end()
    if (num_steps := next(places)) <= UNWATCHED_STEPS:
        return None  # too few to say anything of
    if num_steps <= UNWATCHED_STEPS + NUM_WATCHED_STEPS:
        profiler.stop()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = [Span(one["name"], one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") in GPU_WORK]
    spans.sort(key=lambda span: span.start)
    del spans[: len(spans) // 8]  # the GPU ran dry while the profiler started
    steps = [StepTrace(0, spans[0], waits=[], gpu=spans)]
    gpu = measure_gaps(steps)
    assert gpu is not None, "nothing was recorded of the GPU"
    print(
        f"GPU, over {gpu.total / 1e6:.2f} s: idle {(gpu.waiting + gpu.latency) / gpu.total:.1%}, of which "
        f"{gpu.waiting / gpu.total:.1%} in gaps above {LONGEST_LAUNCH_LATENCY:g} us (the host is late)"
    )
    kernels = top_kernels(steps)
    for kernel in kernels:
        print(f"  {kernel.share:6.1%} {kernel.num_runs:7,.0f} runs  {kernel.name[:90]}")
    return {**gpu._asdict(), "kernels": [kernel._asdict() for kernel in kernels]}
