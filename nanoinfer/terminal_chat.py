"""`nanoinfer chat`: a conversation with a model, in a terminal or with lines that are piped in."""

import io
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from nanoinfer import LLM, RequestError, SamplingParams
from nanoinfer.text.chat import render_chat

COMMANDS = "/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D leaves"
Messages = list[dict[str, str]]


def chat(
    options: dict[str, Any],
    overrides: dict[str, Any],
    system: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Answer each line of standard input on standard output, until it ends.

    options: of LLM. overrides: sampling parameters, in place of those that the model recommends. system: the message
    before the conversation. template_kwargs: what else the chat template understands. Raises what LLM raises, and
    RequestError for a model without a chat template, and for one that generates nothing.
    """
    with LLM(**options) as llm:
        llm.preparer.prompt_processor.check_completes()
        if getattr(llm.tokenizer, "chat_template", None) is None:
            raise RequestError(
                f"{llm.config.model} has no chat template; take a model that is made for chats, or use run-batch"
            )
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a bad line is then no end of the chat
        params = replace(llm.default_sampling_params, **{"max_tokens": None, **overrides})
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (lines can be edited, and earlier ones found)
            print(COMMANDS, file=sys.stderr)
        beginning: Messages = [] if system is None else [{"role": "system", "content": system}]
        messages = [*beginning]
        while (line := read_line()) is not None:
            if line == "/reset":
                messages = [*beginning]
            elif line.startswith("/") and " " not in line:
                print(f"{line} is no command: {COMMANDS}", file=sys.stderr)
            elif line:
                messages += exchange(llm, messages, line, params, template_kwargs or {})


def read_line() -> str | None:
    """Return the next line without the space around it, "" for one that is not UTF-8; None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    try:
        line = input("> " if is_terminal else "").strip()
        line.encode()
        return line
    except UnicodeEncodeError:
        print(f"nanoinfer: {line!a:.200} is not UTF-8; save the input as UTF-8", file=sys.stderr)
        return ""
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
    """Print the answer to a question as its tokens come, and return both; nothing where there can be no answer."""
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
        print(f"nanoinfer: {error}; /reset forgets the conversation", file=sys.stderr)
        return []
    print(flush=True)
    remarks = {None: "stopped", "length": "cut by --max-tokens or the model's limit", "error": "ended by an error"}
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
