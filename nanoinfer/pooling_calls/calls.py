"""Requests that read a text once and generate nothing: embeddings, classes, rewards.

This prepares them, and makes their outputs from the vectors and logits that steps bring: the scheduler's steps, or
steps of whole texts (`pooling_steps.py`).
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.preparer import Portions, Preparer
from nanoinfer.engine.request_queue import RequestQueue
from nanoinfer.errors import RequestError, check_names
from nanoinfer.outputs import RequestOutput
from nanoinfer.pooling_calls.hidden_states import HiddenStatesOptions, raising_errors
from nanoinfer.pooling_calls.pooling_steps import PooledTexts, PoolingSteps
from nanoinfer.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutputs,
    PoolingRequestOutput,
    RewardOutput,
)
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.progress import Progress
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import (
    Errors,
    OnError,
    Prompt,
    Prompts,
    as_list_of_prompts,
    check_on_error,
    one_of_kind_for_each,
)
from nanoinfer.text.prompts import PreparedRequest, PromptProcessor, find_bad_texts

logger = logging.getLogger("nanoinfer")

SAMPLES_NOTHING = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
PoolingArguments = PoolingParams | Sequence[PoolingParams] | None  # for all prompts, or one for each
POOLING_TOKENIZATION_OPTIONS = ("truncate_prompt_tokens",)
Values = NDArray[np.float32]
MIN_NORM = 1e-12  # a vector of zeros stays one


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Makes the user's output for a text: `HiddenStatesRequest.make_output`.

    make: makes the contents of several outputs at once, from the pooled values of their texts: (num_texts, ...).
    """

    pooling_calls: "PoolingCalls"
    make: Callable[[Values, PoolingParams], list[Any]]
    params: PoolingParams

    def __call__(self, output: RequestOutput, states: HiddenStatesRequest) -> PoolingRequestOutput[Any]:
        return self.pooling_calls.output(self, output, states)


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
        self._queue, self._preparer, self._config, self.pooling_steps = queue, preparer, config, pooling_steps
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

    def prepare_embeddings(
        self,
        prompts: Prompts,
        params: PoolingArguments = None,
        prompt_name: str | None = None,
        wanted: HiddenStatesOptions | None = None,
        **options: Any,
    ) -> Portions:
        """Prepare the requests of `LLM.embed`. wanted: hidden states that are wanted, too. options: see `_portions`."""
        if self._config.is_classifier:
            raise RequestError(f"embed needs an embedding model, and {self._model} is a classifier; use classify")
        given = as_list_of_prompts(prompts)
        all_params = one_of_kind_for_each(params, len(given), PoolingParams, "pooling_params")
        for size in {one.dimensions for one in all_params}:
            self._check_dimensions(size)
        if wanted is not None:
            options["at_once"] = True
        portions = self._portions(self._begun(given, prompt_name), {}, all_params, self._embeddings, **options)
        return portions if wanted is None else wanted.add_to(portions)

    def prepare_classes(
        self,
        prompts: Any,
        params: PoolingArguments = None,
        prompt_name: str | None = None,
        rewards: bool = False,
        **options: Any,
    ) -> Portions:
        """Prepare the requests of `LLM.classify`, or of `LLM.reward`. options: see `_portions`."""
        call = "reward" if rewards else "classify"
        if not self._config.is_classifier:
            raise RequestError(
                f"{call} needs a classification head, and {self._model} has none; use embed, or a model such as one of "
                "...ForSequenceClassification"
            )
        if rewards and len(self._config.labels) != 1:
            raise RequestError(f"reward needs a head of one value, and this one has {len(self._config.labels)} classes")
        given, pairs = split_pairs(prompts)
        all_params = one_of_kind_for_each(params, len(given), PoolingParams, "pooling_params")
        if any(one.dimensions is not None for one in all_params):
            raise RequestError(f"dimensions is about embeddings, and {call} returns none; leave it out")
        make = self._rewards if rewards else self._classes
        return self._portions(self._begun(given, prompt_name), pairs, all_params, make, **options)

    def _portions(
        self,
        prompts: list[Prompt],
        pairs: dict[int, str],
        all_params: list[PoolingParams],
        make: Any,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        at_once: bool = False,
    ) -> Portions:
        """Prepare a request for each prompt, the longest first. Raises RequestError for what cannot be served.

        tokenization_kwargs, on_error: those of the call. at_once: whether all are checked before any is queued, in the
        order of the prompts.
        """
        check_on_error(on_error)
        self._queue.engine.check_open()
        options = check_names("tokenization_kwargs", tokenization_kwargs or {}, POOLING_TOKENIZATION_OPTIONS, {})
        max_tokens = self._prompt_processor.most_tokens(options.get("truncate_prompt_tokens"))
        to_outputs: dict[int, PooledOutput] = {}  # texts with the same parameters share one

        def prepare(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
            given = {index: prompts[index] for index in indices}
            ids, second_texts = self._tokenize(given, pairs, max_tokens, errors)
            encoded, packed = self._prompt_processor.encode(ids, errors, add_special_tokens=False)
            requests = []
            for index, token_ids in encoded.items():
                if token_ids[-1:] == [self._config.pad_token_id]:
                    token_ids = without_padding(token_ids)
                    packed.pop(index, None)
                first = self._config.first_wanted(len(token_ids))
                params, text = all_params[index], given[index]
                if id(params) not in to_outputs:
                    to_outputs[id(params)] = PooledOutput(self, make, params)
                to_output = to_outputs[id(params)]
                requests.append(
                    PreparedRequest(
                        prompt=text if isinstance(text, str) else None,
                        token_ids=token_ids,
                        packed_ids=packed.get(index),
                        sampling_params=SAMPLES_NOTHING,
                        hidden_states_request=HiddenStatesRequest(
                            True, first, to_output, second_text=second_texts.get(index)
                        ),
                    )
                )
            return requests

        if at_once:
            return Portions(prepare, range(len(prompts)), None, on_error)
        order = sorted(range(len(prompts)), key=lambda index: -_length(prompts[index]))
        return Portions(prepare, order, self._preparer.portion_size, on_error)

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
            found = self._prompt_processor.require_tokenizer().encode_whole(given, others, max_tokens)
            for index, token_ids, second_text in zip(indices, *found, strict=True):
                ids[index], second_texts[index] = token_ids, second_text
        return ids, second_texts

    def run(self, portions: Portions, use_tqdm: bool, wanted: HiddenStatesOptions | None = None) -> PoolingOutputs[Any]:
        """Run requests to their end; outputs come in the order of the prompts. wanted: hidden states, too."""
        steps = self.pooling_steps if wanted is None else None
        outputs: list[Any]
        with Progress(self._queue.engine.metrics, portions.num_requests, use_tqdm, reads="Reading") as progress:
            if steps is not None and steps.serves(portions.first):
                outputs = steps.complete(portions, self.outputs_of_texts, progress.show)
            else:
                with raising_errors(wanted, progress.show) as show:
                    outputs = self._queue.complete(portions, show)
        by_index = dict(zip(portions.order, outputs, strict=True))
        return PoolingOutputs(by_index[index] for index in range(len(outputs)))

    def _check_dimensions(self, dimensions: int | None) -> None:
        known = self._config.dimensions
        if dimensions is None:
            return
        if dimensions > self._size or (known and dimensions not in known):
            allowed = f"one of {', '.join(map(str, known))}" if known else f"at most {self._size}"
            raise RequestError(f"dimensions={dimensions} is not what this model was made for; use {allowed}")

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
        return [text + prompt if isinstance(prompt, str) else prompt for prompt in prompts]

    # -------- What users get ------------------------------------------------------------------------------------------

    def output(
        self, how: "PooledOutput", output: RequestOutput, states: HiddenStatesRequest
    ) -> PoolingRequestOutput[Any]:
        """Make the output of a request that has ended."""
        parts = [part.numpy() for part in states.parts(None)]
        if parts and output.finish_reason not in ("abort", "error"):
            values = parts[0] if len(parts) == 1 else np.concatenate(parts)
            check_finite([output.request_id], [values])
        else:
            values = np.full((1, self._size), np.nan, np.float32)
        return PoolingRequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            output.num_cached_tokens,
            self._made(how, [values] if self._config.is_of_each_token else values)[0],
            output.metrics,
            error=output.error,
            error_kind=output.error_kind,
        )

    def outputs_of_texts(self, texts: PooledTexts) -> list[PoolingRequestOutput[Any]]:
        """Make the outputs of texts of one step, those of neighbours with the same parameters at once."""
        requests, request_ids, values, aborted, metrics = texts
        check_finite(request_ids, values)
        for place in aborted:
            values[place] = np.full_like(values[place][:1], np.nan)
        made: list[Any] = []
        for how, group in groupby(request.hidden_states_request.make_output for request in requests):
            start, size = len(made), len(list(group))
            made += self._made(how, values[start : start + size])
        return [
            PoolingRequestOutput(request_id, request.prompt, request.token_ids, 0, one, metrics)
            for request_id, request, one in zip(request_ids, requests, made, strict=True)
        ]

    def _made(self, how: "PooledOutput", values: Any) -> list[Any]:
        """Make what is in the outputs of texts. values: as in PooledTexts."""
        if self._config.is_of_each_token:
            return [how.make(one[np.newaxis], how.params)[0] for one in values]
        return how.make(values, how.params)

    def _embeddings(self, vectors: Values, params: PoolingParams) -> list[EmbeddingOutput]:
        size = self._config.truncate_dim if params.dimensions is None else params.dimensions
        normalizes = self._config.activation == "normalize" if params.use_activation is None else params.use_activation
        measured, vectors = vectors, vectors[..., :size]
        if normalizes:
            # A folder that cuts embeddings by itself cuts them once they are normalised, as sentence-transformers.
            measured = measured if params == PoolingParams() else vectors
            norms = np.sqrt(np.einsum("...i,...i", measured, measured))
            vectors = vectors / np.maximum(norms, MIN_NORM)[..., np.newaxis]
        return [EmbeddingOutput(vector.copy()) for vector in vectors]  # so that one does not keep the others

    def _classes(self, logits: Values, params: PoolingParams) -> list[ClassificationOutput]:
        activation = "Identity" if params.use_activation is False else self._config.activation
        return [ClassificationOutput(probs.copy(), self._config.labels) for probs in activate(logits, activation)]

    def _rewards(self, logits: Values, params: PoolingParams) -> list[RewardOutput]:
        scores = activate(logits, self._config.activation if params.use_activation else "Identity")[..., 0]
        return [RewardOutput(float(score) if score.ndim == 0 else score.copy()) for score in scores]


def check_finite(request_ids: Sequence[int], values: Any) -> None:
    """Log which texts have values that are NaN or infinite. values: as in PooledTexts."""
    if isinstance(values, np.ndarray) and np.isfinite(values).all():
        return
    for request_id, one in zip(request_ids, values, strict=True):
        if not np.isfinite(one).all():
            logger.warning("request %d: the model's values are NaN or infinite", request_id)


def activate(logits: Values, activation: str) -> Values:
    """Return what a class of torch.nn makes of logits, such as probabilities over their last dimension."""
    layer = nn.Softmax(-1) if activation == "Softmax" else getattr(nn, activation)()
    values: Values = layer(torch.tensor(logits)).numpy()
    return values


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
