"""Conversations to text, by the tokenizer's own chat template.

Templates differ in what they read: some take a content in parts, or a tool call's arguments as JSON text, and others
leave them out, or write them as Python does. What one reads is found by rendering a mark in its place.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product, takewhile
from typing import Any, NamedTuple

from nanoinfer.errors import RequestError
from nanoinfer.responses.parse import REASONING_FIELDS, as_tools
from nanoinfer.text.arguments import Array, Errors, Prompt, Series, as_list, report
from nanoinfer.text.image_parts import ImagePart, ImageTexts, is_image_part, other_kind
from nanoinfer.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Conversation = Sequence[Message]
Conversations = Conversation | Sequence[Conversation] | Array | Series  # one, or several
ROLES = ("system", "user", "assistant", "tool")
MARK = "nanoinferMark"
# What `apply_chat_template` takes for itself.
ARGUMENTS = ("tools", "chat_template", "add_generation_prompt", "continue_final_message")
RESERVED = {*ARGUMENTS, "conversation", "messages", "tokenize", "padding", "truncation", "max_length", "self"}
RESERVED |= {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}


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
    image_texts: ImageTexts | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> dict[int, Prompt]:
    """Return the texts of conversations, by index; what is wrong with some is added to `errors`, and their text is "".

    tools: functions, or their JSON schemas, that the template describes to the model. continue_final_message: end
    within the last message, so that the model goes on with it. chat_template: in place of the tokenizer's own.
    chat_template_kwargs: what else the template understands. image_texts: of a model that reads images; conversations
    with images become ImagePrompts. mm_processor_kwargs: options of the image processor for them. Wrong are messages
    without role or content, what the template refuses, and tools, calls and images that it leaves out. Raises
    RequestError where there is no template, and for wrong or contradicting options.
    """
    tools, template_kwargs = as_tools(tools), as_template_kwargs(chat_template_kwargs)
    if mm_processor_kwargs and image_texts is None:
        raise RequestError("mm_processor_kwargs are for images, which LLM(limit_mm_per_prompt={'image': 4}) has read")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins another; "
            "use add_generation_prompt=False with it"
        )
    if chat_template is None and tokenizer.hf.chat_template is None:
        raise RequestError("the tokenizer has no chat template; give one as chat_template, or use generate")

    def render(messages: Sequence[Message], has_tools: bool = True) -> str:
        text: str = tokenizer.hf.apply_chat_template(
            messages,
            tools=tools if has_tools else None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            tokenize=False,
            **template_kwargs,
        )
        return text

    template = Template(render, any_role=chat_template is not None)
    options = str(chat_template or tokenizer.hf.chat_template), repr(chat_template_kwargs)

    def prompt_of(conversation: Conversation, index: int) -> Prompt:
        images: list[Any] = []
        if image_texts is not None:
            _check_messages(conversation, index)
            conversation, images = image_texts.take_images(conversation, index)
        text = template.render(conversation, index)
        kind = *options, *sorted({message["role"] for message in conversation})
        if tools and kind not in tokenizer.writes_tools:
            bare = Template(partial(render, has_tools=False), any_role=True)
            _check_tools(text, bare, conversation, index, getattr(tokenizer.hf, "name_or_path", ""))
            tokenizer.writes_tools.add(kind)
        return text if image_texts is None else image_texts.prompt_of(text, images, index, mm_processor_kwargs)

    prompts: dict[int, Prompt] = dict.fromkeys(conversations, "")
    for index, conversation in conversations.items():
        try:
            prompts[index] = prompt_of(conversation, index)
        except RequestError as error:
            if error.kind == RequestError().kind:  # it has no name of its own
                error.kind = "invalid_messages"
            errors[index] = error
        except Exception as error:
            errors[index] = RequestError(
                f"the chat template cannot render conversation {index} ({error}); mend the messages or the template",
                "invalid_messages",
            )
            errors[index].__cause__ = error
    return prompts


def render_chat(tokenizer: Tokenizer, conversation: Conversation, **options: Any) -> str:
    """Return the text of one conversation. options: of `render_chats`. Raises RequestError for a wrong one."""
    errors: Errors = {}
    [text] = render_chats(tokenizer, {0: conversation}, errors, **options).values()
    report(errors, 1)
    assert isinstance(text, str), "a conversation has images only where image_texts are given"
    return text


def as_template_kwargs(given: Any) -> dict[str, Any]:
    """Return chat_template_kwargs as a dict. Raises RequestError for anything else, and for names that are taken."""
    if given and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise RequestError(
            f"chat_template_kwargs={given!r:.200} is no dict of names; give {{'enable_thinking': False}}, say"
        )
    if own := [name for name in given or () if name in RESERVED]:
        remedy = f"pass {own[0]} to chat itself" if own[0] in ARGUMENTS else "leave it out"
        raise RequestError(f"chat_template_kwargs has {own[0]!r}, which is not the template's to read; {remedy}")
    return dict(given or {})


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


class CallForm(NamedTuple):
    """Says in which form a template reads tool calls.

    null: what stands for a null content beside them. as_text: whether their arguments are JSON text. is_single: whether
    a message has one call alone.
    """

    null: str | None = ""
    as_text: bool = False
    is_single: bool = False


class Template:
    """Writes conversations out in the form in which one chat template reads them.

    render: what the template makes of messages as they are. any_role: whether a role that the template may leave out is
    the user's business.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], any_role: bool) -> None:
        self._render, self._any_role = render, any_role
        self._reads_parts: dict[str, bool] = {}  # by role
        self._call_forms: dict[tuple[bool, bool], CallForm] = {}  # by whether a content is null, and calls are several

    def render(self, conversation: Conversation, index: int) -> str:
        """Return the text of a conversation. Raises RequestError for a wrong one, and whatever the template raises."""
        _check(conversation, index)
        messages = [*map(_with_one_text, map(_with_reasoning, conversation))]
        form = CallForm()
        if any("tool_calls" in message for message in messages):
            form = self._call_form(messages, index)
            messages = [_with_calls(*one, index, form.null, form.as_text) for one in enumerate(messages)]
        if not self._any_role:
            self._check_roles(messages, index)
        for place, given in enumerate(conversation):
            if isinstance(given.get("content"), (list, tuple)) and self._takes_parts(messages, place):
                messages[place] = {**messages[place], "content": _parts(given["content"])}
        messages = _with_one_call(messages) if form.is_single else messages
        return self._write(messages)

    def _write(self, messages: Conversation) -> str:
        """Return the text of messages; where the template refuses a content beside a thought, the two are joined."""
        try:
            return self._render(messages)
        except Exception:
            joined = [*map(_with_one_thought, messages)]
            if joined == messages:
                raise
            return self._render(joined)

    def _check_roles(self, messages: Conversation, index: int) -> None:
        """Raise RequestError for a role whose messages the template leaves out without a word."""
        for place, message in enumerate(messages):
            if message["role"] not in ROLES:
                text = self._try(_replace(messages, place, {**message, "content": MARK}))
                if text is not None and MARK not in text:
                    raise RequestError(
                        f"message {place} of conversation {index} has role={message['role']!r}, which the chat "
                        f"template leaves out; give {', '.join(ROLES)}, or a chat_template that knows it"
                    )

    def _takes_parts(self, messages: Conversation, place: int) -> bool:
        """Return whether the template reads a content in parts; some of the others write out the list itself."""
        role = messages[place]["role"]
        if role not in self._reads_parts:
            parts = _parts([{"text": f"{MARK}1", f"{MARK}Key": ""}, {"text": f"{MARK}2"}])
            text = self._try(_replace(messages, place, {**messages[place], "content": parts}))
            if text is None and self._try(messages) is None:  # a wrong conversation says nothing about the template
                return False
            has_both = text is not None and f"{MARK}1" in text and f"{MARK}2" in text
            self._reads_parts[role] = has_both and f"{MARK}Key" not in str(text)
        return self._reads_parts[role]

    def _call_form(self, messages: Conversation, index: int) -> "CallForm":
        """Return the form in which the template writes all calls.

        Most templates want "" and a dict, as vLLM gives them. Some write calls only beside a null content, some join
        the arguments to other texts, and some write the first call of a message alone. Raises RequestError for one that
        writes neither their names nor their arguments.
        """
        has_null = any(message.get("content") is None for message in messages)
        key = has_null, any(len(message.get("tool_calls") or ()) > 1 for message in messages)
        if key not in self._call_forms:
            texts = []
            for is_single, as_text, null in product(
                (False, True)[: 1 + key[1]], (False, True), ("", None)[: 1 + has_null]
            ):
                probe = [_with_calls(*one, index, null, as_text, marked=True) for one in enumerate(messages)]
                text = self._try(_with_one_call(probe) if is_single else probe)
                names = [
                    call.get("function", call)["name"] for message in probe for call in message.get("tool_calls", ())
                ]
                if text is not None and all(name in text for name in names) and f"'{MARK}Key'" not in text:
                    self._call_forms[key] = CallForm(null, as_text, is_single)
                    break
                texts += [] if text is None else [text]
            if key not in self._call_forms and texts and not any(MARK in text for text in texts):
                raise RequestError(
                    f"conversation {index} has tool_calls, which the chat template leaves out; use a model whose "
                    "template writes them, give a chat_template that does, or write the calls into the content"
                )
        return self._call_forms.get(key, CallForm())

    def _try(self, messages: Conversation) -> str | None:
        """Return the text of messages; None where the template fails."""
        try:
            return self._write(messages)
        except Exception:
            return None


def _check_tools(text: str, bare: Template, conversation: Conversation, index: int, model: str) -> None:
    """Raise RequestError for tools that are not in a conversation's text. bare: writes it without them."""
    try:
        is_lost = bare.render(conversation, index) == text
    except Exception:  # it cannot do without them
        return
    if is_lost:
        raise RequestError(
            f"the chat template of {model or 'this model'} does not write tools, so the model would not see them; use "
            "a model whose template does, give a chat_template that does, or describe the tools in a system message, "
            "without tools, and read the answers by parse_response"
        )


def _check_messages(conversation: Any, index: int) -> None:
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise RequestError(f"conversation {index} is {conversation!r}; give a list of one message or more")
    for number, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {number} of conversation {index} is {message!r}; give a dict such as "
                "{'role': 'user', 'content': 'Hello'}"
            )


def _check(conversation: Any, index: int) -> None:
    _check_messages(conversation, index)
    for number, message in enumerate(conversation):
        which = f"message {number} of conversation {index}"
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{which} has role={message.get('role')!r}; give {', '.join(ROLES)}")
        content, calls = message.get("content"), message.get("tool_calls")
        if calls and not (isinstance(calls, (list, tuple)) and all(map(_is_call, calls))):
            raise RequestError(
                f"{which} has tool_calls={calls!r}; give a list of calls such as "
                "{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}"
            )
        if content is None and not calls:
            raise RequestError(f"{which} has no content: {dict(message)!r}; give a text, which may be empty")
        parts = content if isinstance(content, (list, tuple)) else [{"text": "" if content is None else content}]
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            if kind := next(filter(None, map(other_kind, parts)), None):
                raise RequestError(f"{which} has a part with {kind}, which is not read; leave it out")
            hint = "; for images, give LLM(limit_mm_per_prompt={'image': 4}), say" * any(map(is_image_part, parts))
            raise RequestError(
                f"{which} has content that is no text: {content!r:.500}; give a text, or a list of text parts{hint}"
            )


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)


def _replace(messages: Conversation, place: int, message: Message) -> list[Message]:
    return [*messages[:place], message, *messages[place + 1 :]]


def _parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return parts of a content with the types that templates look for."""
    return [{"type": "image"} if isinstance(part, ImagePart) else {**part, "type": "text"} for part in parts]


def _with_one_text(message: Message) -> Message:
    """Join a content that comes in parts, as OpenAI has it, by line breaks, as vLLM does."""
    parts = message.get("content")
    if not isinstance(parts, (list, tuple)):
        return message
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _with_reasoning(message: Message) -> Message:
    """Return a message whose thought, if it has one, stands under each of its names."""
    if not any(name in message for name in REASONING_FIELDS):
        return message
    thoughts = [message[name] for name in REASONING_FIELDS if message.get(name) is not None]
    others = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**others, **dict.fromkeys(REASONING_FIELDS, thoughts[0])} if thoughts else others


def _with_one_thought(message: Message) -> Message:
    """Join the content beside tool calls to the thought: the template of gpt-oss has no place for both."""
    content, thought = message.get("content"), message.get(REASONING_FIELDS[0])
    if not (message.get("tool_calls") and isinstance(content, str) and content and thought):
        return message
    return {**message, "content": "", **dict.fromkeys(REASONING_FIELDS, f"{thought}\n{content}")}


def _with_one_call(messages: Sequence[Message]) -> list[Message]:
    """Return messages each with one call at most, with the result of the call behind it, as the template reads them."""
    left, found = [*messages], list[Message]()
    while left:
        message = left.pop(0)
        if len(calls := message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        results = [*takewhile(lambda one: one["role"] == "tool", left)]
        left = left[len(results) :]
        rest = {**{name: value for name, value in message.items() if name not in REASONING_FIELDS}, "content": ""}
        for place, call in enumerate(calls):
            found.append({**(rest if place else message), "tool_calls": [call]})
            own = [one for one in results if call.get("id") is not None and one.get("tool_call_id") == call.get("id")]
            own = own or [one for one in results if "tool_call_id" not in one][:1]
            found += own
            results = [one for one in results if all(one is not other for other in own)]
        found += results
    return found


def _with_calls(
    number: int, message: Message, index: int, null: str | None, as_text: bool, marked: bool = False
) -> Message:
    """Return a message whose tool calls, if it has any, have their arguments as a dict, or as JSON text.

    number: of the message in conversation `index`. null: what stands for a null content. marked: marks stand for names
    and arguments. Raises RequestError for arguments that are a text and no JSON.
    """
    if "tool_calls" not in message:
        return message
    if not message["tool_calls"]:  # null, say; to some templates any key of this name means calls
        return {name: value for name, value in message.items() if name != "tool_calls"}
    calls = []
    for place, call in enumerate(message["tool_calls"]):
        function = call.get("function", call)
        text = given = function.get("arguments")
        if not given or given == "null":
            text, given = "{}", {}
        elif isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"message {number} of conversation {index} calls {function.get('name')!r} with arguments that are "
                    f"no JSON ({error}): {given!r:.200}; give a JSON object as a text, or a dict"
                ) from None
        else:
            text = json.dumps(given, ensure_ascii=False)
        changed = {**function, "arguments": text if as_text else given}
        if marked:
            arguments = {f"{MARK}Key": MARK}
            changed |= {
                "name": f"{MARK}Name{number}x{place}x",
                "arguments": json.dumps(arguments) if as_text else arguments,
            }
        calls.append({**call, "function": changed} if "function" in call else changed)
    content = null if message.get("content") is None else message["content"]
    return {**message, "content": content, "tool_calls": calls}
