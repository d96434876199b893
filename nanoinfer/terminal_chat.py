"""`nanoinfer chat`: a conversation with a model, in a terminal or with lines that are piped in."""

import codecs
import io
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from nanoinfer import LLM, RequestError, SamplingParams
from nanoinfer.text.chat import render_chat

COMMANDS = "/reset forgets the conversation, Ctrl-C stops an answer, /quit or Ctrl-D leaves"
QUIT = ("/quit", "/exit", "/bye")
Messages = list[dict[str, str]]


def chat(
    options: dict[str, Any],
    overrides: dict[str, Any],
    system: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> bool:
    """Answer each line of standard input on standard output, until it ends.

    options: of LLM. overrides: sampling parameters, in place of those that the model recommends. system: the message
    before the conversation. template_kwargs: what else the chat template understands. Returns whether all lines were
    answered; in a terminal, whose user sees that, True. Raises what LLM raises, and RequestError for a model without a
    chat template, and for one that generates nothing.
    """
    with LLM(**options) as llm:
        llm.preparer.prompt_processor.check_completes()
        if getattr(llm.tokenizer, "chat_template", None) is None:
            raise RequestError(
                f"{llm.config.model} has no chat template; take a model that is made for chats, or use run-batch"
            )
        use_utf_8()
        params = replace(llm.default_sampling_params, **{"max_tokens": None, **overrides})
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (lines can be edited, and earlier ones found)
            print(COMMANDS, file=sys.stderr)
        beginning: Messages = [] if system is None else [{"role": "system", "content": system}]
        num_failed = _answer_lines(llm, beginning, params, template_kwargs or {})
        return sys.stdin.isatty() or num_failed == 0


def _answer_lines(llm: LLM, beginning: Messages, params: SamplingParams, template_kwargs: dict[str, Any]) -> int:
    """Have a conversation until lines end or one of them leaves. Returns how many lines were not answered."""
    messages, num_failed = [*beginning], 0
    while True:
        try:
            line = read_line()
            if line is None or line in QUIT:
                return num_failed
            if line == "/reset":
                messages = [*beginning]
            elif line.startswith("/") and " " not in line:
                print(f"{line} is no command: {COMMANDS}", file=sys.stderr)
            elif line:
                messages += exchange(llm, messages, line, params, template_kwargs)
        except RequestError as error:
            print(f"nanoinfer: {error}", file=sys.stderr)
            num_failed += 1


def use_utf_8() -> None:
    """Read and write UTF-8 where a locale such as C has ASCII; what is piped in is UTF-8 in any locale."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_input = stream is sys.stdin
            if is_input and not stream.isatty():
                stream.reconfigure(encoding="utf-8-sig")
            elif codecs.lookup(stream.encoding).name == "ascii":
                stream.reconfigure(encoding="utf-8")
            stream.reconfigure(errors="surrogateescape" if is_input else "backslashreplace")  # which is no end of it


def read_line() -> str | None:
    """Return the next line without the space around it; None at the end. Raises RequestError for what is no text."""
    is_terminal = sys.stdin.isatty()
    try:
        line = input("> " if is_terminal else "").strip()
        line.encode()
        return line
    except UnicodeEncodeError:
        raise RequestError(f"{line!a:.200} is not UTF-8; save the input as UTF-8") from None
    except EOFError:
        if is_terminal:
            print()
        return None
    except KeyboardInterrupt:  # what was typed is dropped
        print()
        return ""


def exchange(
    llm: LLM, messages: Messages, question: str, params: SamplingParams, template_kwargs: dict[str, Any]
) -> Messages:
    """Print the answer to a question as its tokens come, and return both. Raises RequestError where there is none."""
    asked = {"role": "user", "content": question}
    text, finish_reason = "", None
    try:
        chunks: Any = llm.stream(render(llm, [*messages, asked], template_kwargs), params)
        with closing(chunks), suppress(KeyboardInterrupt):
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
                text += chunk.text
                finish_reason = chunk.finish_reason
    except RequestError as error:
        raise RequestError(f"{error}; /reset forgets the conversation") from None
    print(flush=True)
    if finish_reason == "error":
        raise RequestError("the answer ended by an error; /reset forgets the conversation")
    remarks = {None: "stopped", "length": "cut by --max-tokens or the model's limit"}
    if finish_reason in remarks:
        print(f"({remarks[finish_reason]})", file=sys.stderr)
    return [asked, {"role": "assistant", "content": text}]


def render(llm: LLM, messages: Messages, template_kwargs: dict[str, Any]) -> list[int]:
    """Return the token ids of a conversation, up to the beginning of its next answer. Raises RequestError."""
    tokenizer = llm.preparer.prompt_processor.require_tokenizer()
    others = {name: value for name, value in template_kwargs.items() if name != "chat_template"}
    own_template = template_kwargs.get("chat_template")
    text = render_chat(tokenizer, messages, chat_template=own_template, chat_template_kwargs=others)
    ids: list[int] = llm.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them
    return ids
