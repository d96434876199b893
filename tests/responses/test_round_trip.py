"""What a chat template writes of an answer is read back as it was, and then written as it was.

The templates here are ours, short ones that write answers as those of the families are known to. Real templates are
tested too if the package trl, which has some, is installed, or if NANOINFER_TEMPLATES names a folder of them.
"""

import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from nanoinfer import StructuredOutputsParams, tiny_model_path
from nanoinfer.constraints.grammars import GrammarLibrary
from nanoinfer.errors import RequestError
from nanoinfer.responses.families import family_named, family_of
from nanoinfer.responses.parse import parse_response, schemas_of
from nanoinfer.responses.tool_choice import chosen, constrain
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.chat import render_chat
from nanoinfer.text.tokenizer import Tokenizer

THOUGHT = "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '' }}"
VALUE = "{{ v if v is string else v | tojson }}"


def chat_template(user: str, turn: str, answer: str, open_turn: str = "") -> str:
    """Return a template. turn: what begins an answer, which is the message m. open_turn: the same, of a prompt."""
    return (
        f"{{%- for m in messages %}}{{%- if m.role == 'user' %}}{user}{{%- else %}}{turn}{answer}{{%- endif %}}"
        f"{{%- endfor %}}{{%- if add_generation_prompt %}}{open_turn or turn}{{%- endif %}}"
    )


def calls(call: str, before: str = "", between: str = "", after: str = "") -> str:
    return (
        f"{{%- if m.tool_calls %}}{before}{{%- for c in m.tool_calls %}}{{{{ '' if loop.first else {between!r} }}}}"
        f"{{%- set f = c.function %}}{call}{{%- endfor %}}{after}{{%- endif %}}"
    )


def arguments(form: str) -> str:
    return "{%- for k, v in f.arguments.items() %}" + form + "{%- endfor %}"


IM_USER, IM_TURN = "<|im_start|>user\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n{{ '' }}"
CONTENT = "{{ m.content or '' }}"
TEMPLATES = {
    "qwen3": chat_template(
        IM_USER,
        IM_TURN,
        THOUGHT
        + CONTENT
        + calls(
            '{{ "\\n" }}<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
        )
        + "<|im_end|>\n{{ '' }}",
    ),
    "qwen3 in tags": chat_template(
        IM_USER,
        IM_TURN,
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        + CONTENT
        + calls(
            "{{ '\\n' }}<tool_call>\n<function={{ f.name }}>\n{{ '' }}"
            + arguments(f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n{{{{ '' }}}}")
            + "</function>\n</tool_call>"
        )
        + "<|im_end|>\n{{ '' }}",
        open_turn="<|im_start|>assistant\n<think>\n{{ '' }}",
    ),
    "deepseek-r1": chat_template(
        "<｜User｜>{{ m.content }}",
        "<｜Assistant｜>",
        THOUGHT
        + CONTENT
        + calls(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "\n",
            "<｜tool▁calls▁end｜>",
        )
        + "<｜end▁of▁sentence｜>",
        open_turn="<｜Assistant｜><think>\n{{ '' }}",
    ),
    "deepseek-r1 of V3.1": chat_template(
        "<｜User｜>{{ m.content }}",
        "<｜Assistant｜>",
        THOUGHT
        + CONTENT
        + calls(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "",
            "<｜tool▁calls▁end｜>",
        )
        + "<｜end▁of▁sentence｜>",
        open_turn="<｜Assistant｜><think>",
    ),
    "gpt-oss": chat_template(
        "<|start|>user<|message|>{{ m.content }}<|end|>",
        "<|start|>assistant",
        "{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{%- endif %}"
        "{%- if m.content %}<|channel|>final<|message|>{{ m.content }}<|return|>{%- endif %}"
        + calls(
            " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>",
            between="<|start|>assistant",
        ),
    ),
    "glm-4.5": chat_template(
        "[gMASK]<|user|>\n{{ m.content }}",
        "<|assistant|>",
        "\n<think>{{ m.reasoning_content or '' }}</think>{{ '\n' + m.content if m.content else '' }}"
        + calls(
            "{{ '\\n' }}<tool_call>{{ f.name }}\n{{ '' }}"
            + arguments(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{{{{ '' }}}}")
            + "</tool_call>"
        ),
    ),
    "minimax-m2": chat_template(
        "]~b]user\n{{ m.content }}[e~[\n",
        "]~b]ai\n{{ '' }}",
        THOUGHT
        + CONTENT
        + calls(
            "<invoke name=\"{{ f.name }}\">\n{{ '' }}"
            + arguments(f"<parameter name=\"{{{{ k }}}}\">{VALUE}</parameter>\n{{{{ '' }}}}")
            + "</invoke>\n{{ '' }}",
            "\n<minimax:tool_call>\n{{ '' }}",
            after="</minimax:tool_call>",
        )
        + "[e~[\n{{ '' }}",
        open_turn="]~b]ai\n<think>\n{{ '' }}",
    ),
    "mistral": chat_template(
        "[INST]{{ m.content }}[/INST]",
        "",
        "{{ '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content else '' }}"
        + CONTENT
        + calls('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "[TOOL_CALLS] [", ", ", "]")
        + "</s>",
    ),
    "mistral of v11": chat_template(
        "[INST]{{ m.content }}[/INST]",
        "",
        "{{ '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content else '' }}"
        + CONTENT
        + calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
        + "</s>",
    ),
}
QUESTION = {"role": "user", "content": "Which tags end a <think>?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_model_path())


WORDS = ("a", "42", "true", "null", '"q"', "\\", "é😀", "<b>", "{}", " ", "x\ny")
MARKS = ("</tool_call>", "</think>", "</parameter>", "<|end|")


def random_tool(draw: random.Random, words: tuple[str, ...] = WORDS + MARKS) -> tuple[dict, dict]:
    """Return a tool with a random schema, and arguments that follow it. words: of which strings are made."""
    name = f"{draw.choice(['get', 'set', 'find'])}_{draw.choice(['weather', 'user-name', 'x.y'])}"
    properties, given = {}, {}
    for place in range(draw.randrange(5)):
        schema, value = random_value(draw, words)
        key = draw.choice(["city", "per_cent", "Größe", "a.b"]) + str(place)
        properties[key] = schema
        given[key] = value
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}, given


def random_value(draw: random.Random, words: tuple[str, ...], depth: int = 0) -> tuple[dict, object]:
    kind = draw.choice(["string", "integer", "number", "boolean", "enum", "maybe", "array", "object"][: 8 - 2 * depth])
    if kind == "string":
        return {"type": "string"}, "".join(draw.choices(words, k=draw.randrange(4)))
    if kind == "integer":
        return {"type": "integer"}, draw.randrange(-999, 10**12)
    if kind == "number":
        return {"type": "number"}, draw.choice([draw.uniform(-9, 9), draw.randrange(99)])
    if kind == "boolean":
        return {"type": "boolean"}, draw.random() < 0.5
    if kind == "enum":
        return {"enum": ["one", "two words"]}, draw.choice(["one", "two words"])
    if kind == "maybe":
        return {"anyOf": [{"type": "integer"}, {"type": "null"}]}, draw.choice([None, 7])
    schema, value = random_value(draw, words, depth + 1)
    if kind == "array":
        return {"type": "array", "items": schema}, [value] * draw.randrange(3)
    return {"type": "object", "properties": {"k": schema}, "required": ["k"], "additionalProperties": False}, {
        "k": value
    }


def answer(content: str | None, reasoning: str | None, *made: tuple[dict, dict]) -> dict:
    """Return a message as a user has it: arguments are JSON text, or a dict."""
    found = [
        {
            "id": f"call{place:05}",
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "arguments": json.dumps(given, ensure_ascii=False) if place % 2 else given,
            },
        }
        for place, (tool, given) in enumerate(made)
    ]
    message = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": found or None}
    return message if content is not None or found else {**message, "content": ""}


def read_back(tokenizer: Tokenizer, chat: str, message: dict, tools: list[dict], family: str = "auto") -> dict:
    """Return a message that a chat template has written after a question, as it is parsed."""
    prompt = render_chat(tokenizer, [QUESTION], chat_template=chat)
    whole = render_chat(tokenizer, [QUESTION, message], chat_template=chat, add_generation_prompt=False)
    start = next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    assert len(prompt) - start < 12, "the prompt may have begun a thought"
    return parse_response(
        whole[start:], None if family == "auto" else family, prompt=whole[:start], tools=tools, tokenizer=Named(chat)
    )


class Named:
    """Stands for a tokenizer with a chat template."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template


def said(message: dict) -> tuple:
    """Return what a message says, without what its calls are named by."""
    found = [one["function"] for one in message["tool_calls"] or ()]
    made = [(one["name"], one["arguments"]) for one in found]
    return (
        message["content"] or None,
        message["reasoning"] or None,
        [(name, json.loads(given) if isinstance(given, str) else given) for name, given in made],
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back_for_200_random_schemas(tokenizer: Tokenizer, name: str) -> None:
    draw = random.Random(name)
    for _ in range(200):
        made = [random_tool(draw) for _ in range(draw.randrange(3))]
        tools = [tool for tool, _ in made]
        names = {tool["function"]["name"] for tool in tools}
        if len(names) < len(tools):  # two schemas of one name
            continue
        reasoning = draw.choice([None, "Hm.", "Well,\n\nlet me think."])
        content = draw.choice(["Yes.", "One\ntwo </think> three", "  x"] + [None] * bool(made))
        if "gpt-oss" in name and made:
            content = None
        if reasoning is None and "</think>" in (content or "") and "mistral" not in name:
            content = "Yes."  # without a thought, such an end is one of the text
        message = answer(content, reasoning, *made)
        found = read_back(tokenizer, TEMPLATES[name], message, tools)
        assert said(found) == said(message)
        again = [
            render_chat(tokenizer, [QUESTION, one], chat_template=TEMPLATES[name], add_generation_prompt=False)
            for one in (message, found)
        ]
        assert again[0] == again[1]


def real_templates() -> list[Path]:
    """Return the real chat templates that can be found here."""
    folder = os.environ.get("NANOINFER_TEMPLATES")
    if folder is None and (spec := importlib.util.find_spec("trl")) and spec.submodule_search_locations:
        folder = f"{spec.submodule_search_locations[0]}/chat_templates"
    paths = sorted(Path(folder).glob("*.jinja")) if folder else []
    return [path for path in paths if "training" not in path.stem and family_of(path.read_text()) is not None]


@pytest.mark.parametrize("path", real_templates(), ids=lambda path: path.stem)
def test_what_real_templates_write_is_read_back(tokenizer: Tokenizer, path: Path) -> None:
    chat, draw = path.read_text(), random.Random(path.stem)
    one_call = "gptoss" in path.stem  # the template writes the first alone, and drops a preamble
    thinks = "reasoning_content" in chat or one_call
    for _ in range(25):
        made = [random_tool(draw) for _ in range(1 if one_call else draw.randrange(3))]
        made = [] if "deepseek_r1" in path.stem else made  # it wants a null content, which transformers 5 leaves out
        if len({tool["function"]["name"] for tool, _ in made}) < len(made):
            continue
        content = None if made else "Yes."
        message = answer(content, "Hm." if thinks else None, *made)
        found = read_back(tokenizer, chat, message, [tool for tool, _ in made])
        assert said(found) == said(message)


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer) -> GrammarLibrary:
    pytest.importorskip("llguidance")
    return GrammarLibrary(tokenizer, tokenizer.num_ids, frozenset({tokenizer.eos_token_id}), ())


def accepts(library: GrammarLibrary, tokenizer: Tokenizer, params: SamplingParams, text: str) -> bool:
    """Whether a text has the form that sampling parameters ask for, to its end."""
    assert params.structured_outputs is not None
    matcher, _ = library.compile(params.structured_outputs).fork()
    [token_ids] = tokenizer.encode([text], add_special_tokens=False)
    return bool(matcher.consume_tokens(token_ids)) and bool(matcher.is_accepting())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "gpt-oss"])
def test_a_required_call_has_the_form_that_the_template_writes(
    library: GrammarLibrary, tokenizer: Tokenizer, name: str
) -> None:
    draw, chat = random.Random(name), TEMPLATES[name]
    family = family_of(chat)
    assert family is not None
    for _ in range(6):
        made = [random_tool(draw, WORDS) for _ in range(2)]  # a form has no special tokens as text
        tools = [tool for tool, _ in made]
        if len(schemas := schemas_of(tools)) < 2:
            continue
        written = {}
        for number in (0, 1, 2):
            messages = [QUESTION, answer("Yes." if number == 0 else None, None, *made[:number])]
            whole = render_chat(tokenizer, messages, chat_template=chat, add_generation_prompt=False)
            text = whole[whole.rindex(family.turn_starts[0]) + len(family.turn_starts[0]) :]
            text = text.replace("<think>\n\n</think>", "").replace("<think></think>", "").strip("\n")
            written[number] = next((text.removesuffix(end) for end in family.turn_ends if text.endswith(end)), text)
        required = constrain(SamplingParams(), schemas, False, family, chat)
        named = constrain(SamplingParams(), schemas_of(tools[:1]), True, family, chat)
        found = [accepts(library, tokenizer, required, text) for text in written.values()]
        assert found == [False, True, True]
        assert required.structured_outputs is not None
        assert required.structured_outputs.includes_thought is False, "the engine lets a thought come before it"
        assert [accepts(library, tokenizer, named, text) for text in written.values()] == [False, True, False]


def test_a_required_call_of_gpt_oss_is_a_message_perhaps_after_a_thought(
    library: GrammarLibrary, tokenizer: Tokenizer
) -> None:
    tool, given = random_tool(random.Random(1))
    params = constrain(SamplingParams(), schemas_of([tool]), True, family_named("gpt-oss"), None)
    name = tool["function"]["name"]
    call = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given, ensure_ascii=False)}"
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts(library, tokenizer, params, call)
    assert accepts(library, tokenizer, params, thought + call)
    assert not accepts(library, tokenizer, params, "<|channel|>final<|message|>Yes.")
    assert said(parse_response(thought + call, "gpt-oss", tools=[tool])) == (None, "Hm.", [(name, given)])


def test_a_choice_of_a_tool_is_checked() -> None:
    tool, _ = random_tool(random.Random(1))
    name = tool["function"]["name"]
    one = {"type": "function", "function": {"name": name}}
    assert chosen(None, [tool]) is chosen("auto", [tool]) is chosen("none", [tool]) is None
    assert chosen("required", [tool]) == chosen(one, [tool]) == {name: tool["function"]["parameters"]}
    for choice, tools, said_of_it in [
        ("required", None, "'required' needs tools"),
        ({"type": "function", "function": {"name": "f"}}, [tool], f"the tool 'f', which is not .* there are {name}"),
        ("always", [tool], "'always' is not known; use 'auto', 'none', 'required' or"),
    ]:
        with pytest.raises(RequestError, match=said_of_it):
            chosen(choice, tools)
    schemas, formed = schemas_of([tool]), SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match=r"name its family, such as 'qwen3', as LLM.* or as --response-template"):
        constrain(SamplingParams(), schemas, True, None, None)
    with pytest.raises(RequestError, match="give one of them"):
        constrain(formed, schemas, True, family_named("qwen3"), None)
