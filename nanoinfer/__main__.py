"""The command line: `nanoinfer COMMAND`, or `python -m nanoinfer COMMAND`."""

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from nanoinfer import __version__
from nanoinfer.bench import cli as bench
from nanoinfer.config import EngineConfig
from nanoinfer.errors import JobError, NanoinferError

EXAMPLE = """\
example:
  echo '{"messages": [{"role": "user", "content": "What is 2 + 2?"}]}' > questions.jsonl
  nanoinfer run-batch --model Qwen/Qwen3-0.6B -i questions.jsonl -o answers.jsonl --max-tokens 512

`nanoinfer COMMAND --help` lists the options of a command."""

RUN_BATCH = """\
Answers each line of a JSONL file, and writes each answer as soon as it is complete.

A line is a request in OpenAI's batch format,
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 99}}
with /v1/completions and a prompt for plain text (a text, a list of token ids, or a list of these; with "echo": true
it comes back before its completion), or its body alone, which may have a custom_id too:
  {"prompt": "The capital of France is", "temperature": 0}
Sampling fields are those of SamplingParams; a chat may have tools and chat_template_kwargs too. What a line leaves out
is as the model's generation_config.json recommends, and else as SamplingParams has it: max_tokens is 64. The fields
model, user and metadata of a body are passed over; any other field that is not known is an error.

A result has OpenAI's form, log-probabilities included: id, custom_id, response, error. A line that cannot be served
gets an error with its number.
Results come in the order in which they finish; a line without a custom_id gets "line-" and its number; two lines with
the same custom_id are two requests.

If a job is killed or stopped at any moment, the same command goes on where it was: nothing that is written is done
again, and nothing is lost. It needs the same input, model, --revision, --tokenizer, --hf-overrides, --load-format,
--seed, --system, --max-tokens, --temperature, --top-p and --top-k; other options may change. Lines may be added at the
end of the input, such as corrected versions of those that had errors."""

SAMPLING_OPTIONS = {"temperature": float, "top_p": float, "top_k": int}
MEND = "add mended lines at the end of the input, and the same command answers them; old errors still count"

EXIT_CODES = """\
exit codes:
  0    every line has an answer
  1    the engine failed, or the output could not be written; the same command goes on
  2    nothing was done: a wrong option, or a model, input or output that cannot be used
  3    every line has a result, and some are errors
  4    stopped at more errors than --max-errors
  130  stopped by Ctrl-C; the same command goes on"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> NoReturn:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="nanoinfer", description="Offline LLM inference.", epilog=EXAMPLE, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"nanoinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    add_run_batch(commands)
    bench.add_parser(commands)
    args = parser.parse_args(arguments)
    show_log()
    sys.exit(args.run(args))  # each command sets its own function, which returns the exit code


def add_run_batch(commands: Any) -> None:
    """Add the command that answers a file of requests."""
    batch = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        usage="nanoinfer run-batch --model MODEL -i FILE -o FILE [options]",
        description=RUN_BATCH,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    file: dict[str, Any] = {"type": a_file, "required": True, "metavar": "FILE"}
    batch.add_argument("-i", "--input", help="JSONL, may be gzipped", **file)
    batch.add_argument("-o", "--output", help="JSONL, added to if it exists", **file)
    limit = "for lines that do not say; none is up to the model's limit"
    batch.add_argument("--max-tokens", type=number_or_none, default=argparse.SUPPRESS, metavar="N", help=limit)
    for name, kind in SAMPLING_OPTIONS.items():
        option, what = f"--{name.replace('_', '-')}", "for lines that do not say"
        batch.add_argument(option, type=kind, default=argparse.SUPPRESS, help=what)
    batch.add_argument("--system", metavar="TEXT", help="a system message for chats that have none")
    batch.add_argument("--max-errors", type=int, metavar="N", help="stop at more lines with errors than N")
    add_engine_options(batch.add_argument_group("the model and the engine"))
    batch.set_defaults(run=run)


def add_engine_options(group: Any) -> None:
    """Add an option for each field of EngineConfig, explained as there; what is not given stays out of the result."""
    metavars: dict[Any, str] = {int: "N", float: "SHARE", Mapping[str, Any]: "JSON"}
    for field in fields(EngineConfig):
        kind = (*get_args(field.type), field.type)[0]  # int for `int | None`
        options: dict[str, Any] = {"required": field.default is MISSING, "default": argparse.SUPPRESS}
        explained, default = field.metadata["help"], field.default
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
            default = "on" if default else "off"
        else:
            reader = json_object if kind == Mapping[str, Any] else kind
            options |= {"type": reader, "choices": field.metadata["choices"], "metavar": metavars.get(kind)}
        if default not in (MISSING, None):
            explained += f" Default: {default}."
        group.add_argument(f"--{field.name.replace('_', '-')}", help=explained.replace("%", "%%"), **options)


def a_file(text: str) -> Path:
    """Refuse standard streams: a job reads its input twice, and what is done from its output."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is no file; a job needs files, so that it can go on after it was stopped")
    return Path(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""{text!r:.200} is no JSON object; give one such as '{{"name": 1}}'""")
    return value


def number_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def what_answers_depend_on(config: EngineConfig) -> list[str]:
    """Return the values of these options; of those that came later, only what is given, so that older jobs go on."""
    tokenizer = config.tokenizer and Path(config.tokenizer)
    later = {"revision": config.revision, "tokenizer": tokenizer, "hf_overrides": config.hf_overrides}
    later["quantization"] = config.quantization
    later["kv_cache_dtype"] = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    given = [f"{name}={value}" for name, value in later.items() if value]
    return [str(Path(config.model)), config.load_format, str(config.seed), *given]


def show_log() -> None:
    """Print the library's log, such as the line about a loaded model, on standard error."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanoinfer").setLevel(logging.INFO)


def run(args: argparse.Namespace) -> int:
    """Run the job, say how it went, and return the exit code."""
    from nanoinfer import LLM
    from nanoinfer.batch.batch_job import run_batch  # imports PyTorch, which --help can do without

    given: dict[str, Any] = vars(args)
    options = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
    overrides = {name: value for name, value in given.items() if name in ("max_tokens", *SAMPLING_OPTIONS)}
    is_loaded = False

    def load() -> LLM:
        nonlocal is_loaded
        llm = LLM(**options)
        is_loaded = True
        return llm

    try:
        config = EngineConfig(**options)
        settings = " ".join(what_answers_depend_on(config))
        summary = run_batch(
            load,
            args.input,
            args.output,
            settings=settings,
            overrides=overrides,
            system=args.system,
            max_errors=args.max_errors,
        )
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
