"""Samples for TRL's GRPOTrainer: `GRPOTrainer(..., rollout_func=rollout_func(llm))`.

TRL calls it once for each batch of prompts of this process, in training and in evaluation. Its sampler has repeated
each prompt as often as completions are wanted, so every row gets one.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanoinfer.errors import ConfigError, ModelError, RequestError
from nanoinfer.integrations.trainer_weights import named_weights
from nanoinfer.llm import LLM
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

MODE = "processed_logprobs"  # those of the distribution that is sampled, as the loss means them


def rollout_func(
    llm: LLM, sampling_params: SamplingParams | None = None, *, sleep_level: int | None = None
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a function of prompts and the trainer that samples with `llm`, for `GRPOTrainer(rollout_func=...)`.

    It returns prompt_ids, completion_ids and logprobs: a list for each row, the last with one float for each token of
    the completion. Whenever the trainer's global_step has changed, it first copies the trainer's weights into the
    engine. Rows draw from random streams of their own, which follow from the trainer's seed and process.

    llm: made with logprobs_mode="processed_logprobs". sampling_params: in place of those that follow from the
    trainer's GRPOConfig (temperature, top_p, top_k, min_p, repetition_penalty, max_completion_length and
    generation_kwargs); n must be 1, and seed None. sleep_level: 1 or 2 gives the engine's memory to the trainer between
    two calls, as `LLM.sleep` does.

    Raises ConfigError for an engine or a level that does not fit, RequestError for sampling_params; the function raises
    ModelError where a row ends in an error, such as logits that are NaN.
    """
    if llm.config.logprobs_mode != MODE:
        raise ConfigError(
            f"logprobs_mode={llm.config.logprobs_mode!r} of this LLM does not give the log-probabilities that tokens "
            f"are drawn with; make it with logprobs_mode={MODE!r}"
        )
    if sleep_level not in (None, 1, 2):
        raise ConfigError(f"sleep_level={sleep_level!r} is not known; use None to stay awake, 1 or 2 as in LLM.sleep")
    if sampling_params is not None:
        _check(sampling_params)
    return Rollout(llm, sampling_params, sleep_level)


class Rollout:
    """Is what `rollout_func` returns."""

    def __init__(self, llm: LLM, sampling_params: SamplingParams | None, sleep_level: int | None) -> None:
        self._llm, self._sampling_params, self._sleep_level = llm, sampling_params, sleep_level
        self._global_step: int | None = None  # whose weights the engine has
        self._num_rows = 0  # sampled so far

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self._wake_up(trainer)
        outputs = self._sample(prompts, trainer)
        if self._sleep_level is not None:
            self._llm.sleep(self._sleep_level)
        for row, output in enumerate(outputs):
            if output.error is not None:
                raise ModelError(f"row {row} of {len(outputs)} cannot be sampled: {output.error}")
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [output.token_ids for output in outputs],
            "logprobs": [output.outputs[0].logprobs.of_tokens() for output in outputs],  # type: ignore[union-attr]
        }

    def _wake_up(self, trainer: Any) -> None:
        """Give the engine its memory, and the trainer's weights if these have changed, or were dropped."""
        step = trainer.state.global_step
        self._llm.wake_up(tags=["weights"])
        if step != self._global_step or self._sleep_level == 2:
            self._llm.update_weights(named_weights(trainer.model))
            self._global_step = step
        self._llm.wake_up(tags=["kv_cache"])

    def _sample(self, prompts: list[Any], trainer: Any) -> list[RequestOutput]:
        args = trainer.args
        params = self._sampling_params or _params_of(args)
        # Two processes may have rows of the same prompt, which must not draw the same tokens.
        source = random.Random(f"{args.seed} {trainer.accelerator.process_index} {self._num_rows}")
        self._num_rows += len(prompts)
        changes: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True, "detokenize": bool(params.stop)}
        of_rows = [replace(params, **changes, seed=source.getrandbits(63)) for _ in prompts]
        if isinstance(prompts[0], str):
            return self._llm.generate(prompts, of_rows, use_tqdm=False)
        continues = prompts[0][-1]["role"] == "assistant"
        return self._llm.chat(
            prompts,
            of_rows,
            use_tqdm=False,
            tools=trainer.tools or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            chat_template=trainer.chat_template,
            chat_template_kwargs=trainer.chat_template_kwargs or None,
        )


def _params_of(args: Any) -> SamplingParams:
    """Return what a GRPOConfig asks for."""
    options = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
    }
    params = SamplingParams(**options | (args.generation_kwargs or {}))
    _check(params)
    return params


def _check(params: SamplingParams) -> None:
    """Raise RequestError for options that a rollout cannot have."""
    if params.n != 1:
        raise RequestError(f"n={params.n} in a rollout: the trainer's sampler repeats the prompts; use n=1")
    if params.seed is not None:
        raise RequestError(
            f"seed={params.seed} would draw the same tokens for all rows of a prompt; leave it out, and the trainer's "
            "own seed decides"
        )
    if params.num_logprobs:
        raise RequestError(f"{params.num_logprobs} logprobs in a rollout: only those of the sampled tokens are used")
