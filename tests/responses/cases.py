"""Answers of six families of models, and what they say. Inputs that vLLM's parsers are known by are among them."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """An answer, and the message that it is. calls: (name, arguments) of each. prompt: None where it is not known."""

    family: str
    text: str
    content: str | None
    reasoning: str | None = None
    calls: tuple[tuple[str, Any], ...] = ()
    prompt: str | None = None


WEATHER = {"city": "Tokyo", "unit": "celsius"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "measure",
            "parameters": {
                "type": "object",
                "properties": {
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "deep": {"type": "boolean"},
                    "note": {"type": "string"},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "size": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    }
]
MEASURED = {"count": 42, "ratio": 3.14, "deep": True, "note": "7", "maybe": None, "size": {"w": 1}, "tags": ["a", "b"]}
QWEN_PROMPT = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"


def parameters(form: str) -> str:
    texts = {"count": "42", "ratio": "3.14", "deep": "true", "note": "7", "maybe": "null", "size": '{"w": 1}'}
    return "".join(form.format(name, text) for name, text in {**texts, "tags": '["a", "b"]'}.items())


def qwen(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(arguments: str, name: str = "get_weather") -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


NOW, NOTHING = qwen("{}", "now"), qwen("{}")
FUNCTION = parameters("<parameter={}>\n{}\n</parameter>\n")
INVOKE = parameters('<parameter name="{}">{}</parameter>')
GLM_ARGUMENTS = parameters("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
TOKYO = deepseek('{"city": "Tokyo", "unit": "celsius"}')
PLAIN = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
R1_NOW = deepseek("{}", "now")

QWEN = [
    # Thoughts.
    Case("qwen3", "Just text.", "Just text."),
    Case("qwen3", "", ""),
    Case("qwen3", " \n two\n\n", " \n two\n\n"),
    Case("qwen3", "<think>Hm.</think>Yes.", "Yes.", "Hm."),
    Case("qwen3", "<think>\nHm.\nWell.\n</think>\n\nYes.\nNo.", "Yes.\nNo.", "Hm.\nWell."),
    Case("qwen3", "Hm.</think>Yes.", "Yes.", "Hm."),
    Case("qwen3", "<think>Hm.</think>", "", "Hm."),
    Case("qwen3", "<think>Hm", "", "Hm"),
    Case("qwen3", "<think></think>Yes.", "Yes."),
    Case("qwen3", "<think>Hm.</think>Write </think> and <think>.", "Write </think> and <think>.", "Hm."),
    Case("qwen3", "Write <think> first.", "Write <think> first."),
    Case("qwen3", "<think>a</think>\n<think>b</think>\nYes.", "Yes.", "a\nb"),
    Case("qwen3", "Yes.<|im_end|>\n<|endoftext|>", "Yes."),
    # What the prompt has begun.
    Case("qwen3", "Hm.</think>Yes.", "Yes.", "Hm.", prompt=f"{QWEN_PROMPT}<think>\n"),
    Case("qwen3", "Hm.", "", "Hm.", prompt=f"{QWEN_PROMPT}<think>\n"),
    Case("qwen3", "Hm.", "Hm.", prompt=QWEN_PROMPT),
    Case("qwen3", "The tag </think> ends.", "The tag </think> ends.", prompt=f"{QWEN_PROMPT}<think>\n\n</think>\n\n"),
    Case("qwen3", "going on.", "going on.", prompt=f"{QWEN_PROMPT}<think>\nHm.\n</think>\n\nI am "),
    Case("qwen3", "Hm.</think>Yes.", "Yes.", "Hm.", prompt="Q: what?\nA: <think>"),
    # Calls in JSON.
    Case("qwen3", qwen('{"city": "Tokyo", "unit": "celsius"}'), None, calls=(("get_weather", WEATHER),)),
    Case("hermes", '<tool_call>{"name":"f","arguments":{"t":true}}</tool_call>', None, calls=(("f", {"t": True}),)),
    Case("hermes", '<tool_call>{"arguments": {"name": "x"}, "name": "f"}', None, calls=(("f", {"name": "x"}),)),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"t": true}',
        '<tool_call>{"name": "f", "arguments": {"t": true}',
    ),
    Case("hermes", '<tool_call>{"name": "f"}</tool_call>', None, calls=(("f", {}),)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, calls=(("f", {}),)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "{\\"p\\": 1}"}</tool_call>', None, calls=(("f", {"p": 1}),)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', None, calls=(("f", "hello"),)),
    Case("qwen3", f"Wait.\n{NOTHING}\n{NOW}", "Wait.", calls=(("get_weather", {}), ("now", {}))),
    Case("qwen3", f"One.\n{NOTHING}\nTwo.", "One.\nTwo.", calls=(("get_weather", {}),)),
    Case("qwen3", f"<think>\nHm.\n</think>\n\n{NOTHING}", None, "Hm.", (("get_weather", {}),)),
    Case("qwen3", f"<think>\nHm.\n{NOTHING}", None, "Hm.", (("get_weather", {}),)),
    Case("qwen3", f"<think>As {NOTHING} says.</think>Yes.", "Yes.", f"As {NOTHING} says."),
    Case("qwen3", "<think>A <tool_call> is</think>Yes.", "Yes.", "A <tool_call> is"),
    Case(
        "qwen3", qwen('{"t": "</tool_call> </think>"}'), None, calls=(("get_weather", {"t": "</tool_call> </think>"}),)
    ),
    Case("qwen3", qwen('{"t": "a\nb"}'), None, calls=(("get_weather", {"t": "a\nb"}),)),
    Case(
        "qwen3",
        f"<tool_call>\n{{oops\n</tool_call>\n{NOTHING}",
        "<tool_call>\n{oops\n</tool_call>",
        calls=(("get_weather", {}),),
    ),
    Case("qwen3", "<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>"),
    Case("qwen3", qwen('{"n": NaN}'), qwen('{"n": NaN}')),
    Case(
        "qwen3", qwen('{"count": "42", "note": "7"}', "measure"), None, calls=(("measure", {"count": 42, "note": "7"}),)
    ),
    # Calls in tags, of Qwen3-Coder and Qwen3.5.
    Case(
        "qwen3",
        f"<tool_call>\n<function=measure>\n{FUNCTION}</function>\n</tool_call>",
        None,
        calls=(("measure", MEASURED),),
    ),
    Case(
        "qwen3",
        "<tool_call>\n<function=bash>\n<parameter=command>\ncat <<A\n\n</parameter>\nA\n</parameter>\n</function>\n"
        "</tool_call>",
        None,
        calls=(("bash", {"command": "cat <<A\n\n</parameter>\nA"}),),
    ),
    Case("qwen3", "<tool_call>\n<function=now>\n</function>\n</tool_call>", None, calls=(("now", {}),)),
    Case(
        "qwen3",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nTokyo\n<parameter=unit>\ncelsius\n</function>\n"
        "</tool_call>",
        None,  # Qwen3-Coder forgets to close parameters at times
        calls=(("get_weather", WEATHER),),
    ),
    Case("qwen3", "<tool_call>\n<function=f>\n<parameter=a>\n1", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    # Qwen3-Coder forgets to open calls, too.
    Case(
        "qwen3",
        "I look.\n<function=get_weather>\n<parameter=city>\nTokyo\n</parameter>\n<parameter=unit>\ncelsius\n"
        "</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
        "I look.",
        calls=(("get_weather", WEATHER), ("now", {})),
    ),
    Case("qwen3", "Write <function=f> first.", "Write <function=f> first."),
    Case("qwen3", "<think>\n<function=now>\n</function>\n</think>\nYes.", "Yes.", "<function=now>\n</function>"),
]
DEEPSEEK = [
    Case("deepseek-r1", "Hm.</think>Yes.", "Yes.", "Hm."),
    Case("deepseek-r1", "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
    Case("deepseek-r1", "Hm.", "", "Hm."),
    Case("deepseek-r1", "Yes.", "Yes.", prompt="<｜User｜>Hi<｜Assistant｜></think>"),
    Case("deepseek-r1", "Hm.</think>Yes.", "Yes.", "Hm.", prompt="<｜User｜>Hi<｜Assistant｜><think>\n"),
    Case("deepseek-r1", "Yes.", "Yes.", prompt="<｜Assistant｜>...<｜tool▁outputs▁end｜>"),
    Case(
        "deepseek-r1",
        f"Hm.</think>Wait.<｜tool▁calls▁begin｜>{TOKYO}\n{R1_NOW}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "Wait.",
        "Hm.",
        (("get_weather", WEATHER), ("now", {})),
    ),
    Case(
        "deepseek-r1",
        '</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        calls=(("f", {"a": 1}), ("g", {})),
    ),
    Case(
        "deepseek-r1",
        f"</think><｜tool▁calls▁begin｜>{R1_NOW}<｜tool▁call▁begin｜>function<｜tool▁sep｜>g",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g",
        calls=(("now", {}),),
    ),
    Case(
        "deepseek-r1",
        "</think><｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁calls▁end｜>",
    ),
]
GPT_OSS = [
    Case("gpt-oss", "<|channel|>final<|message|>Yes.<|return|>", "Yes."),
    Case(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n",
        "Yes.\n",
        "Hm.",
    ),
    Case("gpt-oss", "<|channel|>analysis<|message|>Hm", "", "Hm"),
    Case("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "", "Hm."),
    Case("gpt-oss", "<|channel|>ana", "<|channel|>ana"),
    Case("gpt-oss", "No marks at all.", "No marks at all."),
    Case("gpt-oss", "<|channel|>final <|constrain|> JSON <|message|>{}", "{}"),
    Case("gpt-oss", "<|channel|>commentary<|message|>I look it up.<|end|>", "I look it up."),
    Case(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Tokyo",\n"unit": "celsius"}<|call|>',
        None,
        "Hm.",
        (("get_weather", WEATHER),),
    ),
    Case(
        "gpt-oss",
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|><|start|>assistant to=functions.g'
        "<|channel|>commentary<|message|><|call|>",
        None,
        calls=(("f", {"a": 1}), ("g", {})),
        prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant",
    ),
    Case(
        "gpt-oss",
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        None,
        calls=(("browser.search", {"query": "x"}),),
    ),
    Case(
        "gpt-oss",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>foo<|call|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>foo",
    ),
    Case("gpt-oss", "Hm", "", "Hm", prompt="<|start|>assistant<|channel|>analysis<|message|>"),
    Case(
        "gpt-oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "", "a\nb"
    ),
]
GLM = [
    Case("glm-4.5", "\n<think>Hm.</think>\nYes.", "Yes.", "Hm."),
    Case("glm-4.5", "\nYes.", "Yes.", prompt="[gMASK]<sop><|user|>\nHi/nothink<|assistant|>\n<think></think>"),
    Case(
        "glm-4.5",
        "I look. <tool_call>get_weather\n    <arg_key>city</arg_key>\n    <arg_value>Tokyo</arg_value>\n"
        "    <arg_key>unit</arg_key>\n    <arg_value>celsius</arg_value>\n    </tool_call><|observation|>",
        "I look. ",
        calls=(("get_weather", WEATHER),),
    ),
    Case("glm-4.5", "<tool_call>now\n</tool_call>", None, calls=(("now", {}),)),
    Case("glm-4.5", "<tool_call>now</tool_call>\n<tool_call>now</tool_call>", None, calls=(("now", {}), ("now", {}))),
    Case(
        "glm-4.5",
        f"<tool_call>measure\n{GLM_ARGUMENTS}</tool_call>",
        None,
        calls=(("measure", MEASURED),),
    ),
    Case(
        "glm-4.5",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</tool_call></arg_value></arg_value>\n</tool_call>",
        None,
        calls=(("f", {"a": "x</tool_call></arg_value>"}),),
    ),
    Case(
        "glm-4.5",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n<arg_key>c\n<arg_value>d</arg_value>\n"
        "</tool_call>",
        None,  # what cannot be a second argument belongs to the first
        calls=(("f", {"a": "b</arg_value>\n<arg_key>c\n<arg_value>d"}),),
    ),
    Case(
        "glm-4.5",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>",
    ),
]
MINIMAX = [
    Case("minimax-m2", "Hm.\n</think>\n\nYes.[e~[", "Yes.", "Hm."),
    Case(
        "minimax-m2",
        'Hm.\n</think>\n\nI look. \n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Tokyo</parameter>\n<parameter name="unit">celsius</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>[e~[\n',
        "I look. ",
        "Hm.",
        (("get_weather", WEATHER), ("now", {})),
    ),
    Case(
        "minimax-m2",
        f'</think><minimax:tool_call><invoke name="measure">{INVOKE}</invoke></minimax:tool_call>',
        None,
        calls=(("measure", MEASURED),),
    ),
    Case(
        "minimax-m2",
        "</think><minimax:tool_call><invoke name='f'><parameter name='a'>it's</parameter></invoke></minimax:tool_call>",
        None,
        calls=(("f", {"a": "it's"}),),
    ),
    Case(
        "minimax-m2",
        '</think><minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="f">\n<parameter name="a">1',
        '<invoke name="f">\n<parameter name="a">1',
        calls=(("now", {}),),
    ),
]
MISTRAL = [
    Case("mistral", "[THINK]Hm.[/THINK]Yes.</s>", "Yes.", "Hm."),
    Case("mistral", "\n[THINK]Hm.[/THINK]\nYes.", "Yes.", "Hm."),
    Case("mistral", "Hm.[/THINK]Yes.", "Yes.", "Hm."),
    Case("mistral", "[/THINK]Yes.", "Yes."),
    Case(
        "mistral",
        "Yes.",
        "Yes.",
        prompt='[INST]Hi[/INST][TOOL_CALLS] [{"name": "f"}]</s>[TOOL_RESULTS]1[/TOOL_RESULTS]',
    ),
    Case(
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]',
        None,
        calls=(("add", {"a": 3.5, "b": 4}),),
    ),
    Case(
        "mistral",
        'Hello[TOOL_CALLS] [{"arguments": {"name": "John"}, "name": "age"}, {"name": "now"}]</s>',
        "Hello",
        calls=(("age", {"name": "John"}), ("now", {})),
    ),
    Case("mistral", '[TOOL_CALLS] [{"name": "f"}]\nmore', "more", calls=(("f", {}),)),
    Case("mistral", '[TOOL_CALLS]add{"a": 3}[TOOL_CALLS]now{}', None, calls=(("add", {"a": 3}), ("now", {}))),
    Case(
        "mistral", 'hi{hi[TOOL_CALLS]bash[ARGS]{"c": "print(\\"x\\")"}', "hi{hi", calls=(("bash", {"c": 'print("x")'}),)
    ),
    Case("mistral", '[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{"a": 1}', None, calls=(("add", {"a": 1}),)),
    Case("mistral", "[TOOL_CALLS] not json at all", "[TOOL_CALLS] not json at all"),
    Case("mistral", "[TOOL_CALLS]name", "[TOOL_CALLS]name"),
]
CASES = [*QWEN, *DEEPSEEK, *GPT_OSS, *GLM, *MINIMAX, *MISTRAL]
