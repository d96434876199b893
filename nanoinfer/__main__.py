"""The command line: `nanoinfer run-batch`, or `python -m nanoinfer run-batch`."""

import argparse
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from nanoinfer.bench import cli as bench
from nanoinfer.config import CHOICES, EngineConfig
from nanoinfer.errors import JobError, NanoinferError

RUN_BATCH = """\
Answers each line of a JSONL file, and writes each answer as it comes.

A line is a request in OpenAI's batch format,
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 99}}
with /v1/completions and a prompt (a text, or a list of token ids) for plain text, or its body alone, which may have a
custom_id too:
  {"prompt": "The capital of France is", "temperature": 0}
Sampling fields are those of SamplingParams; a chat may have tools and chat_template_kwargs too. What a line leaves out
is as the model's generation_config.json recommends, and else as SamplingParams has it: max_tokens is 64. Of a body,
model, user and metadata are passed over; any other field that is not known is an error.

A result has OpenAI's form: id, custom_id, response, error; log-probabilities are as in nanoinfer, by token id. A line
that cannot be served gets an error with its number.
Results come in the order in which they finish; a line without a custom_id gets "line-" and its number; two lines with
the same custom_id are two requests.

Killed or stopped at any moment, the same command goes on where it was: nothing that is written is done again, and
nothing is lost. It needs the same input, model, --load-format, --seed, --max-tokens and --temperature; other options
may change. Lines may be added at the end of the input, such as those that had errors, mended."""

MEND = "add mended lines at the end of the input, and the same command answers them; old errors still count"

EXIT_CODES = """\
exit codes:
  0    every line has an answer
  1    the engine failed, or the output could not be written; the same command goes on
  2    nothing was done: a wrong option, or a model, input or output that cannot be used
  3    every line has a result, and some are errors
  4    stopped at more errors than --max-errors
  130  stopped by Ctrl-C; the same command goes on"""


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="nanoinfer", description="Offline LLM inference.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench.add_parser(commands)
    batch = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        description=RUN_BATCH,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    batch.add_argument("-i", "--input", type=Path, required=True, help="JSONL, perhaps gzipped")
    batch.add_argument("-o", "--output", type=Path, required=True, help="JSONL, not gzipped; it is added to")
    batch.add_argument("--max-tokens", type=int, default=argparse.SUPPRESS, help="for lines that do not say")
    batch.add_argument("--temperature", type=float, default=argparse.SUPPRESS, help="for lines that do not say")
    batch.add_argument("--max-errors", type=int, metavar="N", help="stop at more lines with errors than N")
    add_engine_options(batch.add_argument_group("the model and the engine"))
    batch.set_defaults(run=run)
    args = parser.parse_args(arguments)
    sys.exit(args.run(args))


def add_engine_options(group: Any) -> None:
    """An option for each field of EngineConfig, explained as there; one that is not given stays out of the result."""
    explained = dict(re.findall(r"^(\w+): (.*(?:\n {4}.*)*)", inspect.getdoc(EngineConfig) or "", re.MULTILINE))
    for field in fields(EngineConfig):
        kind = (*get_args(field.type), field.type)[0]  # of `int | None`, int
        options: dict[str, Any] = {"type": kind, "choices": CHOICES.get(field.name), "metavar": "VALUE"}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            help=" ".join(explained[field.name].split()).replace("%", "%%"),
            required=field.name == "model",
            default=argparse.SUPPRESS,
            **options,
        )


def run(args: argparse.Namespace) -> int:
    """Run the job and say how it went; the exit code."""
    from nanoinfer.batch.batch_job import run_batch  # imports PyTorch, which --help can do without
    from nanoinfer.llm import LLM

    options = {field.name: getattr(args, field.name) for field in fields(EngineConfig) if field.name in args}
    overrides = {name: getattr(args, name) for name in ("max_tokens", "temperature") if name in args}
    is_loaded = False

    def load() -> LLM:
        nonlocal is_loaded
        llm = LLM(**options)
        is_loaded = True
        return llm

    try:
        config = EngineConfig(**options)
        settings = f"{Path(config.model)} {config.load_format} {config.seed}"  # what the answers depend on
        given = {"settings": settings, "overrides": overrides, "max_errors": args.max_errors}
        summary = run_batch(load, args.input, args.output, **given)
    except (NanoinferError, OSError) as error:
        print(f"nanoinfer: {error}", file=sys.stderr)
        has_begun = is_loaded and isinstance(error, JobError)
        return 2 if isinstance(error, ValueError) and not has_begun else 1
    except KeyboardInterrupt:  # while the model was loaded, or a second one
        print("nanoinfer: interrupted; the same command goes on", file=sys.stderr)
        return 130
    exit_code, advice = {
        "interrupted": (130, "\nthe same command goes on from here"),
        "too many errors": (4, "\nraise --max-errors to go on"),
        "finished": (3, f"\n{MEND}") if summary.num_errors else (0, ""),
    }[summary.end]
    print(f"{summary}; see {args.output}{advice}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
