"""Lists how families of models write thoughts and tool calls: the texts between which they stand.

Most checkpoints do not say it themselves: a chat template tells how a conversation is written, not how an answer is
read. Texts are those that the tokens have when special tokens are decoded too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import ConfigError, RequestError, find_similar
from nanoinfer.responses.call_formats import (
    DEEPSEEK_CALLS,
    GLM_CALLS,
    MINIMAX_CALLS,
    MISTRAL_CALLS,
    QWEN3_CALLS,
    CallFormat,
)


@dataclass(frozen=True, slots=True)
class Family:
    """Says how the models of one family answer.

    turn_starts: the texts in a prompt after which an answer begins; what follows the last of them belongs to it.
    turn_ends: the texts that end an answer.
    reasoning_start, reasoning_end: the texts around a thought.
    opens_reasoning: whether the chat template itself begins the thought, at the end of the prompt.
    forced_end: what ends a thought that has become too long, so that the answer follows.
    answer_start: the text after which the answer to the user begins; a thought may be followed by tool calls instead.
    calls: how tool calls are written; None for the messages of harmony.
    marks: texts in a chat template that tell the family.
    """

    name: str
    turn_starts: tuple[str, ...]
    turn_ends: tuple[str, ...]
    reasoning_start: str
    reasoning_end: str
    opens_reasoning: bool
    forced_end: str
    answer_start: str
    calls: CallFormat | None
    marks: tuple[str, ...]

    @property
    def turn_start(self) -> str:
        """Return the text that begins an answer wherever no tool has said something."""
        return self.turn_starts[0]


QWEN3 = Family(
    name="qwen3",
    turn_starts=("<|im_start|>assistant",),
    turn_ends=("<|im_end|>", "<|endoftext|>"),
    reasoning_start="<think>",
    reasoning_end="</think>",
    opens_reasoning=False,
    forced_end="\n</think>\n\n",
    answer_start="</think>",
    calls=QWEN3_CALLS,
    marks=("<|im_start|>", "<tool_call>"),
)
DEEPSEEK_R1 = Family(
    name="deepseek-r1",
    turn_starts=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"),
    turn_ends=("<｜end▁of▁sentence｜>",),
    reasoning_start="<think>",
    reasoning_end="</think>",
    opens_reasoning=True,
    forced_end="\n</think>\n\n",
    answer_start="</think>",
    calls=DEEPSEEK_CALLS,
    marks=("<｜Assistant｜>",),
)
GPT_OSS = Family(
    name="gpt-oss",
    turn_starts=("<|start|>assistant",),
    turn_ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    reasoning_start="<|channel|>analysis<|message|>",
    reasoning_end="<|end|>",
    opens_reasoning=False,
    forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
    answer_start="<|channel|>final<|message|>",
    calls=None,
    marks=("<|channel|>", "<|message|>"),
)
GLM_4_5 = Family(
    name="glm-4.5",
    turn_starts=("<|assistant|>",),
    turn_ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    reasoning_start="<think>",
    reasoning_end="</think>",
    opens_reasoning=False,
    forced_end="</think>\n",
    answer_start="</think>",
    calls=GLM_CALLS,
    marks=("[gMASK]", "<arg_key>"),
)
MINIMAX_M2 = Family(
    name="minimax-m2",
    turn_starts=("]~b]ai\n",),
    turn_ends=("[e~[",),
    reasoning_start="<think>",
    reasoning_end="</think>",
    opens_reasoning=True,
    forced_end="\n</think>\n\n",
    answer_start="</think>",
    calls=MINIMAX_CALLS,
    marks=("]~b]", "<minimax:tool_call>"),
)
MISTRAL = Family(
    name="mistral",
    turn_starts=("[/INST]", "[/TOOL_RESULTS]"),
    turn_ends=("</s>",),
    reasoning_start="[THINK]",
    reasoning_end="[/THINK]",
    opens_reasoning=False,
    forced_end="[/THINK]",
    answer_start="[/THINK]",
    calls=MISTRAL_CALLS,
    marks=("[INST]", "[TOOL_CALLS]"),
)
ALL = (QWEN3, DEEPSEEK_R1, GPT_OSS, GLM_4_5, MINIMAX_M2, MISTRAL)
FAMILIES = {family.name: family for family in ALL} | {"hermes": QWEN3}


def family_named(name: str) -> Family:
    """Return the family of this name; a line below counts as a hyphen. Raises RequestError for another name."""
    found = FAMILIES.get(name.replace("_", "-").lower())
    if found is None:
        similar = find_similar(name, FAMILIES)
        hint = f" (did you mean {similar!r}?)" if similar else ""
        raise RequestError(f"response_template={name!r} is no family of models{hint}; known are {', '.join(FAMILIES)}")
    return found


def family_of(chat_template: Any) -> Family | None:
    """Return the family that a chat template writes for, by its marks; None where it is none of these."""
    if not isinstance(chat_template, str):
        return None
    return next((family for family in ALL if all(mark in chat_template for mark in family.marks)), None)


def as_response_template(given: Any) -> str | dict[str, Any]:
    """Return the option response_template of `LLM`, checked; a text in braces is JSON. Raises ConfigError."""
    try:
        if isinstance(given, str) and not given.lstrip().startswith("{"):
            return "auto" if given == "auto" else family_named(given).name
        loaded = json.loads(given) if isinstance(given, str) else given
    except RequestError as error:
        raise ConfigError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"response_template={given!r:.200} is no JSON ({error}); mend it") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(
            f"response_template={given!r:.200} is neither a family of models nor a dict; use one of "
            f"{', '.join(FAMILIES)}"
        )
    return dict(loaded)
