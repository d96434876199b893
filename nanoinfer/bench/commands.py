"""Defines the command line of `nanoinfer bench`. Commands import their code when they run, as that takes seconds."""

import argparse
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

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


class Command(NamedTuple):
    """Describes a command. function: of a module in this folder; it takes the arguments, and returns all figures."""

    function: str
    description: str
    epilog: str | None = None


COMMANDS = {
    "throughput": Command("throughput.run", "time one load, and set it against the hardware's floor", WHICH_LOADS),
    "loads": Command("throughput.run", "time several loads, each against its floor", WHICH_LOADS),
    "text": Command("throughput.run_text", "time text in and text out, plain and with structured outputs"),
    "trace": Command("trace.run", "draw a run as a page, and trace steps of host and GPU", WHICH_LOADS),
    "embed": Command("throughput.run_embed", "time embeddings, beside sentence-transformers if installed"),
    "kernels": Command("kernels.run", "time attention and products, or all-reduces of several GPUs"),
    "start": Command("fresh_processes.run_start", "time the first start, which compiles kernels, and later ones"),
    "host": Command("host.run", "time what steps and prompts cost the host alone"),
    "turns": Command("fresh_processes.run_turns", "time this version and other checkouts in turns", WHICH_LOADS),
    "on-policy": Command("on_policy.run", "compare log-probabilities with a trainer's forward pass"),
    "rewriting": Command("rewriting.run", "time proposals (speculative_config) on repetitive texts"),
    "adapters": Command("adapters.run", "time LoRA adapters, one and many in a batch"),
    "images": Command("pictures.run", "time pictures that a model reads, against a floor"),
    "report": Command("report.run", "print one Markdown table of the figures that --json wrote"),
}
OF_LOADS = "throughput loads text trace start turns"  # whole runs of an engine with all its options
OF_ONE_LOAD = "throughput trace"
# What takes the place of a load's own numbers.
SIZE_OPTIONS = {
    "--num-seqs": "as many requests instead",
    "--input-len": "the most tokens of a prompt instead",
    "--output-len": "the most tokens of a completion instead",
    "--shared-prefix": "equal tokens before all prompts",
    "--max-num-seqs": "the most sequences that run at once (512)",
}
CHECKPOINT: dict[str, Any] = {"metavar": "FOLDER_OR_ID", "help": "a checkpoint: a folder, a hub id, or tiny"}


def add_parser(subparsers: Any) -> None:
    """Add `bench` and its commands; each sets `run`, a function of the parsed arguments that returns an exit code."""
    help = "measure how fast this is"
    bench = subparsers.add_parser("bench", help=help, description="Measure how fast this is.", formatter_class=Layout)
    commands = bench.add_subparsers(required=True, metavar="COMMAND", title="commands")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, (function, description, epilog) in COMMANDS.items():
        texts = {"help": description, "description": f"{description[0].upper()}{description[1:]}.", "epilog": epilog}
        parsers[name] = commands.add_parser(name, **texts, formatter_class=Layout)
        parsers[name].set_defaults(run=run, function=function)

    def add(names: str, option: str, **settings: Any) -> None:
        for name in names.split():
            parsers[name].add_argument(option, **settings)

    _add_own_options(add)
    for name in f"{OF_LOADS} rewriting adapters".split():
        which = parsers[name].add_mutually_exclusive_group()
        which.add_argument("--size", choices=SIZES, help="random weights of a size (Qwen3-0.6B on a GPU)")
        which.add_argument("--model", **CHECKPOINT)
    _add_options_of_loads(add)
    for name in OF_LOADS.split():
        add_engine_options(parsers[name], names=OPTIONS.keys() - {"quantization"})
        parsers[name].set_defaults(**OPTIONS)
    parsers["text"].set_defaults(top_k=20, top_p=0.95)  # what Qwen3 recommends
    parsers["rewriting"].set_defaults(quantization=None)
    recorded = f"{OF_LOADS} embed host on-policy rewriting adapters images"
    add(recorded, "--json", metavar="FILE", type=Path, help="write all figures here")


def _add_own_options(add: Callable[..., None]) -> None:
    """Add what single commands have. add: takes the names of commands, and then what `add_argument` takes."""
    files: dict[str, Any] = {"nargs": "+", "help": "of throughput, loads, text, start, host or turns"}
    add("report", "files", type=Path, metavar="FILE", **files)
    add("trace", "folder", type=Path, metavar="FOLDER", help="where the page, the trace and its picture go")
    add("on-policy", "--model", required=True, **CHECKPOINT)
    add("on-policy", "--dtype", choices=DTYPES, help="of both (float32 on a CPU, bfloat16 on a GPU)")
    add("on-policy", "--temperature", type=float, default=1.0, help="of the samples (1)")
    add("kernels", "--gpus", type=positive, default=1, metavar="N", help="time all-reduces over N GPUs")
    add("kernels", "--quantization", choices=("fp8", "int4"), help="time products in fewer bits; of FP8 experts, too")
    add("rewriting", "--method", choices=METHODS, default="suffix", help="of speculative_config (suffix)")
    most: dict[str, Any] = {"type": positive, "default": 8, "metavar": "N", "help": "the most for a row (8)"}
    add("rewriting", "--num-speculative-tokens", **most)
    add("rewriting", "--only", metavar="WORD", help="only texts that have it in their names, such as JSON")
    add("rewriting", "--requests", type=positive, nargs="+", metavar="N", help="only of so many at once")
    counts: dict[str, Any] = {"type": positive, "nargs": "+", "default": [1, 8, 64], "metavar": "N"}
    add("adapters", "--adapters", help="how many in a batch (1 8 64)", **counts)
    add("adapters", "--rank", type=positive, default=16, metavar="N", help="of the adapters (16)")
    add("images", "--size", choices=("8B", "tiny"), help="of Qwen3-VL, random weights (8B on a GPU)")
    add("images", "--num-images", type=positive, metavar="N", help="how many pictures (1000 on a GPU)")
    embedder = {"dest": "embedding_model", "help": "whose sizes (Qwen3-0.6B's on a GPU)"}
    add("embed", "--model", choices=EMBEDDERS, **embedder)
    lengths = {"action": "append", "help": "of 20 to 60 tokens, or 512 to 2,048"}
    add("embed", "--texts", choices=("short", "long"), **lengths)
    add("embed", "--max-num-seqs", type=positive, default=512, metavar="N", help="the most texts of a step (512)")
    seeded = f"{OF_LOADS} on-policy rewriting images embed"
    add(seeded, "--seed", type=int, default=0, help="of what is drawn at random (0)")


def _add_options_of_loads(add: Callable[..., None]) -> None:
    """Add what says which loads are run, how often, and by which engine."""
    add(OF_ONE_LOAD, "--load", choices=NAMES, default="default", help="see below (default)")
    for option, what in SIZE_OPTIONS.items():
        add(OF_ONE_LOAD, option, type=positive, metavar="N", help=what)
    add(OF_ONE_LOAD, "--n", type=positive, metavar="N", dest="num_samples", help="samples of each prompt instead")
    add("loads", "names", nargs="*", type=load_name, metavar="LOAD", help="all, if none is named")
    others: dict[str, Any] = {"action": "append", "default": []}
    add("loads", "--against", choices=ENGINES, help="then time this engine too, if it is installed", **others)
    add("loads", "--picture", type=Path, metavar="FILE", help="draw all figures, as .svg or .png")
    add("turns", "folders", nargs="+", type=Path, metavar="CHECKOUT", help="folders that have nanoinfer/ in them")
    of_turns: dict[str, Any] = {"nargs": "+", "type": load_name, "default": ["default"], "help": "see below (default)"}
    add("turns", "--loads", dest="names", metavar="LOAD", **of_turns)
    add("text", "--tokenizer", metavar="FOLDER", help="a folder with a tokenizer, for random weights")
    add(OF_LOADS, "--top-k", type=int, metavar="K", help="top-k filtering (off); Qwen3 recommends 20")
    add(OF_LOADS, "--top-p", type=float, metavar="P", help="top-p filtering (off); Qwen3's is 0.95")
    in_fewer_bits = {"choices": QUANTIZATIONS, "help": "round linear layers to 8 bits, or 4"}
    add(f"{OF_LOADS} adapters", "--quantization", **in_fewer_bits)
    by_engine = {"default": "nanoinfer", "help": "another, where it is installed"}
    add("throughput loads", "--engine", choices=ENGINES, **by_engine)
    add("text", "--engine", choices=("nanoinfer", "vllm"), **by_engine)
    for names, count, what in (
        ("throughput loads text adapters", 1, "timed runs of each load, each with the next seed"),
        ("turns", 3, "timed runs, each with the next seed"),
        ("start", 3, "later starts, of which the median is taken"),
    ):
        add(names, "--runs", type=positive, default=count, help=f"{what} ({count})")


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
