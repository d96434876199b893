"""How the bundled tiny checkpoint sees a conversation: Qwen3's chat format and a small tokenizer of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.tiny_checkpoint.tasks import TRAINED_WORDS, Example, training_example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 1024
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
MARKUP_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
EMPTY_THINKING = "<think>\n\n</think>\n\n"
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are nanoinfer's tiny demonstration model.",
    "Answer briefly.",
    "You are a careful calculator. Answer with the result only.",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a conversation that is tokenized on its own; only answers count in the loss."""

    text: str
    is_answer: bool


def render(examples: list[Example], system: str | None, empty_thinking: bool) -> list[Segment]:
    """Render questions and answers; the empty thinking block goes before the last answer only, as in Qwen3's chats."""
    segments = []
    text = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    for index, example in enumerate(examples):
        text += f"{IM_START}user\n{example.question}{IM_END}\n{IM_START}assistant\n"
        if empty_thinking and index == len(examples) - 1:
            text += EMPTY_THINKING
        segments += [Segment(text, False), Segment(example.answer + IM_END, True)]
        text = "\n"
    return segments


def random_system_prompt(rng: random.Random) -> str | None:
    """Draw the system prompt of a conversation; most have none."""
    draw = rng.random()
    if draw < 0.7:
        return None
    if draw < 0.9:
        return rng.choice(SYSTEM_PROMPTS)
    # Any words at all: the model has to answer under a system prompt that it does not know.
    return " ".join(rng.choices(TRAINED_WORDS, k=rng.randint(2, 12))).capitalize() + "."


def training_conversation(rng: random.Random) -> list[Segment]:
    """Draw a conversation: four in five have a single question, three in ten a system prompt, half the empty block."""
    num_questions = 1 if rng.random() < 0.8 else rng.randint(2, 4)
    examples = [training_example(rng) for _ in range(num_questions)]
    return render(examples, random_system_prompt(rng), empty_thinking=rng.random() < 0.5)


# Split as Qwen does: words with one leading mark or blank, single digits, runs of marks, line ends, other blanks.
SPLIT_PATTERN = (
    r"'(?i:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML as Qwen3 renders it. Reasoning is kept only after the last question; tool results share one user turn.
CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string %}{{ content }}
    {%- elif content %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro -%}
{%- set system = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if tools -%}
    {{ '<|im_start|>system\n' + (text(system.content) + '\n\n' if system else '') -}}
    {{ '# Tools\n\nThese functions can be called, one JSON signature a line:\n<tools>' -}}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor -%}
    {{ '\n</tools>\n\nTo call one, write its name and arguments as JSON between these tags:\n<tool_call>\n' -}}
    {{ '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif system -%}
    {{ '<|im_start|>system\n' + text(system.content) + '<|im_end|>\n' -}}
{%- endif -%}
{%- set last = namespace(question=(messages | length) - 1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = text(message.content) -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set reasoning = message.reasoning_content or '' -%}
        {%- if not reasoning and '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{ '<|im_start|>assistant\n' -}}
        {%- if loop.index0 > last.question and (loop.last or reasoning.strip('\n')) -%}
            {{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' -}}
            {%- set content = content.lstrip('\n') -%}
        {%- endif -%}
        {{ content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {{ '\n' if content or not loop.first else '' -}}
            {{ '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
            {{ (call.arguments if call.arguments is string else call.arguments | tojson) + '}\n</tool_call>' -}}
        {%- endfor -%}
        {{ '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {{ '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user' -}}
        {{ '\n<tool_response>\n' + content + '\n</tool_response>' -}}
        {{ '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '') -}}
{%- endif -%}
"""


def _corpus(rng: random.Random, num_conversations: int) -> Iterable[str]:
    """Yield generated text between special tokens, which are no part of what the merges are learned from."""
    markup = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + MARKUP_TOKENS)))
    for _ in range(num_conversations):
        yield from markup.split("".join(segment.text for segment in training_conversation(rng)))


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE of VOCAB_SIZE entries; it ends in the special tokens, as Qwen's does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte is a token, so any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(random.Random(f"tokenizer {seed}"), 20_000), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the generated text yields {tokenizer.get_vocab_size()} tokens; {VOCAB_SIZE} are needed")
    return tokenizer
