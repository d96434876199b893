"""Samples for TRL's GRPOTrainer: `GRPOTrainer(..., rollout_func=rollout_func(llm))`.

TRL calls it once for each batch of prompts of this process, in training and in evaluation. Its sampler has repeated
each prompt as often as completions are wanted, so every row gets one. The trainer's weights are read whole and under
the names of its checkpoint, however the trainer has split or wrapped them. Of a model with an adapter of PEFT, an LLM
with enable_lora gets the adapter alone.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nanoinfer.errors import ConfigError, ModelError, RequestError
from nanoinfer.llm import LLM
from nanoinfer.lora.adapter_weights import WEIGHTS_FILE
from nanoinfer.lora.lora_request import LoRARequest
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

MODE = "processed_logprobs"  # those of the distribution that is sampled, as the loss means them
ADAPTER_NAME, ADAPTER_ID = "trainer", 2**31 - 1  # of the trainer's adapter in the engine
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpointing, of torch.compile


def rollout_func(
    llm: LLM, sampling_params: SamplingParams | None = None, *, sleep_level: int | None = None
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a function of prompts and the trainer that samples with `llm`, for `GRPOTrainer(rollout_func=...)`.

    It returns prompt_ids, completion_ids and logprobs: a list for each row, the last with one float for each token of
    the completion. Whenever the trainer's global_step has changed, it first copies the trainer's weights into the
    engine. Rows draw from random streams of their own, which follow from the trainer's seed and process.

    llm: made with logprobs_mode="processed_logprobs". With enable_lora=True it has the trainer's base model, and gets
    the trainer's adapter alone, which must be one that it serves; without, adapters are merged.
    sampling_params: in place of those that follow from the trainer's GRPOConfig (temperature, top_p, top_k, min_p,
    repetition_penalty, max_completion_length and generation_kwargs); n must be 1, and seed None.
    sleep_level: 1 or 2 gives the engine's memory to the trainer between two calls, as `LLM.sleep` does.

    Raises ConfigError for an engine or a level that does not fit, RequestError for sampling_params; the function raises
    ModelError where a row ends in an error, such as logits that are NaN.
    """
    if llm.config.logprobs_mode != MODE:
        raise ConfigError(
            f"logprobs_mode={llm.config.logprobs_mode!r} of this LLM does not give the log-probabilities that tokens "
            f"are drawn with; make it with logprobs_mode={MODE!r}"
        )
    if llm.config.distributed_executor_backend != "mp" and llm.config.tensor_parallel_size > 1:
        raise ConfigError(
            "the processes of a trainer have different prompts, and those of this LLM share one model; use "
            "tensor_parallel_size=1 with distributed_executor_backend='external_launcher'"
        )
    if sleep_level not in (None, 1, 2):
        raise ConfigError(f"sleep_level={sleep_level!r} is not known; use None to stay awake, 1 or 2 as in LLM.sleep")
    if sampling_params is not None:
        _check(sampling_params)
    return Rollout(llm, sampling_params, sleep_level)


class Rollout:
    """Describes the dict that `rollout_func` returns."""

    def __init__(self, llm: LLM, sampling_params: SamplingParams | None, sleep_level: int | None) -> None:
        self._llm, self._sampling_params, self._sleep_level = llm, sampling_params, sleep_level
        self._global_step: int | None = None  # whose weights the engine has
        self._num_rows = 0  # sampled so far
        self._adapter: LoRARequest | None = None  # the trainer's, once the engine has it

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
            if self._llm.config.enable_lora and hasattr(trainer.model, "merge_adapter"):
                self._update_adapter(trainer.model)
            else:
                self._llm.update_weights(named_weights(trainer.model))
            self._global_step = step
        self._llm.wake_up(tags=["kv_cache"])

    def _update_adapter(self, model: Any) -> None:
        """Give the engine the adapter of a model of PEFT; the base model too, if the engine has dropped it."""
        if self._sleep_level == 2:
            self._llm.update_weights(_base_weights(model))
        matrices = dict(_active_matrices(model))
        if self._adapter is not None:
            self._llm.update_weights(matrices, lora=ADAPTER_NAME)
            return
        self._folder = tempfile.TemporaryDirectory()  # the config stays there, for later updates
        model.peft_config[_active_adapter(model)].save_pretrained(self._folder.name)
        save_file(matrices, Path(self._folder.name) / WEIGHTS_FILE)
        adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, self._folder.name)
        self._llm.remove_lora(ADAPTER_ID)  # of an earlier trainer
        self._llm.add_lora(adapter)
        self._adapter = adapter

    def _sample(self, prompts: list[Any], trainer: Any) -> list[RequestOutput]:
        args = trainer.args
        params = self._sampling_params or _params_of(args)
        # Two processes may have rows of the same prompt, which must not draw the same tokens.
        source = random.Random(f"{args.seed} {trainer.accelerator.process_index} {self._num_rows}")
        self._num_rows += len(prompts)
        changes: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True, "detokenize": bool(params.stop)}
        of_rows = [replace(params, **changes, seed=source.getrandbits(63)) for _ in prompts]
        if isinstance(prompts[0], str):
            return self._llm.generate(prompts, of_rows, use_tqdm=False, lora_request=self._adapter)
        continues = prompts[0][-1]["role"] == "assistant"
        return self._llm.chat(
            prompts,
            of_rows,
            use_tqdm=False,
            lora_request=self._adapter,
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


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors for `LLM.update_weights`, each gathered when its turn comes, and freed afterwards.

    Tensors that FSDP 2 or DeepSpeed ZeRO-3 has split are gathered, which takes every process of the trainer: all must
    go through all weights. Adapters of PEFT are merged meanwhile. Raises ConfigError for FSDP 1, and for adapters of a
    model that is split.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError("the trainer's model is split by FSDP 1, which is not gathered; use fsdp_version=2")
    if hasattr(model, "merge_adapter"):
        yield from _merged_weights(model)
        return
    for name, param in model.named_parameters():
        with _whole(param) as tensor:
            yield _unwrapped(name), tensor


def _merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model with adapters, which are merged into them, under the base model's names."""
    if any(map(_is_split, model.parameters())):
        raise ConfigError("adapters of a model that is split are not merged; train it whole, or without adapters")
    model.merge_adapter()
    try:
        yield from _base_weights(model)
    finally:
        model.unmerge_adapter()


def _base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model of PEFT without its adapter's matrices, under the base model's names."""
    for name, param in model.named_parameters():
        if model.prefix not in name and "original_module" not in name:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            with _whole(param) as tensor:
                yield _unwrapped(name.replace("modules_to_save.default.", "")), tensor


def _active_matrices(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of what the active adapter of a model has, by PEFT's names, each gathered when its turn comes."""
    for name, param in model.named_parameters():
        if f".{_active_adapter(model)}." in name:
            with _whole(param) as tensor:
                yield _unwrapped(name), tensor.clone()


def _active_adapter(model: Any) -> str:
    active = model.active_adapter
    names: list[str] = [active] if isinstance(active, str) else [*active]
    if len(names) != 1:
        raise ConfigError(f"the trainer's model has the active adapters {names}, and one is served; activate one")
    return names[0]


@contextmanager
def _whole(param: Any) -> Iterator[Tensor]:
    """Give a parameter whole while the block runs."""
    if hasattr(param, "full_tensor"):  # a DTensor, of FSDP 2
        device = param.device_mesh.device_type
        yield (param if param.device.type == device else param.to(device)).detach().full_tensor()
    elif hasattr(param, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            yield param.detach()
    else:
        yield param.detach()


def _is_split(param: Any) -> bool:
    return hasattr(param, "full_tensor") or hasattr(param, "ds_id")


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
