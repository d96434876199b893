"""nano-vllm's benchmark: how many tokens a second, and what share of what the hardware allows.

    python bench.py                          # Qwen3-0.6B with random weights on a GPU, the tiny checkpoint on a CPU
    python bench.py --size 8B --runs 3       # another size; each run draws a new workload
    python bench.py --model Qwen/Qwen3-0.6B  # real weights: a hub id or a folder

A forward pass is as fast with random weights as with trained ones, so none are downloaded. `nanoinfer bench` has the
rest: other loads and engines, traces of single steps, kernels.
"""

import argparse
import logging
import sys
from time import perf_counter

import torch

from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.bench.floor import compute_floor, measure_rates
from nanoinfer.bench.workloads import LOADS, SIZES, draw_workload, model_of


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanoinfer").setLevel(logging.INFO)  # how long each part of loading took
    device = "cuda" if torch.cuda.is_available() else "cpu"
    [load] = LOADS[device]["default"]  # 256 requests of 100 to 1,024 random tokens in and out; fewer on a CPU
    with model_of(args, device) as model:
        rates = measure_rates(device, model.config, args.tensor_parallel_size)
        llm = LLM(
            model.folder,
            **model.options,  # load_format="dummy" draws random weights
            max_model_len=min(4096, model.config.max_model_len),
            **{name: getattr(args, name) for name in ("tensor_parallel_size", "data_parallel_size", "kv_cache_dtype")},
        )
        with llm:
            options = {"temperature": 0.6, "top_k": args.top_k, "top_p": args.top_p, "ignore_eos": True}
            llm.generate([[1, 2, 3]] * args.data_parallel_size, SamplingParams(**options), use_tqdm=False)  # warms up
            for seed in range(args.runs):
                workload = draw_workload(seed, load, model.config.vocab_size)
                params = [SamplingParams(max_tokens=max_tokens, **options) for max_tokens in workload.max_tokens]
                llm.reset_prefix_cache()
                started = perf_counter()
                outputs = llm.generate(workload.prompts, params, use_tqdm=False)
                seconds = perf_counter() - started
                num_tokens = sum(len(output.token_ids) for output in outputs)
                options_of_floor = load.max_num_seqs, args.kv_cache_dtype, args.data_parallel_size
                floor = compute_floor(model.config, workload, rates, *options_of_floor).seconds
                print(
                    f"{model}, seed {seed}: {len(outputs)} requests, {workload.num_input_tokens:,} tokens in, "
                    f"{num_tokens:,} out in {seconds:.2f} s, {num_tokens / seconds:,.0f} tokens/s; "
                    f"floor {floor:.3g} s, {num_tokens / floor:,.0f} tokens/s; reached {floor / seconds:.1%}"
                )
    print(f"The floor is the least time that the hardware allows, at {rates}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="random weights of a size (Qwen3-0.6B on a GPU)")
    which.add_argument("--model", metavar="FOLDER_OR_ID", help="a checkpoint: a folder, a hub id, or tiny")
    parser.add_argument("--runs", type=int, default=1, help="timed runs, each with the next seed (1)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many tokens (all); Qwen3 recommends 20")
    parser.add_argument("--top-p", type=float, default=1.0, help="or from this share (1); Qwen3 recommends 0.95")
    parser.add_argument("--quantization", choices=["fp8", "int4"], help="round linear layers to 8 bits, or 4")
    parser.add_argument("--kv-cache-dtype", choices=["fp8", "int8"], default="auto", help="keys and values in 8 bits")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="number of GPUs (1)")
    parser.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="number of replicas (1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except NanoinferError as error:
        sys.exit(f"bench.py: {error}")
