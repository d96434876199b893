"""Requests that read a text once and generate nothing: embeddings, classes, rewards.

This prepares them, and has them run in the scheduler's steps, or in steps of whole texts (`pooling_steps.py`). Of what
either brings, `pooled_output.py` makes what users get.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.preparer import ImagePortions, Portions, Preparer
from nanoinfer.engine.request_queue import RequestQueue
from nanoinfer.errors import RequestError, check_names
from nanoinfer.pooling_calls.hidden_states import HiddenStatesOptions, raising_errors
from nanoinfer.pooling_calls.pooled_output import PooledOutput
from nanoinfer.pooling_calls.pooling_steps import PoolingSteps
from nanoinfer.pooling_outputs import PoolingOutputs
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.progress import Progress
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import (
    Errors,
    OnError,
    Prompt,
    as_list_of_prompts,
    check_on_error,
    one_for_each,
)
from nanoinfer.text.image_parts import ImagePrompt
from nanoinfer.text.prompts import PreparedRequest, PromptProcessor, find_bad_texts, text_beside_images

SAMPLES_NOTHING = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
PoolingArguments = PoolingParams | Sequence[PoolingParams] | None  # for all prompts, or one for each
POOLING_TOKENIZATION_OPTIONS = ("truncate_prompt_tokens",)


class PoolingCalls:
    """Prepares requests that are pooled, and runs them.

    Texts may be as long as the model and sentence-transformers' files allow. An encoder's have to fit into one step.

    preparer: prepares requests that generate; here it tells the size of portions. options: the engine's. pooling_steps:
    runs whole texts; None if nothing does.
    """

    def __init__(
        self,
        queue: RequestQueue,
        preparer: Preparer,
        model_config: BaseModelConfig,
        options: EngineConfig,
        max_model_len: int,
        pooling_steps: PoolingSteps | None,
    ) -> None:
        config, self._model = model_config.pooling, options.model
        assert config is not None, "the folder was read, and with it how the model pools"
        self._queue, self._preparer, self._config, self._pooling_steps = queue, preparer, config, pooling_steps
        self.text_queue = RequestQueue(queue.engine, pooling_steps, queue.lock) if pooling_steps else queue
        limits = {"max_model_len": max_model_len}
        if config.max_tokens is not None:
            limits["max_seq_length"] = config.max_tokens
        if model_config.is_encoder:
            limits["max_num_batched_tokens"] = options.max_num_batched_tokens
        limit = min(limits, key=lambda name: limits[name])
        # Texts may leave no room for a completion.
        self._prompt_processor = PromptProcessor(
            preparer.prompt_processor.tokenizer,
            options.model,
            model_config.vocab_size,
            limits[limit],
            min_new_tokens=0,
            limit=limit,
        )
        sizes = [model_config.hidden_size, *(layer.out_features for layer in config.dense)]
        self._size = len(config.labels) or sizes[-1]  # values of an embedding, or logits

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have images."""
        return self._preparer.prompt_processor.image_reader is not None

    def prepare(
        self,
        makes: type[PooledOutput],
        prompts: Any,
        params: PoolingArguments = None,
        prompt_name: str | None = None,
        wanted: HiddenStatesOptions | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        lora_request: Any = None,
        at_once: bool = False,
    ) -> Portions:
        """Prepare a request for each prompt, the longest first. Raises RequestError for what cannot be served.

        makes: the outputs. wanted: hidden states that are wanted, too. at_once: whether all are checked before any is
        queued, in the order of the prompts. The other arguments are those of `LLM.embed`.
        """
        given, pairs = split_pairs(prompts) if makes.takes_pairs else (as_list_of_prompts(prompts), {})
        all_params = one_for_each(params, len(given), PoolingParams, "pooling_params")
        makes.check(self._config, self._size, self._model, all_params)
        prompts = self._begun(given, prompt_name)
        check_on_error(on_error)
        self._queue.engine.check_open()
        options = check_names("tokenization_kwargs", tokenization_kwargs or {}, POOLING_TOKENIZATION_OPTIONS, {})
        max_tokens = self._prompt_processor.most_tokens(options.get("truncate_prompt_tokens"))
        adapters = self._preparer.find_adapters(lora_request, len(prompts))
        distinct = {id(params): params for params in all_params}
        to_outputs = {key: makes(self._config, self._size, params) for key, params in distinct.items()}

        def prepare_some(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
            some = {index: prompts[index] for index in indices}
            filled, images = self._read_images(some, max_tokens, errors)
            ids, second_texts = self._tokenize(filled, pairs, max_tokens, errors)
            encoded, packed = self._prompt_processor.encode(ids, errors, add_special_tokens=False)
            requests = []
            for index, token_ids in encoded.items():
                if token_ids[-1:] == [self._config.pad_token_id]:
                    token_ids = without_padding(token_ids)
                    packed.pop(index, None)
                first = self._config.first_wanted(len(token_ids))
                text, to_output = some[index], to_outputs[id(all_params[index])]
                requests.append(
                    PreparedRequest(
                        prompt=text if isinstance(text, str) else text_beside_images(text),
                        images=images.get(index, ()),
                        token_ids=token_ids,
                        packed_ids=packed.get(index),
                        sampling_params=SAMPLES_NOTHING,
                        adapter=None if adapters is None else adapters[index],
                        hidden_states_request=HiddenStatesRequest(
                            True, first, to_output, second_text=second_texts.get(index)
                        ),
                    )
                )
            return requests

        if at_once or wanted is not None:
            portions = Portions(prepare_some, range(len(prompts)), None, on_error)
            return portions if wanted is None else wanted.add_to(portions)
        order = sorted(range(len(prompts)), key=lambda index: -_length(prompts[index]))
        return self._preparer.portions(prepare_some, order, prompts, on_error)

    def _read_images(
        self, prompts: Mapping[int, Prompt], max_tokens: int | None, errors: Errors
    ) -> tuple[dict[int, Prompt], dict[int, tuple[Any, ...]]]:
        """Return prompts with token ids in place of those with images, and the processed images, both by index."""
        given = {index: prompt for index, prompt in prompts.items() if isinstance(prompt, ImagePrompt)}
        reader = self._preparer.prompt_processor.image_reader
        if reader is None or not given:  # without a reader, they are refused as no prompts
            return dict(prompts), {}
        filled, images = reader.read(given, True, self._prompt_processor.longest_text, errors)
        for index in images.keys() - errors.keys():
            if max_tokens is not None and len(cast("list[int]", filled[index])) > max_tokens:
                errors[index] = RequestError(
                    f"prompt {index} has images, and truncate_prompt_tokens would cut it; shorten its text"
                )
        return {**prompts, **filled}, images

    def _tokenize(
        self, prompts: Mapping[int, Prompt], pairs: Mapping[int, str], max_tokens: int | None, errors: Errors
    ) -> tuple[dict[int, Any], dict[int, int | None]]:
        """Return the token ids of prompts, and where the second texts of pairs begin, both by index."""
        texts = {index: text for index, text in prompts.items() if isinstance(text, str)}
        longest = sys.maxsize
        if texts and max_tokens is None:
            longest = self._prompt_processor.longest_text
        if self._config.renders_texts:
            errors |= {
                index: RequestError(
                    f"{self._model} has texts written out by the chat template (modality_config), which is not "
                    "supported; write them out by llm.tokenizer.apply_chat_template(messages), and give token ids"
                )
                for index in texts
                # A prompt of a reranker by two tokens is given as it is written out, a pair is not.
                if index in pairs or not self._config.token_ids
            }
        errors |= find_bad_texts(texts, longest)
        errors |= find_bad_texts({index: pairs[index] for index in texts if index in pairs}, longest)
        ids: dict[int, Any] = {
            index: prompt[:max_tokens] if isinstance(prompt, (list, tuple)) else prompt
            for index, prompt in prompts.items()
        }
        second_texts: dict[int, int | None] = {}
        for is_pair in (False, True):
            indices = [index for index in texts if (index in pairs) == is_pair and index not in errors]
            if not indices:
                continue
            given = [texts[index] for index in indices]
            others = [pairs[index] for index in indices] if is_pair else None
            if self._config.lower_cases:
                given, others = [text.lower() for text in given], others and [text.lower() for text in others]
            encoded = self._prompt_processor.require_tokenizer().encode_whole(given, others, max_tokens)
            for index, token_ids, second_text in zip(indices, *encoded, strict=True):
                ids[index], second_texts[index] = token_ids, second_text
        return ids, second_texts

    def run(self, portions: Portions, use_tqdm: bool, wanted: HiddenStatesOptions | None = None) -> PoolingOutputs[Any]:
        """Run requests to their end; outputs come in the order of the prompts. wanted: hidden states, too."""
        queue, steps = self._queue, self._pooling_steps
        has_images = isinstance(portions, ImagePortions)
        if wanted is None and steps is not None and not has_images and steps.serves(portions.first):
            queue = self.text_queue
        progress = Progress(queue.engine.metrics, portions.num_requests, use_tqdm, reads="Reading")
        with progress, raising_errors(wanted, progress.show) as show:
            outputs: list[Any] = queue.complete(portions, show)
        by_index = dict(zip(portions.order, outputs, strict=True))
        return PoolingOutputs(by_index[index] for index in range(len(outputs)))

    def _begun(self, prompts: list[Prompt], prompt_name: str | None) -> list[Prompt]:
        """Begin texts with a prompt, by the name that sentence-transformers' files give it; of pairs, the first."""
        name = self._config.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return prompts
        if name not in self._config.prompts:
            names = ", ".join(map(repr, self._config.prompts)) or "none"
            raise RequestError(f"prompt_name={name!r} is not one of the prompts of {self._model}, which has {names}")
        text = self._config.prompts[name]
        if text and self._config.leaves_out_prompts:
            raise RequestError(
                f"prompt_name={name!r}: {self._model} leaves prompts out of what it pools (include_prompt), which is "
                "not supported; use sentence-transformers"
            )
        return [_after(text, prompt) for prompt in prompts]


def _after(text: str, prompt: Prompt) -> Prompt:
    """Return a prompt that begins with a text, unless it is given as token ids."""
    if isinstance(prompt, ImagePrompt) and isinstance(prompt.prompt, str):
        return replace(prompt, prompt=text + prompt.prompt)
    return text + prompt if isinstance(prompt, str) else prompt


def without_padding(token_ids: list[int]) -> list[int]:
    """Return token ids without the last one, wherever it is repeated at their end; at least the first is left."""
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == token_ids[-1]:
        end -= 1
    return token_ids[:end]


def split_pairs(prompts: Any) -> tuple[list[Prompt], dict[int, str]]:
    """Return a prompt for each item, and by index the second texts of those that are pairs of texts.

    A pair is a tuple, or {"text": ..., "text_pair": ...} as transformers' pipelines take it.
    """
    if _is_pair(prompts):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)) or not any(map(_is_pair, prompts)):
        return as_list_of_prompts(prompts), {}
    firsts: list[Any] = []
    pairs = {}
    for index, item in enumerate(prompts):
        if _is_pair(item):
            item, pairs[index] = (item["text"], item["text_pair"]) if isinstance(item, Mapping) else item
        firsts.append(item)
    return as_list_of_prompts(firsts), pairs


def _length(prompt: Any) -> int:
    """Return how long a prompt is, in characters or token ids; 0 for what is no prompt."""
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0


def _is_pair(item: Any) -> bool:
    if isinstance(item, Mapping):
        return item.keys() == {"text", "text_pair"} and all(isinstance(text, str) for text in item.values())
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)
