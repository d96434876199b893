"""The command line of `nanoinfer bench`. What takes seconds to import is imported by the commands that need it."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from nanoinfer import SamplingParams
from nanoinfer.bench.engines import ENGINES, check_engine, engine_options, make_params, own_options
from nanoinfer.bench.throughput import benchmark, describe_machine
from nanoinfer.bench.workloads import LOADS, SIZES, Load, choose_loads, choose_model, draw_workload
from nanoinfer.cli import Layout
from nanoinfer.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from nanoinfer.errors import ConfigError, NanoinferError

NAMES = LOADS["cuda"].keys()
EMBEDDERS = ("qwen3-0.6B", "bert-base", "modernbert-large", "tiny")
WHICH_LOADS = """\
loads, with how many requests and tokens (far fewer on a CPU):
  default  256 requests of 100 to 1,024 tokens in and out: nano-vllm's benchmark
  small    1, 4 and 16 requests of 128 to 512 in and 256 out
  steady   4,096 requests of 100 to 1,024 in and out
  shared   default, with 2,048 tokens that all prompts begin with
  samples  32 requests of 8 samples, 1,100 in, and 512 out for each sample
  long     8 requests of 32,768 in and 512 out
  read     512 requests of 1,500 to 2,500 in and 1 out
  fewshot  2,048 requests of 50 to 150 in after 2,000 that all begin with, and 4 out
  short    4,096 requests of 20 to 60 in and 8 out
  logprobs 128 requests of 2,000 in with prompt_logprobs=1, and 1 out
  logprobs_ids  the same 128 of 2,000 with detokenize=False, and 1 out
  score    4 answers of 10 tokens, scored after each of 1,024 prompts of 500
  book     8 requests of 30,000 in and 16 out"""


def add_parser(subparsers: Any) -> None:
    """Add `bench` and its commands; each sets `run`, a function of the parsed arguments that returns an exit code."""
    help = "measure how fast this is"
    bench = subparsers.add_parser("bench", help=help, description="Measure how fast this is.", formatter_class=Layout)
    commands = bench.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def add(name: str, function: Any, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            epilog=epilog,
            formatter_class=Layout,
        )
        parser.set_defaults(run=run, function=function)
        return parser

    throughput = add("throughput", run_loads, "time one load, and set it against the hardware's floor", WHICH_LOADS)
    loads = add("loads", run_loads, "time several loads, each against its floor", WHICH_LOADS)
    text = add("text", run_text, "time text in and text out, plain and with structured outputs")
    trace = add(
        "trace",
        run_trace,
        "draw a run as a page, and trace steps of host and GPU",
        WHICH_LOADS,
    )
    embed = add("embed", run_embed, "time embeddings, beside sentence-transformers if installed")
    kernels = add("kernels", run_kernels, "time attention and products, or all-reduces of several GPUs")
    start = add("start", run_start, "time the first start, which compiles kernels, and later ones")
    host = add(
        "host",
        run_host,
        "time what steps and prompts cost the host alone",
    )
    turns = add("turns", run_turns, "time this version and other checkouts in turns", WHICH_LOADS)
    on_policy = add("on-policy", run_on_policy, "compare log-probabilities with a trainer's forward pass")
    report = add("report", run_report, "print one Markdown table of the figures that --json wrote")

    report.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="of throughput, loads, text, start, host or turns"
    )
    loads.add_argument("names", nargs="*", type=load_name, metavar="LOAD", help="all, if none is named")
    loads.add_argument(
        "--against", choices=ENGINES, action="append", default=[], help="then time this engine too, if it is installed"
    )
    loads.add_argument("--picture", type=Path, metavar="FILE", help="draw all figures, as .svg or .png")
    turns.add_argument("folders", nargs="+", type=Path, metavar="CHECKOUT", help="folders that have nanoinfer/ in them")
    turns.add_argument(
        "--loads", nargs="+", type=load_name, default=["default"], metavar="LOAD", help="see below (default)"
    )
    trace.add_argument("folder", type=Path, metavar="FOLDER", help="where the page, the trace and its picture go")
    on_policy.add_argument(
        "--model", required=True, metavar="FOLDER_OR_ID", help="a checkpoint: a folder, a hub id, or tiny"
    )
    on_policy.add_argument("--dtype", choices=DTYPES, help="of both (float32 on a CPU, bfloat16 on a GPU)")
    on_policy.add_argument("--temperature", type=float, default=1.0, help="of the samples (1)")
    on_policy.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    kernels.add_argument("--gpus", type=positive, default=1, metavar="N", help="time all-reduces over N GPUs")
    kernels.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="time products in fewer bits; of FP8 experts, too"
    )
    for parser in (throughput, trace):
        add_sizes(parser)
    for parser in (throughput, loads, text, trace, start, turns):
        add_model_and_engine(parser)
    turns.add_argument("--runs", type=positive, default=3, help="timed runs, each with the next seed (3)")
    start.add_argument("--runs", type=positive, default=3, help="later starts, of which the median is taken (3)")
    for parser, engines in ((throughput, [*ENGINES]), (loads, [*ENGINES]), (text, ["nanoinfer", "vllm"])):
        parser.add_argument("--engine", choices=engines, default="nanoinfer", help="another, where it is installed")
        parser.add_argument("--runs", type=positive, default=1, help="timed runs, each with the next seed (1)")
    text.add_argument("--tokenizer", metavar="FOLDER", help="a folder with a tokenizer, for random weights")
    text.set_defaults(top_k=20, top_p=0.95)  # what Qwen3 recommends
    embed.add_argument("--model", choices=EMBEDDERS, dest="embedding_model", help="whose sizes (Qwen3-0.6B's on a GPU)")
    embed.add_argument(
        "--texts", choices=("short", "long"), action="append", help="of 20 to 60 tokens, or 512 to 2,048"
    )
    embed.add_argument("--max-num-seqs", type=positive, default=512, metavar="N", help="the most texts of a step (512)")
    embed.add_argument("--seed", type=int, default=0, help="seed of weights and texts (0)")
    for parser in (throughput, loads, text, trace, start, host, on_policy, embed, turns):
        parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures here")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", choices=NAMES, default="default", help="see below (default)")
    parser.add_argument("--num-seqs", type=positive, metavar="N", help="as many requests instead")
    parser.add_argument("--input-len", type=positive, metavar="N", help="the most tokens of a prompt instead")
    parser.add_argument("--output-len", type=positive, metavar="N", help="the most tokens of a completion instead")
    parser.add_argument("--shared-prefix", type=positive, metavar="N", help="equal tokens before all prompts")
    parser.add_argument("--n", type=positive, metavar="N", dest="num_samples", help="samples of each prompt instead")
    parser.add_argument("--max-num-seqs", type=positive, metavar="N", help="the most sequences that run at once (512)")


def add_model_and_engine(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="random weights of a size (Qwen3-0.6B on a GPU)")
    which.add_argument("--model", metavar="FOLDER_OR_ID", help="a checkpoint: a folder, a hub id, or tiny")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first workload (0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="top-k filtering (off); Qwen3 recommends 20")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="top-p filtering (off); Qwen3's is 0.95")
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N", help="number of GPUs (1)")
    parser.add_argument("--data-parallel-size", type=positive, default=1, metavar="N", help="number of replicas (1)")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="round the weights of linear layers to 8 bits, or 4"
    )
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="keys and values in 8 bits")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--attention-backend", default="auto", help="nanoinfer's: auto, flash_attn, triton or torch")
    parser.add_argument("--model-impl", default="auto", help="whose layers: auto, nanoinfer or transformers")
    parser.add_argument("--compile", action="store_true", help="compile layers of transformers")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def load_name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is no load; choose from {', '.join(NAMES)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Run a command and return its exit code; 2 for a wrong option, or a model that cannot be used."""
    options = {name: value for name, value in vars(args).items() if name not in ("run", "function", "json")}
    try:
        figures = args.function(args)
    except NanoinferError as error:
        print(f"nanoinfer bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if getattr(args, "json", None):
        text = json.dumps({"command": sys.argv, "options": options, **figures}, indent=2, default=str)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def run_loads(args: argparse.Namespace) -> dict[str, Any]:
    """Run `throughput` or `loads`."""
    started = perf_counter()  # before PyTorch, whose import a user waits for too
    device = find_device()
    loads = loads_of(args, device)
    check_engine(args, loads)
    figures = {args.engine: benchmark(loads, device, args, started)}
    for engine in getattr(args, "against", ()):
        other = argparse.Namespace(**{**vars(args), "engine": engine})
        try:
            check_engine(other, loads)
            figures[engine] = benchmark(loads, device, other, perf_counter())
        except ConfigError as error:
            print(f"{engine} is left out: {error}")
    if getattr(args, "picture", None):
        from nanoinfer.bench.picture import draw_loads

        try:
            draw_loads(figures, args.picture)
        except ImportError:
            print("no picture, as matplotlib is not installed: pip install matplotlib")
    own = figures.pop(args.engine)
    return {**own, "against": figures} if figures else own


def run_text(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import text

    return text.run(find_device(), args)


def run_embed(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import embed

    return embed.run(find_device(), args)


def run_trace(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer import LLM
    from nanoinfer.bench.trace import trace

    if args.data_parallel_size > 1:
        raise ConfigError("a trace shows the GPU of one engine; leave --data-parallel-size out")
    device = find_device()
    _, load = loads_of(args, device)[-1]
    with tempfile.TemporaryDirectory() as scratch:
        model = choose_model(args.model, args.size, device, Path(scratch), args.quantization)
        options = engine_options(model, load, args) | own_options(args)
        workload = draw_workload(args.seed, load, model.config.vocab_size)
        params = make_params(SamplingParams, workload, n=workload.num_samples, top_k=args.top_k, top_p=args.top_p)
        with LLM(model.folder, **model.options, **options) as llm:
            return {"trace": trace(llm, workload, params, args.folder), **describe_machine(device)}


def run_kernels(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import all_reduces, fp8_kernels, int4_kernels, kernels

    if args.quantization == "fp8":
        fp8_kernels.run()
    elif args.quantization == "int4":
        int4_kernels.run()
    elif args.gpus > 1:
        all_reduces.run(args.gpus)
    else:
        kernels.run()
    return {}


def run_start(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import start

    return start.measure(find_device(), args)


def run_host(_args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import host, host_replicas

    loads = LOADS["cuda"]
    figures = {
        "host": host.measure(),
        "calls": {name: host.measure_call(loads[name][0]) for name in ("fewshot", "short")},
    }
    replicas = {name: host_replicas.measure(loads[name][0]) for name in ("steady", "fewshot", "short")}
    return {**figures, "replicas": replicas, **describe_machine("cpu")}


def run_turns(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import turns

    device = find_device()
    loads = [(name, load) for name in args.loads for load in choose_loads(name, device)]
    return turns.measure(loads, device, args)


def run_on_policy(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import on_policy

    return on_policy.measure(find_device(), args)


def run_report(args: argparse.Namespace) -> dict[str, Any]:
    from nanoinfer.bench import report

    report.print_report(args.files)
    return {}


def loads_of(args: argparse.Namespace, device: str) -> list[tuple[str, Load]]:
    """Return the loads that are asked for, with their names."""
    if "names" in args:
        return [(name, load) for name in args.names or NAMES for load in choose_loads(name, device)]
    sizes = ("num_seqs", "input_len", "output_len", "shared_prefix", "num_samples", "max_num_seqs")
    loads = choose_loads(args.load, device, **{size: getattr(args, size) for size in sizes})
    return [(args.load, load) for load in loads]


def find_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
