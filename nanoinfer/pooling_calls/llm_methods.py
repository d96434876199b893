"""The methods of `LLM` for models that pool: embeddings, classes, rewards."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from nanoinfer.aio import AsyncCalls
from nanoinfer.garbage import rare_collections
from nanoinfer.lora.lora_request import LoRARequests
from nanoinfer.pooling_calls.calls import PoolingArguments, PoolingCalls
from nanoinfer.pooling_calls.hidden_states import HiddenStatesReader, OnHiddenStates
from nanoinfer.pooling_calls.pooled_output import PooledClasses, PooledEmbedding, PooledReward
from nanoinfer.pooling_outputs import ClassificationOutput, EmbeddingOutput, PoolingOutputs, RewardOutput
from nanoinfer.text.arguments import OnError, Prompts


class PoolingMethods:
    """Gives `LLM`, which sets these fields, the methods that pool."""

    pooling_calls: PoolingCalls
    _async_calls: AsyncCalls
    _states_reader: HiddenStatesReader

    @rare_collections()
    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingArguments = None,
        use_tqdm: bool = True,
        *,
        prompt_name: str | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        hidden_states: Sequence[int] | None = None,
        hidden_state_positions: Literal["prompt", "last"] = "prompt",
        on_hidden_states: OnHiddenStates | None = None,
        lora_request: LoRARequests = None,
    ) -> PoolingOutputs[EmbeddingOutput]:
        """Return the embedding of one text or many: `output.outputs.embedding`, an array (size,) of float32.

        Texts are pooled and normalised as the files of sentence-transformers in the model's folder say. Without these
        files, a decoder's last token or the mean of an encoder's tokens is taken, normalised.

        prompts: as in `generate`.
        pooling_params: for all, or a list with one for each.
        prompt_name: the prompt in config_sentence_transformers.json that texts begin with; None for its default, if it
            has one.
        on_error: with "return", texts that cannot be served come back in their places, with the reason in
            `output.error` and NaN as values.
        tokenization_kwargs: {"truncate_prompt_tokens": n} has the tokenizer cut texts to n tokens, -1 to what fits.
        hidden_states and its like, lora_request: as in `generate`.

        Raises RequestError for texts that cannot be served, and where the model is a classifier.
        """
        wanted = self._states_reader.read(hidden_states, hidden_state_positions, on_hidden_states)
        portions = self.pooling_calls.prepare(
            PooledEmbedding,
            prompts,
            pooling_params,
            prompt_name,
            wanted,
            on_error=on_error,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
        )
        return self.pooling_calls.run(portions, use_tqdm, wanted)

    @rare_collections()
    def classify(
        self,
        prompts: Any,
        pooling_params: PoolingArguments = None,
        use_tqdm: bool = True,
        *,
        prompt_name: str | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> PoolingOutputs[ClassificationOutput]:
        """Return the probabilities of a classifier's classes: `output.outputs.probs`, an array (num_classes,).

        prompts: as in `generate`, or pairs of texts, (text, text), as cross-encoders take them. Logits become
        probabilities as the files of sentence-transformers say, or else by softmax or sigmoid, as config.json says;
        with PoolingParams(use_activation=False) they stay as they are. A model of ...ForTokenClassification has a row
        for each token. The rest is as in `embed`; of a pair, the first text begins with the prompt.
        """
        portions = self.pooling_calls.prepare(
            PooledClasses,
            prompts,
            pooling_params,
            prompt_name,
            on_error=on_error,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self.pooling_calls.run(portions, use_tqdm)

    @rare_collections()
    def reward(
        self,
        prompts: Any,
        pooling_params: PoolingArguments = None,
        use_tqdm: bool = True,
        *,
        prompt_name: str | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> PoolingOutputs[RewardOutput]:
        """Return the rewards that a model with a head of one value gives to texts: `output.reward`, a float.

        It is an array with a value for each token where the model rewards tokens. The value is that of the head as it
        is, unless use_activation is True. The rest is as in `classify`.
        """
        portions = self.pooling_calls.prepare(
            PooledReward,
            prompts,
            pooling_params,
            prompt_name,
            on_error=on_error,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self.pooling_calls.run(portions, use_tqdm)

    async def aembed(
        self,
        prompts: Prompts,
        pooling_params: PoolingArguments = None,
        *,
        prompt_name: str | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> PoolingOutputs[EmbeddingOutput]:
        """Do as `embed`, without hidden states, while other tasks of the event loop run."""
        options = {"on_error": on_error, "tokenization_kwargs": tokenization_kwargs, "lora_request": lora_request}
        return await self._pool(PooledEmbedding, prompts, pooling_params, prompt_name, **options)

    async def aclassify(
        self,
        prompts: Any,
        pooling_params: PoolingArguments = None,
        *,
        prompt_name: str | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> PoolingOutputs[ClassificationOutput]:
        """Do as `classify` while other tasks of the event loop run."""
        options = {"on_error": on_error, "tokenization_kwargs": tokenization_kwargs}
        return await self._pool(PooledClasses, prompts, pooling_params, prompt_name, **options)

    async def areward(
        self,
        prompts: Any,
        pooling_params: PoolingArguments = None,
        *,
        prompt_name: str | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> PoolingOutputs[RewardOutput]:
        """Do as `reward` while other tasks of the event loop run."""
        options = {"on_error": on_error, "tokenization_kwargs": tokenization_kwargs}
        return await self._pool(PooledReward, prompts, pooling_params, prompt_name, **options)

    async def _pool(self, *arguments: Any, **options: Any) -> PoolingOutputs[Any]:
        """Prepare a call all at once, in the thread that runs the steps, and await its outputs.

        Where prompts may have images, another thread prepares it: no step is to wait for these.
        """
        prepare = partial(self.pooling_calls.prepare, *arguments, at_once=True, **options)
        if self.pooling_calls.reads_images:
            portions = await asyncio.to_thread(prepare)
            return PoolingOutputs(await self._async_calls.complete(portions.take))
        return PoolingOutputs(await self._async_calls.complete(lambda: prepare().take()))
