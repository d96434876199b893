"""The command line of `nanoinfer bench`. What a command runs is imported when it runs, as that takes seconds."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from nanoinfer.bench.engines import ENGINES, OPTIONS
from nanoinfer.bench.report import describe_source
from nanoinfer.bench.workloads import EMBEDDERS, LOADS, SIZES
from nanoinfer.cli import Layout, add_engine_options
from nanoinfer.config import DTYPES, QUANTIZATIONS
from nanoinfer.errors import NanoinferError
from nanoinfer.speculative_config import METHODS

NAMES = LOADS["cuda"].keys()
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


# Of throughput and trace, what takes the place of a load's own numbers.
SIZE_OPTIONS = {
    "--num-seqs": "as many requests instead",
    "--input-len": "the most tokens of a prompt instead",
    "--output-len": "the most tokens of a completion instead",
    "--shared-prefix": "equal tokens before all prompts",
    "--max-num-seqs": "the most sequences that run at once (512)",
}


def add_parser(subparsers: Any) -> None:
    """Add `bench` and its commands; each sets `run`, a function of the parsed arguments that returns an exit code."""
    help = "measure how fast this is"
    bench = subparsers.add_parser("bench", help=help, description="Measure how fast this is.", formatter_class=Layout)
    commands = bench.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def add(name: str, function: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
        """Add a command. function: of a module in this folder; it takes the arguments, and returns all figures."""
        parser: argparse.ArgumentParser = commands.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            epilog=epilog,
            formatter_class=Layout,
        )
        parser.set_defaults(run=run, function=function)
        return parser

    vs_floor = "time one load, and set it against the hardware's floor"
    throughput = add("throughput", "throughput.run", vs_floor, WHICH_LOADS)
    loads = add("loads", "throughput.run", "time several loads, each against its floor", WHICH_LOADS)
    text = add("text", "throughput.run_text", "time text in and text out, plain and with structured outputs")
    trace = add("trace", "trace.run", "draw a run as a page, and trace steps of host and GPU", WHICH_LOADS)
    embed = add("embed", "throughput.run_embed", "time embeddings, beside sentence-transformers if installed")
    kernels = add("kernels", "kernels.run", "time attention and products, or all-reduces of several GPUs")
    start = add("start", "fresh_processes.run_start", "time the first start, which compiles kernels, and later ones")
    host = add("host", "host.run", "time what steps and prompts cost the host alone")
    turns = add("turns", "fresh_processes.run_turns", "time this version and other checkouts in turns", WHICH_LOADS)
    on_policy = add("on-policy", "on_policy.run", "compare log-probabilities with a trainer's forward pass")
    rewriting = add("rewriting", "rewriting.run", "time proposals (speculative_config) on repetitive texts")
    adapters = add("adapters", "adapters.run", "time LoRA adapters, one and many in a batch")
    images = add("images", "pictures.run", "time pictures that a model reads, against a floor")
    report = add("report", "report.run", "print one Markdown table of the figures that --json wrote")

    report.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="of throughput, loads, text, start, host or turns"
    )
    loads.add_argument("names", nargs="*", type=load_name, metavar="LOAD", help="all, if none is named")
    loads.add_argument(
        "--against", choices=ENGINES, action="append", default=[], help="then time this engine too, if it is installed"
    )
    loads.add_argument("--picture", type=Path, metavar="FILE", help="draw all figures, as .svg or .png")
    turns.add_argument("folders", nargs="+", type=Path, metavar="CHECKOUT", help="folders that have nanoinfer/ in them")
    of_turns: dict[str, Any] = {"nargs": "+", "type": load_name, "default": ["default"], "help": "see below (default)"}
    turns.add_argument("--loads", dest="names", metavar="LOAD", **of_turns)
    trace.add_argument("folder", type=Path, metavar="FOLDER", help="where the page, the trace and its picture go")
    checkpoint: dict[str, Any] = {"metavar": "FOLDER_OR_ID", "help": "a checkpoint: a folder, a hub id, or tiny"}
    on_policy.add_argument("--model", required=True, **checkpoint)
    on_policy.add_argument("--dtype", choices=DTYPES, help="of both (float32 on a CPU, bfloat16 on a GPU)")
    on_policy.add_argument("--temperature", type=float, default=1.0, help="of the samples (1)")
    on_policy.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    kernels.add_argument("--gpus", type=positive, default=1, metavar="N", help="time all-reduces over N GPUs")
    kernels.add_argument(
        "--quantization", choices=("fp8", "int4"), help="time products in fewer bits; of FP8 experts, too"
    )
    which = rewriting.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="random weights of a size (Qwen3-0.6B on a GPU)")
    which.add_argument("--model", **checkpoint)
    rewriting.add_argument("--method", choices=METHODS, default="suffix", help="of speculative_config (suffix)")
    tokens: dict[str, Any] = {"type": positive, "default": 8, "metavar": "N", "help": "the most for a row (8)"}
    rewriting.add_argument("--num-speculative-tokens", **tokens)
    rewriting.add_argument("--only", metavar="WORD", help="only texts that have it in their names, such as JSON")
    rewriting.add_argument("--requests", type=positive, nargs="+", metavar="N", help="only of so many at once")
    rewriting.add_argument("--seed", type=int, default=0, help="of the texts (0)")
    rewriting.set_defaults(quantization=None)
    which = adapters.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="random weights of a size (Qwen3-0.6B on a GPU)")
    which.add_argument("--model", **checkpoint)
    adapters.add_argument("--quantization", choices=QUANTIZATIONS, help="round linear layers to 8 bits, or 4")
    of_adapters: dict[str, Any] = {"type": positive, "nargs": "+", "default": [1, 8, 64], "metavar": "N"}
    adapters.add_argument("--adapters", help="how many in a batch (1 8 64)", **of_adapters)
    adapters.add_argument("--rank", type=positive, default=16, metavar="N", help="of the adapters (16)")
    adapters.add_argument("--runs", type=positive, default=1, help="timed runs of each load (1)")
    images.add_argument("--size", choices=("8B", "tiny"), help="of Qwen3-VL, random weights (8B on a GPU)")
    images.add_argument("--num-images", type=positive, metavar="N", help="how many pictures (1000 on a GPU)")
    images.add_argument("--seed", type=int, default=0, help="of the pictures (0)")
    for parser in (throughput, trace):
        parser.add_argument("--load", choices=NAMES, default="default", help="see below (default)")
        for option, what in SIZE_OPTIONS.items():
            parser.add_argument(option, type=positive, metavar="N", help=what)
        parser.add_argument(
            "--n", type=positive, metavar="N", dest="num_samples", help="samples of each prompt instead"
        )
    for parser in (throughput, loads, text, trace, start, turns):
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--size", choices=SIZES, help="random weights of a size (Qwen3-0.6B on a GPU)")
        which.add_argument("--model", **checkpoint)
        parser.add_argument("--seed", type=int, default=0, help="seed of the first workload (0)")
        parser.add_argument("--top-k", type=int, metavar="K", help="top-k filtering (off); Qwen3 recommends 20")
        parser.add_argument("--top-p", type=float, metavar="P", help="top-p filtering (off); Qwen3's is 0.95")
        parser.add_argument("--quantization", choices=QUANTIZATIONS, help="round linear layers to 8 bits, or 4")
        add_engine_options(parser, names=OPTIONS.keys() - {"quantization"})
        parser.set_defaults(**OPTIONS)
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
    for parser in (throughput, loads, text, trace, start, host, on_policy, rewriting, adapters, images, embed, turns):
        parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures here")


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
    args.started = perf_counter()  # before PyTorch is imported, which a user waits for too
    module, function = args.function.split(".")
    try:
        figures = getattr(import_module(f"nanoinfer.bench.{module}"), function)(args)
    except NanoinferError as error:
        print(f"nanoinfer bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    figures = {"command": sys.argv, "options": options, **figures}
    if "hardware" in figures:
        print(describe_source(figures))  # whoever reports a figure of their machine has all that belongs to it
    if getattr(args, "json", None):
        text = json.dumps(figures, indent=2, default=str)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0
