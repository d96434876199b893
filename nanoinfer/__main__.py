"""The command line: `nanoinfer COMMAND`, or `python -m nanoinfer COMMAND`."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

from nanoinfer import SamplingParams, __version__
from nanoinfer.bench import commands as bench
from nanoinfer.cli import Parser, add_engine_options, add_sampling_options, given_options, json_object
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
it comes back before its completion), with /v1/embeddings and an input to embed, or its body alone, which may have a
custom_id too:
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

CHAT = """\
Answers each line that you type, as its tokens come, and remembers the conversation. /reset forgets it, Ctrl-C stops an
answer, Ctrl-D leaves. Lines may also be piped in:
  echo 'What is 312 + 48?' | nanoinfer chat --model tiny --temperature 0

Sampling is as the model's generation_config.json recommends, and an answer may be as long as the model allows."""

RETRY = "To retry, append corrected lines to the input and run the same command; earlier errors stay in the summary."

EXIT_CODES = """\
exit codes:
  0    every line has an answer
  1    the engine failed, or the output could not be written; the same command goes on
  2    nothing was done: a wrong option, or a model, input or output that cannot be used
  3    every line has a result, and some are errors
  4    stopped at more errors than --max-errors
  130  stopped by Ctrl-C; the same command goes on"""
MODELS = "List what `architectures` in config.json may say. docs/models.md tells which checkpoints have which."


def main(arguments: list[str] | None = None) -> NoReturn:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="nanoinfer", description="Offline LLM inference.", epilog=EXAMPLE, formatter_class=layout)
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
        usage="nanoinfer run-batch --model MODEL -i FILE -o FILE [options]",
        description=RUN_BATCH,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    file: dict[str, Any] = {"type": a_file, "required": True, "metavar": "FILE"}
    batch.add_argument("-i", "--input", help="JSONL, may be gzipped", **file)
    batch.add_argument("-o", "--output", help="JSONL, added to if it exists", **file)
    add_sampling_options(batch, "for lines that do not say")
    batch.add_argument("--system", metavar="TEXT", help="a system message for chats that have none")
    batch.add_argument("--max-errors", type=int, metavar="N", help="stop at more lines with errors than N")
    add_engine_options(batch.add_argument_group("the model and the engine"))
    batch.set_defaults(run=run)


def add_chat(commands: Any) -> None:
    """Add the command that talks."""
    chat = commands.add_parser(
        "chat",
        help="talk to a model",
        usage="nanoinfer chat --model MODEL [options]",
        description=CHAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sampling_options(chat, "in place of what the model recommends")
    chat.add_argument("--system", metavar="TEXT", help="a system message, which stands before the conversation")
    template = 'what else the chat template understands, such as {"enable_thinking": false}'
    chat.add_argument("--chat-template-kwargs", type=json_object, metavar="JSON", help=template)
    add_engine_options(chat.add_argument_group("the model and the engine"))
    chat.set_defaults(run=run_chat)


def list_models(_args: argparse.Namespace) -> int:
    """Print what `architectures` in a config.json may say, and return the exit code."""
    from nanoinfer.models import ENCODERS, REGISTRY  # which imports PyTorch

    print("generate and embed; those of the decoder alone, and of its classifiers, load too:")
    print(*(f"  {name}" for name in REGISTRY), sep="\n")
    print("embed, and classify:")
    print(*(f"  {name}" for name in ENCODERS), sep="\n")
    return 0


def a_file(text: str) -> Path:
    """Refuse standard streams: a job reads its input twice, and what is done from its output."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is no file; a job needs files, so that it can go on after it was stopped")
    return Path(text)


def what_answers_depend_on(config: EngineConfig) -> list[str]:
    """Return the options that answers depend on; newer ones only if given, so that jobs of older versions go on."""
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


def run_chat(args: argparse.Namespace) -> int:
    """Talk until the user leaves, and return the exit code."""
    options, overrides = given_options(args)
    try:
        EngineConfig(**options), SamplingParams(**overrides)  # raise before PyTorch is imported
        from nanoinfer.terminal_chat import chat

        chat(options, overrides, args.system, args.chat_template_kwargs)
    except (NanoinferError, OSError) as error:
        print(f"nanoinfer: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:  # while the model was loaded
        return 130
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the job, say how it went, and return the exit code."""
    from nanoinfer.batch.batch_job import run_batch

    options, overrides = given_options(args)
    is_loaded = False

    def load() -> Any:
        nonlocal is_loaded
        from nanoinfer import LLM  # imports PyTorch, once it is clear that there is work

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
        "finished": (3, f"\n{RETRY}") if summary.num_errors else (0, ""),
    }[summary.end]
    if summary.commonest_error is not None:
        advice = f"\nthe commonest error: {summary.commonest_error}{advice}"
    print(f"{summary}; see {args.output}{advice}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
