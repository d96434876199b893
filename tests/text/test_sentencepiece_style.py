"""Tokenizers in the style of SentencePiece, as Llama 2, Mistral and Phi-3 have them, through the whole engine.

A word's token begins with "▁" for the space before it, characters without a token are tokens of their bytes, and a text
loses its first space. A completion keeps its own, except where the prompt has no text. The model is built to say given
texts, so that its tokens are known.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nanoinfer import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.batch.openai_format import response_body
from nanoinfer.text.tokenizer import Tokenizer

WORDS = ["▁the", "▁café", "▁was", "▁said", "▁but", "ing", "▁:", "▁;", "[I]", "[/I]", "▁▁", ",", ".", "!", "?", "the"]
SPECIAL = ["<unk>", "<s>", "</s>", "<end>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[I]{{ m.content }}[/I]{% endfor %}"
# What the model says after a prompt's last token: tokens, where bytes stand for a token each, and the end. Each token
# occurs once.
SAID: dict[str, tuple[list[str | bytes], str]] = {
    "[/I]": (["▁the", "▁café", ",", "▁", "中\n".encode(), "🍮".encode(), "."], "</s>"),
    "▁:": (["▁▁", "▁was", b"\t", "!", "ü".encode()], "<end>"),
    "▁;": (["▁said", "ing", "ψ".encode(), "?"], "</s>"),
    "<s>": (["▁but"], "</s>"),  # the prompt is empty
}
TEXTS = [" the café, 中\n🍮.", "   was\t!ü", " saidingψ?"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def make_backend(style: str) -> Any:
    """Spaces become "▁", and the text gets one in front: by a normalizer in older files, by a pre-tokenizer in newer.

    With "bare" it gets none, as Gemma's, and the decoder strips none.
    """
    characters = sorted({character for word in WORDS for character in word})
    parts = {word[:length]: None for word in WORDS for length in range(2, len(word) + 1)}
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *parts]
    merges = [(part[:-1], part[-1]) for part in parts]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    to_underscore, to_space = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    if style == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_underscore])
    elif style == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = to_underscore
    strip = [] if style == "bare" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([to_space, decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save_tokenizer(folder: Path, style: str) -> Any:
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<end>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_backend(style), **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_parrot(folder: Path, tokenizer: Any) -> None:
    """Save a model that says SAID: its layers add nothing, and its head gives each token the one that comes next."""
    size = len(tokenizer)
    sizes = {"hidden_size": 256, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
    parrot = LlamaForCausalLM(LlamaConfig(vocab_size=size, **sizes, eos_token_id=[2, 3], tie_word_embeddings=False))
    with torch.no_grad():
        for param in parrot.model.layers.parameters():
            param.zero_()
        embedding = parrot.model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(0))
        parrot.lm_head.weight.zero_()
        for first, (parts, last) in SAID.items():
            chain = [first]
            for part in parts:
                chain += [part] if isinstance(part, str) else [f"<0x{byte:02X}>" for byte in part]
            chain.append(last)
            for token, following in itertools.pairwise(chain):
                row = tokenizer.convert_tokens_to_ids(following)
                parrot.lm_head.weight[row] += embedding[tokenizer.convert_tokens_to_ids(token)]
    parrot.save_pretrained(folder)


@pytest.fixture(scope="module", params=["normalizer", "metaspace", "bare"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    save_parrot(folder, save_tokenizer(folder, request.param))
    with LLM(folder, device="cpu", kvcache_block_size=16) as llm:
        yield llm


def complete(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[Any]:
    return llm.generate(["the[/I]", "the :", "the ;"], params, use_tqdm=False)


def stream(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[str]:
    texts = [""] * len(TEXTS)
    for chunk in llm.stream(["the[/I]", "the :", "the ;"], params):
        texts[chunk.index] += chunk.text
    return texts


def theirs(llm: LLM, output: RequestOutput, skip_special_tokens: bool = True) -> str:
    """What transformers makes of prompt and completion, after what it makes of the prompt."""
    ids = [output.prompt_token_ids, output.prompt_token_ids + output.token_ids]
    prompt, whole = (llm.tokenizer.decode(one, skip_special_tokens=skip_special_tokens) for one in ids)
    return str(whole[len(prompt) :])


def test_the_text_is_that_of_transformers_and_every_eos_ends_it(llm: LLM) -> None:
    outputs = complete(llm, GREEDY)
    for output, text, (_, last) in zip(outputs, TEXTS, SAID.values(), strict=False):
        assert output.text == theirs(llm, output) == text
        assert (output.token_ids[-1], output.finish_reason) == (llm.encode(last)[-1], "stop")
    with_special = complete(llm, SamplingParams(temperature=0, max_tokens=40, skip_special_tokens=False))
    assert [output.text for output in with_special] == [output.text for output in outputs]


def test_prompt_and_text_together_are_what_the_model_has_read_and_written(llm: LLM) -> None:
    [output] = llm.generate("was the :", GREEDY, use_tqdm=False)
    assert output.prompt is not None
    assert output.prompt + output.text == "was the :   was\t!ü"


@pytest.mark.parametrize("prompt", ["", [1]])
def test_after_an_empty_prompt_the_text_begins_without_its_first_space(llm: LLM, prompt: str | list[int]) -> None:
    strips = "Strip" in llm.tokenizer.backend_tokenizer.to_str()
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    if prompt == "" and llm.encode("") != [1]:
        pytest.skip("this one makes a space of an empty text")
    [output] = llm.generate(prompt, params, use_tqdm=False)
    assert output.text == theirs(llm, output) == ("but" if strips else " but")
    assert texts_of_tokens(output.outputs[0]) == [output.text, "</s>"]
    shown = SamplingParams(temperature=0, max_tokens=40, skip_special_tokens=False)
    [output] = llm.generate(prompt, shown, use_tqdm=False)
    assert f"{output.text}</s>" == theirs(llm, output, skip_special_tokens=False) == " but</s>", "a visible <s> is text"


def texts_of_tokens(completion: CompletionOutput) -> list[str | None]:
    pairs = zip(completion.logprobs or [], completion.token_ids, strict=True)
    return [entry[token_id].decoded_token for entry, token_id in pairs]


def test_the_texts_of_tokens_add_up_to_the_text_and_a_word_has_its_space(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1, prompt_logprobs=0)
    outputs = complete(llm, params)
    said = [texts_of_tokens(output.outputs[0]) for output in outputs]
    assert said[0] == [" the", " café", ",", " ", "", "", "中", "\n", "", "", "", "🍮", ".", "</s>"]
    assert [*map("".join, said)] == [text + last for text, (_, last) in zip(TEXTS, SAID.values(), strict=False)]
    asked = [output.prompt_logprobs or [] for output in outputs]
    before = [
        "".join(next(iter(entry.values())).decoded_token or "" for entry in entries if entry) for entries in asked
    ]
    assert before == ["the[/I]", "the :", "the ;"]
    for num_tokens in range(1, 13):  # a text that ends with half a character, too
        for output in complete(llm, replace(params, max_tokens=num_tokens)):
            text = "".join(map(str, texts_of_tokens(output.outputs[0])))
            assert text.removesuffix("</s>").removesuffix("<end>") == output.text


def test_streamed_chunks_have_the_texts_of_their_tokens(llm: LLM) -> None:
    for num_tokens in (6, 40):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=3)
        [output] = llm.generate("the[/I]", params, use_tqdm=False)
        chunks = [*llm.stream("the[/I]", params)]
        assert [entry for chunk in chunks for entry in chunk.logprobs or []] == output.outputs[0].logprobs


def test_a_token_with_a_space_and_one_without_are_two_in_top_logprobs(llm: LLM) -> None:
    size = len(llm.tokenizer)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=size, prompt_logprobs=size)
    for prompt in ("was the :", llm.encode("was the :"), "the[/I]"):
        [output] = llm.generate(prompt, params, use_tqdm=False)
        body = response_body([output], params, is_chat=False, echo=lambda ids: llm.decode(ids, False))
        [choice] = body["choices"]
        found, begin = choice["logprobs"], int(output.prompt is not None)  # a text has no "<s>"
        assert found["tokens"][0] == "<s>"
        assert "".join(found["tokens"][begin:-1]) == choice["text"]
        for index, place in enumerate(found["text_offset"]):
            assert choice["text"][place:] == "".join(found["tokens"][max(begin, index) : -1])
        triples = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        for token, number, best in [*triples][1:]:
            assert len(best) == size
            assert best[token] == number
        assert {"the", " the"} <= {*found["top_logprobs"][len(output.prompt_token_ids)]}


def test_a_stream_gives_the_same_text_with_no_character_in_halves(llm: LLM) -> None:
    assert stream(llm, GREEDY) == [output.text for output in complete(llm, GREEDY)]
    shown = [chunk.text for chunk in llm.stream("the[/I]", GREEDY)]
    assert "\ufffd" not in "".join(shown)
    assert "🍮" in shown
    assert shown.count("") >= 2 + 3, "the first bytes of 中 and 🍮 show nothing"


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_a_text_cut_short_is_the_same_here_there_and_streamed(llm: LLM, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    outputs = complete(llm, params)
    assert stream(llm, params) == [output.text for output in outputs]
    for output in outputs[1:]:  # the first has a newline beside half a character, which transformers replaces too
        assert output.text == theirs(llm, output)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("include_stop_str_in_output", [False, True])
def test_a_stop_string_anywhere_ends_the_text_there(llm: LLM, length: int, include_stop_str_in_output: bool) -> None:
    [whole] = llm.generate("the[/I]", GREEDY, use_tqdm=False)
    stops = [whole.text[start:][:length] for start in range(len(whole.text) - length + 1)]
    options = {"temperature": 0, "max_tokens": 40, "include_stop_str_in_output": include_stop_str_in_output}
    params = [SamplingParams(**options, stop=stop) for stop in stops]
    outputs = llm.generate(["the[/I]"] * len(stops), params, use_tqdm=False)
    streamed = [""] * len(stops)
    for chunk in llm.stream(["the[/I]"] * len(stops), params):
        streamed[chunk.index] += chunk.text
    for output, stop, text in zip(outputs, stops, streamed, strict=True):
        before = whole.text.partition(stop)[0]
        assert output.text == text == before + stop * include_stop_str_in_output
        assert output.outputs[0].stop_reason == stop


@pytest.mark.parametrize("regex", [" said", "said", " {2}was"])
def test_the_text_of_a_form_is_what_the_form_allows(llm: LLM, regex: str) -> None:
    form = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), n=2, seed=1, logprobs=0)
    [output] = llm.generate("the ;", form, use_tqdm=False)
    for completion in output.outputs:
        assert re.fullmatch(regex, completion.text)
        assert "".join(map(str, texts_of_tokens(completion))).removesuffix("</s>") == completion.text


def test_a_chat_has_one_bos_and_the_ids_of_its_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "was the café 🍮?"}], GREEDY, use_tqdm=False)
    assert output.prompt == "<s>[I]was the café 🍮?[/I]"
    assert output.prompt_token_ids.count(1) == 1
    assert output.prompt_token_ids == llm.encode(output.prompt)
    assert llm.tokenizer.decode(output.prompt_token_ids) in (output.prompt, output.prompt.replace("<s>", "<s> "))
    assert output.text.startswith(" the café")


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("style", ["normalizer", "metaspace"])
def test_whatever_class_is_named_ids_and_text_are_those_of_auto_tokenizer(
    style: str, name: str, tmp_path: Path
) -> None:
    save_parrot(tmp_path, save_tokenizer(tmp_path, style))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the café", " the", "  was 🍮\n", "<s>the </s> was", "ü"]
    with LLM(tmp_path, device="cpu") as llm:
        assert [llm.encode(text) for text in texts[:3]] == [auto(text)["input_ids"] for text in texts[:3]]
        for text in texts:
            ids = llm.encode(text)
            assert llm.decode(ids) == auto.decode(ids, skip_special_tokens=True)
            assert llm.decode(ids, False) == auto.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("style", "model_type"), [("normalizer", "mistral"), ("metaspace", "phi3"), ("bare", "gemma3_text"), ("bare", None)]
)
def test_where_the_class_would_put_spaces_elsewhere_the_file_decides(
    style: str, model_type: str | None, tmp_path: Path
) -> None:
    """Where both put one in front, transformers prefers its class for Llama and the file for Mistral and Phi-3."""
    save_tokenizer(tmp_path, style)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    tokenizer, file = Tokenizer(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["the café", "  was", "</s>the<end>the", ""]
    assert tokenizer.encode(texts) == [file.encode(text).ids for text in texts]
    assert tokenizer.decode(tokenizer.encode(["the café"])[0]) == file.decode(file.encode("the café").ids)
