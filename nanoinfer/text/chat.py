"""Conversations to text, by the tokenizer's own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanoinfer.errors import RequestError
from nanoinfer.text.columns import Array, Series, as_list
from nanoinfer.text.refusals import Errors, report
from nanoinfer.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Conversation = Sequence[Message]
Conversations = Conversation | Sequence[Conversation] | Array | Series  # one, or several
ROLES = ("system", "user", "assistant", "tool")


def render_chats(
    tokenizer: Tokenizer,
    conversations: Mapping[int, Conversation],
    errors: Errors,
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[int, str]:
    """Return the texts of conversations, by index; what is wrong with some is added to `errors`, and their text is "".

    tools: functions, or their JSON schemas, that the template describes to the model. continue_final_message: end
    within the last message, so that the model goes on with it. chat_template: in place of the tokenizer's own.
    chat_template_kwargs: what else the template understands. Wrong are messages without role or content, and what the
    template refuses. Raises RequestError where there is no template.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins another; "
            "use add_generation_prompt=False with it"
        )
    if chat_template is None and tokenizer.hf.chat_template is None:
        raise RequestError("the tokenizer has no chat template; give one as chat_template, or use generate")
    texts = dict.fromkeys(conversations, "")
    for index, conversation in conversations.items():
        try:
            _check(conversation, index, has_own_template=chat_template is not None)
            texts[index] = tokenizer.hf.apply_chat_template(
                [_with_one_text(message) for message in conversation],
                tools=None if tools is None else list(tools),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=bool(continue_final_message),
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
        except RequestError as error:
            error.kind = "invalid_messages"
            errors[index] = error
        except Exception as error:
            errors[index] = RequestError(
                f"the chat template cannot render conversation {index} ({error}); mend the messages or the template",
                "invalid_messages",
            )
            errors[index].__cause__ = error
    return texts


def render_chat(tokenizer: Tokenizer, conversation: Conversation, **options: Any) -> str:
    """Return the text of one conversation; the options are those of `render_chats`. Raises RequestError as it finds."""
    errors: Errors = {}
    [text] = render_chats(tokenizer, {0: conversation}, errors, **options).values()
    report(errors, 1)
    return text


def as_conversations(messages: Conversations) -> list[Conversation]:
    """Return one conversation or several as a list."""
    given: Any = as_list(messages)
    if not isinstance(given, (list, tuple)):
        raise RequestError(
            f"messages is a {type(given).__name__}; give a list of messages such as "
            "{'role': 'user', 'content': 'Hello'}, or a list of such lists"
        )
    one = bool(given) and all(isinstance(item, Mapping) for item in given)
    return [given] if one else [as_list(conversation) for conversation in given]


def _check(conversation: Any, index: int, has_own_template: bool) -> None:
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise RequestError(f"conversation {index} is {conversation!r}; give a list of one message or more")
    for number, message in enumerate(conversation):
        which = f"message {number} of conversation {index}"
        if not isinstance(message, Mapping):
            raise RequestError(f"{which} is {message!r}; give a dict such as {{'role': 'user', 'content': 'Hello'}}")
        role = message.get("role")
        # Templates leave out messages of a role that they do not know, without a word.
        if not isinstance(role, str) or not (role in ROLES or has_own_template):
            raise RequestError(f"{which} has role={role!r}; give {', '.join(ROLES)}, or a chat_template that knows it")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RequestError(f"{which} has no content: {dict(message)!r}; give a text, which may be empty")
        parts = content if isinstance(content, (list, tuple)) else [{"text": "" if content is None else content}]
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            raise RequestError(
                f"{which} has content that is no text: {content!r}; give a text, or a list of text parts"
            )


def _with_one_text(message: Message) -> Message:
    """Join a content that comes in parts, as OpenAI has it, because many templates would drop it."""
    parts = message.get("content")
    if not isinstance(parts, (list, tuple)):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}
