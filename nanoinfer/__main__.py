"""The command line: `nanoinfer COMMAND`, or `python -m nanoinfer COMMAND`."""

import argparse
import logging
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from nanoinfer import SamplingParams, __version__
from nanoinfer.bench import commands as bench
from nanoinfer.cli import (
    SAMPLING_OPTIONS,
    Layout,
    Parser,
    a_text,
    add_engine_options,
    add_sampling_options,
    given_options,
    json_object,
    option_string,
)
from nanoinfer.config import ANSWERS_DEPEND_ON, EngineConfig
from nanoinfer.engine.interrupts import Terminated, terminable
from nanoinfer.errors import JobError, NanoinferError

EXAMPLE = """\
example:
  echo '{"messages": [{"role": "user", "content": "What is 2 + 2?"}]}' > questions.jsonl
  nanoinfer run-batch --model Qwen/Qwen3-0.6B -i questions.jsonl -o answers.jsonl --max-tokens 512

`nanoinfer COMMAND --help` lists the options of a command."""

# The options of run-batch that answers depend on: a job goes on with the same ones only.
JOB_OPTIONS = [*ANSWERS_DEPEND_ON, "system", "lora", "max_tokens", *SAMPLING_OPTIONS]
SAME_OPTIONS = textwrap.fill(", ".join(map(option_string, JOB_OPTIONS)), 118, break_on_hyphens=False)

MAX_JOB_LORAS = 8  # adapters on the device at a time, unless --max-loras says more

RUN_BATCH = f"""\
Answers each line of a JSONL file, and writes each answer as soon as it is complete.

A line is a request in OpenAI's batch format,
  {{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {{"messages": [...], "max_tokens": 99}}}}
with /v1/completions and a prompt for plain text (a text, a list of token ids, or a list of these; with "echo": true
it comes back before its completion), with /v1/embeddings and an input to embed, or its body alone, which may have a
custom_id too:
  {{"prompt": "The capital of France is", "temperature": 0}}
Sampling fields are those of SamplingParams; a chat may have tools and chat_template_kwargs too. What a line leaves out
is as the model's generation_config.json recommends, and else as SamplingParams has it: max_tokens is 64. Fields of
OpenAI's that cannot change an answer are passed over; any other field that is not served is an error.

A result has OpenAI's form, log-probabilities included: id, custom_id, response, error. A line that cannot be served
gets an error with its number.
Results come in the order in which they finish; a line without a custom_id gets "line-" and its number; two lines with
the same custom_id are two requests.

If a job is killed or stopped at any moment, the same command goes on where it was: nothing that is written is done
again, and nothing is lost. It needs the same input, and the same
{SAME_OPTIONS}.
Other options may change. Lines may be added at the end of the input. Lines with errors are done again with
--retry-errors alone; they may have been corrected."""

CHAT = """\
Answers each line that you type, as its tokens come, and remembers the conversation. /reset forgets it, Ctrl-C stops an
answer, /quit or Ctrl-D leaves. Lines may also be piped in, as UTF-8; the exit code is 3 if one of them has no answer:
  echo 'What is 312 + 48?' | nanoinfer chat tiny --temperature 0

Sampling is as the model's generation_config.json recommends, and an answer may be as long as the model allows."""

RETRY = "To do lines with errors again, mend them, or raise max_model_len, say, and add --retry-errors to the command."

EXIT_CODES = """\
exit codes:
  0    every line has an answer
  1    the engine failed, or the output could not be written; the same command goes on
  2    nothing was done: a wrong option, or a model, input or output that cannot be used
  3    every line has a result, and some are errors
  4    stopped at more errors than --max-errors
  130  stopped by Ctrl-C; the same command goes on
  143  stopped by SIGTERM, as job schedulers send it; the same command goes on

With --dry-run: 0 if all lines are requests, 3 if some are not, 2 as above."""
MODELS = """\
List what `architectures` in config.json may say, which takes a few seconds. docs/models.md tells which checkpoints have
which, and what is slower with layers of transformers."""


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = Parser(prog="nanoinfer", description="Offline LLM inference.", epilog=EXAMPLE, formatter_class=Layout)
    parser.add_argument("--version", action="version", version=f"nanoinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    add_run_batch(commands)
    add_chat(commands)
    bench.add_parser(commands)
    models = commands.add_parser("models", help="list the architectures that load", description=MODELS)
    models.set_defaults(run=list_models)
    args = parser.parse_args(arguments)
    show_log()
    sys.exit(args.run(args))  # each command sets its own function, which returns the exit code


def add_run_batch(commands: Any) -> None:
    """Add the command that answers a file of requests."""
    batch = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        usage="nanoinfer run-batch --model MODEL -i FILE (-o FILE | --dry-run) [options]",
        description=RUN_BATCH,
        epilog=EXIT_CODES,
        formatter_class=Layout,
    )
    file: dict[str, Any] = {"type": a_file, "metavar": "FILE"}
    batch.add_argument("-i", "--input", help="JSONL, may be gzipped", required=True, **file)
    batch.add_argument("-o", "--output", help="JSONL, added to if it exists", **file)
    batch.add_argument("--dry-run", action="store_true", help="count lines, errors and prompt tokens; answer nothing")
    batch.add_argument("--limit", type=int, metavar="N", help="the first N lines alone; the rest may follow later")
    batch.add_argument("--retry-errors", action="store_true", help="do lines with errors again, and replace these")
    add_sampling_options(batch, "for lines that do not say")
    batch.add_argument("--system", type=a_text, metavar="TEXT", help="a system message for chats that have none")
    adapters = "an adapter of peft, for lines with this name as their model; may be repeated"
    batch.add_argument("--lora", type=an_adapter, action="append", metavar="NAME=FOLDER", help=adapters)
    json_of_lines = "of JSON that lines ask for:"
    batch.add_argument("--disable-any-whitespace", action="store_true", help=f"{json_of_lines} no white space in it")
    closed = f"{json_of_lines} no properties but those that its schema lists"
    batch.add_argument("--disable-additional-properties", action="store_true", help=closed)
    batch.add_argument("--max-errors", type=int, metavar="N", help="stop at more lines with errors than N")
    add_engine_options(batch.add_argument_group("the model and the engine"))
    batch.set_defaults(run=partial(run, batch))


def add_chat(commands: Any) -> None:
    """Add the command that talks."""
    chat = commands.add_parser(
        "chat",
        help="talk to a model",
        usage="nanoinfer chat MODEL [options]",
        description=CHAT,
        formatter_class=Layout,
    )
    chat.add_argument("named", nargs="?", metavar="MODEL", help="the model, if --model does not name it")
    add_sampling_options(chat, "in place of what the model recommends")
    chat.add_argument(
        "--system", type=a_text, metavar="TEXT", help="a system message, which stands before the conversation"
    )
    template = 'what else the chat template understands, such as {"enable_thinking": false}'
    chat.add_argument("--chat-template-kwargs", type=json_object, metavar="JSON", help=template)
    add_engine_options(chat.add_argument_group("the model and the engine"), needs_model=False)
    chat.set_defaults(run=run_chat, parser=chat)


def list_models(_args: argparse.Namespace) -> int:
    """Print what `architectures` in a config.json may say, and return the exit code."""
    from nanoinfer.models import ENCODERS, REGISTRY

    print("generate and embed; those of the decoder alone, and of its classifiers, load too:")
    print(*(f"  {name}" for name in REGISTRY), sep="\n")
    print("embed, and classify:")
    print(*(f"  {name}" for name in ENCODERS), sep="\n")
    try:
        from nanoinfer.models.transformers.catalog import embedding_classes, generating_classes, version
    except ImportError:  # a version without the interface
        return 0
    print(f"by layers of transformers {version} (model_impl), generate and embed:")
    print(*(f"  {name}" for name in generating_classes()), sep="\n")
    print("by layers of transformers, embed, and classify:")
    print(*(f"  {name}" for name in embedding_classes()), sep="\n")
    return 0


def a_file(text: str) -> Path:
    """Refuse standard streams: a job reads its input twice, and what is done from its output."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is no file; a job needs files, so that it can go on after it was stopped")
    return Path(text)


def an_adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no adapter; give its name and folder, such as sql=adapters/sql")
    return name, folder


def job_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return the options of the engine, the sampling parameters, and the adapters that a job has."""
    options, overrides = given_options(args)
    loras = dict(args.lora or ())
    if len(loras) < len(args.lora or ()):
        raise JobError("--lora has one name twice; give each adapter a name of its own")
    if loras:
        options = {"enable_lora": True, "max_loras": min(len(loras), MAX_JOB_LORAS), **options}
    return options, overrides, loras


def show_log() -> None:
    """Print the library's log, such as the line about a loaded model, on standard error."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanoinfer").setLevel(logging.INFO)


def run_chat(args: argparse.Namespace) -> int:
    """Talk until the user leaves, and return the exit code."""
    options, overrides = given_options(args)
    if (args.named is None) == ("model" not in options):
        args.parser.error("name one model, such as: nanoinfer chat tiny")
    options.setdefault("model", args.named)
    try:
        EngineConfig(**options), SamplingParams(**overrides)  # raise before PyTorch is imported
        from nanoinfer.terminal_chat import chat

        return 0 if chat(options, overrides, args.system, args.chat_template_kwargs) else 3
    except (NanoinferError, OSError) as error:
        print(f"nanoinfer: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:  # while the model was loaded
        return 130


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Run the job, say how it went, and return the exit code."""
    if args.output is None and not args.dry_run:
        parser.error("the following arguments are required: -o/--output")
    is_loaded = False

    def load(options: dict[str, Any]) -> Any:
        nonlocal is_loaded
        from nanoinfer import LLM  # imports PyTorch, once it is clear that there is work

        llm = LLM(**options)
        is_loaded = True
        return llm

    try:
        with terminable():
            return run_dry(args) if args.dry_run else run_job(args, load)
    except (NanoinferError, OSError) as error:
        print(f"nanoinfer: {error}", file=sys.stderr)
        has_begun = is_loaded and isinstance(error, JobError)
        return 2 if isinstance(error, ValueError) and not has_begun else 1
    except KeyboardInterrupt as error:  # while the model was loaded, or a second one
        is_term = isinstance(error, Terminated)
        print(f"nanoinfer: {'terminated' if is_term else 'interrupted'}; the same command goes on", file=sys.stderr)
        return 143 if is_term else 130


def run_job(args: argparse.Namespace, load: Callable[[dict[str, Any]], Any]) -> int:
    """Answer the lines, print a summary, and return the exit code."""
    from nanoinfer.batch.batch_job import run_batch

    options, overrides, loras = job_options(args)
    summary = run_batch(
        partial(load, options),
        args.input,
        args.output,
        settings=EngineConfig(**options).settings_of_answers(),
        loras=loras,
        overrides=overrides,
        system=args.system,
        max_errors=args.max_errors,
        limit=args.limit,
        retry_errors=args.retry_errors,
    )
    exit_code, advice = {
        "interrupted": (130, "\nthe same command goes on from here"),
        "terminated": (143, "\nthe same command goes on from here"),
        "too many errors": (4, f"\nraise --max-errors to go on. {RETRY}"),
        "finished": (3, f"\n{RETRY}") if summary.num_errors else (0, ""),
    }[summary.end]
    if summary.commonest_error is not None:
        advice = f"\nthe commonest error: {summary.commonest_error}{advice}"
    print(f"{summary}; see {args.output}{advice}", file=sys.stderr)
    return exit_code


def run_dry(args: argparse.Namespace) -> int:
    """Print what the job has to do, and return the exit code."""
    from nanoinfer.batch.dry_run import dry_run

    options, overrides, loras = job_options(args)
    config, limit = EngineConfig(**options), args.limit
    size = dry_run(config, args.input, loras=loras, overrides=overrides, system=args.system, limit=limit)
    print(size)
    return 3 if size.num_errors else 0


if __name__ == "__main__":
    main()
