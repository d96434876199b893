"""`nanoinfer bench adapters`: what LoRA adapters cost, one and many in a batch, and what they cost where none is used.

An adapter changes all linear layers that one can change. Its matrices are random, and all adapters are read from one
folder, under ids of their own.
"""

import argparse
import gc
import json
import statistics
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from nanoinfer import LLM, LoRARequest, SamplingParams
from nanoinfer.bench.engines import make_params
from nanoinfer.bench.report import describe_machine, find_device, print_row, print_title
from nanoinfer.bench.workloads import Load, choose_loads, draw_workload, model_of
from nanoinfer.lora.adapter_config import CONFIG_FILE
from nanoinfer.lora.adapter_weights import WEIGHTS_FILE, adaptable_layers, checkpoint_modules

LOADS = ("small", "read", "default")
NUM_READ = 32  # requests of the load that only reads, which has more otherwise
WARM_UP_TOKENS = 64  # of a sample, at most


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time each load without enable_lora, with it and no adapter, and with adapters; print a table."""
    device, counts = find_device(), sorted({*args.adapters})
    loads = [
        (name, replace(load, num_seqs=min(load.num_seqs, NUM_READ)) if name == "read" else load)
        for name in LOADS
        for load in choose_loads(name, device)
    ]
    options: dict[str, Any] = {"max_num_seqs": max(load.max_num_seqs for _, load in loads), "device": device}
    options |= {"max_model_len": max(load.longest for _, load in loads), "enable_prefix_caching": False}
    lora = {"enable_lora": True, "max_loras": counts[-1], "max_lora_rank": args.rank}
    figures: list[dict[str, Any]] = [{"load": name, "num_seqs": load.num_seqs} for name, load in loads]
    with model_of(args, device) as model, TemporaryDirectory() as folder:
        options |= model.options
        if device == "cpu":
            options["num_kvcache_blocks"] = 64
        with LLM(str(model.folder), **options) as llm:
            for one, (_, load) in zip(figures, loads, strict=True):
                one["without"] = time_load(llm, load, model.config.vocab_size, [None], args.runs)
        del llm  # or the next one would lie in memory beside it
        gc.collect()
        with LLM(str(model.folder), **options, **lora) as llm:
            write_adapter(llm, Path(folder), args.rank)
            requests = [LoRARequest(f"adapter {number}", number, folder) for number in range(1, counts[-1] + 1)]
            seconds = [time_adding(llm, one) for one in requests]
            print(f"{llm!r}: seconds to add an adapter of rank {args.rank}, median: {statistics.median(seconds):.3f}")
            print(f"tokens a second, in and out, median of {args.runs} runs; shares are of those without enable_lora")
            print_title("load", "requests", "without", "enabled, unused", *(f"{count} adapters" for count in counts))
            for one, (_, load) in zip(figures, loads, strict=True):
                one["unused"] = time_load(llm, load, model.config.vocab_size, [None], args.runs)
                for count in counts:
                    if count == counts[0] or count <= load.num_seqs:
                        one[str(count)] = time_load(llm, load, model.config.vocab_size, [*requests[:count]], args.runs)
                print_figures(one, counts)
    return {"model": str(model), "rank": args.rank, "loads": figures, "add": seconds, **describe_machine(device)}


def time_load(llm: LLM, load: Load, vocab_size: int, adapters: list[LoRARequest | None], num_runs: int) -> float:
    """Return tokens a second, in and out, of a load whose requests have these adapters by turns: of runs the median."""
    few = 1, min(load.output_len[1], WARM_UP_TOKENS)  # rows become fewer, as in the runs: each size has a graph
    run_load(llm, replace(load, output_len=few), 0, vocab_size, adapters)  # compiles and captures graphs
    return statistics.median(run_load(llm, load, 1 + index, vocab_size, adapters) for index in range(num_runs))


def run_load(llm: LLM, load: Load, seed: int, vocab_size: int, adapters: list[LoRARequest | None]) -> float:
    """Return tokens a second of one run."""
    workload = draw_workload(seed, load, vocab_size)
    prompts, params = [*workload.prompts], make_params(SamplingParams, workload, detokenize=False)
    given = [adapters[index % len(adapters)] for index in range(len(prompts))]
    started = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=None if adapters == [None] else given)
    seconds = perf_counter() - started
    num_out = sum(len(output.token_ids) for output in outputs)
    assert num_out == workload.num_output_tokens, "a request got another number of tokens than it asked for"
    return (workload.num_input_tokens + num_out) / seconds


def time_adding(llm: LLM, request: LoRARequest) -> float:
    started = perf_counter()
    llm.add_lora(request)
    return perf_counter() - started


def write_adapter(llm: LLM, folder: Path, rank: int) -> None:
    """Write an adapter with small random matrices for all layers of an engine that one can change."""
    engine: Any = llm.engine
    model, tensors = engine.runner.model, dict[str, torch.Tensor]()
    layers = adaptable_layers(model)
    for (path, shard), module in checkpoint_modules(model, layers).items():
        num_outputs, num_inputs = layers[path].num_outputs(shard), layers[path].full_shape[1]
        for which, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            tensors[f"base_model.model.{module}.lora_{which}.weight"] = (0.01 * torch.randn(shape)).bfloat16()
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def print_figures(one: dict[str, Any], counts: list[int]) -> None:
    speeds = [one.get(name) for name in ("unused", *map(str, counts))]
    shown = ["" if speed is None else f"{speed:,.0f} ({speed / one['without'] - 1:+.1%})" for speed in speeds]
    print_row(one["load"], one["num_seqs"], f"{one['without']:,.0f}", *shown)
