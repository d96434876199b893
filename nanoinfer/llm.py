"""The facade: prompts in, completions out."""

from nanoinfer.before_torch import import_seconds  # before all others

# isort: split
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nanoinfer.aio import AsyncCalls, AsyncMethods
from nanoinfer.config import EngineConfig, describe_options, showing_options_of
from nanoinfer.control.weight_methods import ControlMethods
from nanoinfer.engine.engine import Action, Engine, StepCallback
from nanoinfer.engine.preparer import Portions
from nanoinfer.engine.request_queue import Inbox
from nanoinfer.errors import EngineClosedError, WorkerError
from nanoinfer.garbage import rare_collections
from nanoinfer.loading import find_model, load_engine, reduce_llm
from nanoinfer.lora.lora_request import LoRARequest, LoRARequests
from nanoinfer.metrics import EngineMetrics, engine_html
from nanoinfer.outputs import RequestOutput, RequestOutputs, StreamChunk
from nanoinfer.pooling_calls.calls import PoolingCalls
from nanoinfer.pooling_calls.hidden_states import (
    HiddenStatesOptions,
    HiddenStatesReader,
    OnHiddenStates,
    raising_errors,
)
from nanoinfer.pooling_calls.llm_methods import PoolingMethods
from nanoinfer.progress import Progress
from nanoinfer.replicas.start_replicas import load_replicas
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scoring import ScoringMethods
from nanoinfer.text.arguments import (
    GivenPrompt,
    OnError,
    OnFinish,
    Params,
    Priorities,
    Prompts,
    as_list_of_prompts,
    as_prompt,
    as_request_ids,
    check_on_finish,
    check_streamable,
)
from nanoinfer.text.chat import Conversation, Conversations
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.response_reader import ResponseReader
from nanoinfer.vllm_names import with_vllm_names

import_seconds.end()


@with_vllm_names
class LLM(ScoringMethods, PoolingMethods, ControlMethods, AsyncMethods):
    """Loads a language model, and completes prompts with it.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            outputs = llm.generate(["Hello", [1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=256))

    model: a local folder, the id of a model on the Hugging Face hub, or "tiny" for the model that is included.
    options: keyword arguments, which are listed below.

    Calls from several threads are served together; their steps take turns.
    Raises TypeError for an unknown option, ConfigError for a value out of range, ModelError for a model that cannot
    be used. After a process of a tensor-parallel engine has ended, every call raises WorkerError. With
    data_parallel_size the other replicas go on, and calls raise WorkerError only after the last one has ended.
    """

    @showing_options_of(EngineConfig)
    def __init__(self, model: str | Path, **options: Any) -> None:
        started = time.perf_counter()
        files = find_model(EngineConfig.from_options(model, options))
        self.config = files.config
        self._default_sampling_params = files.default_sampling_params
        loaded = load_engine(files) if self.config.data_parallel_size == 1 else load_replicas(files)
        self.engine: Engine = loaded.engine  # an LLMEngine, or ReplicatedEngine
        self.queue, self.preparer = loaded.queue, loaded.preparer
        self.max_model_len = loaded.max_model_len  # tokens of a prompt and its completion together
        self._runner_info = loaded.info
        self.pooling_calls = PoolingCalls(
            self.queue, self.preparer, files.model_config, self.config, self.max_model_len, loaded.pooling_steps
        )
        self._weights: object = files.list_files()  # identifies the weights when `datasets` hashes this object
        self._states_reader = HiddenStatesReader(files.model_config, self.config, loaded.info.dtype)
        self._inbox = Inbox()  # outputs of `add_request`'s requests, until `step` returns them
        self._control, self.adapters = loaded.control, loaded.adapters
        self._response_reader = ResponseReader(self.config.response_template, self.preparer.prompt_processor)
        self._async_calls = AsyncCalls(self.queue, self.preparer, self._response_reader)
        self._write_trace = loaded.start_trace(self.config.trace, repr(self)) if self.config.trace else None
        loaded.log_start(repr(self), import_seconds.take(), time.perf_counter() - started)

    def __repr__(self) -> str:
        device, dtype = self._runner_info.device, str(self._runner_info.dtype).removeprefix("torch.")
        size = self.config.data_parallel_size
        replicas = f", data_parallel_size={size}" if size > 1 else ""
        closed = ""
        try:
            self.engine.check_open(is_for_steps=False)
        except (EngineClosedError, WorkerError):
            closed = ", closed"
        return f"LLM({self.config.model!r}, {device}, {dtype}, max_model_len={self.max_model_len}{replicas}{closed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_llm(self.config, self._weights)

    def _repr_html_(self) -> str:
        return engine_html(repr(self), self._runner_info.description, self.get_metrics())

    @rare_collections()
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = None,
        on_finish: OnFinish | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        hidden_states: Sequence[int] | None = None,
        hidden_state_positions: Literal["prompt", "last"] = "prompt",
        on_hidden_states: OnHiddenStates | None = None,
        lora_request: LoRARequests = None,
    ) -> RequestOutputs:
        """Complete one prompt or many; the outputs come in the order of the prompts.

        prompts: one prompt, or a list, an array or a column of prompts. A prompt is a string, a list of token ids, or
            vLLM's {"prompt": ...} or {"prompt_token_ids": ...}, also with {"multi_modal_data": {"image": ...}}.
        sampling_params: one for all prompts, or a list with one for each prompt.
        use_tqdm: show finished requests and tokens a second.
        priority: a whole number for each prompt (0 for all is the default); higher runs first, equal ones first come
            first served, and lower ones give way first when memory is short.
        on_finish: called with each output as its request finishes, once all prompts are checked. An error that it
            raises ends the call.
        on_error: with "return", prompts that cannot be served come back in their places, with finish_reason "error" and
            the reason in `outputs[0].error`; the other prompts are answered.
        tokenization_kwargs: {"truncate_prompt_tokens": n} keeps the last n tokens of a prompt, -1 as many as fit;
            {"add_special_tokens": False} adds none.
        hidden_states: layers whose hidden states of the prompts are wanted, numbered as in transformers: 0 is the
            embedding, the last is after the final norm, negative ones count from the end. They come as
            `output.hidden_states`, by layer.
        hidden_state_positions: return the states of the whole "prompt", or of its "last" token alone.
        on_hidden_states: called with (index of the prompt, layer, first token, states) as each chunk is launched; the
            states are on the device, to be used on its current stream, and the engine keeps no copy. An error that it
            raises ends the call.
        lora_request: the adapter for all prompts, or a list with one, or None, for each; see `add_lora`.

        Steps begin when the first few hundred prompts are checked; if the call fails later, nothing of it is left
        behind. Raises RequestError for prompts or sampling_params that cannot be served.
        """
        check_on_finish(on_finish)
        prompts = as_list_of_prompts(prompts)
        wanted = self._states_reader.read(hidden_states, hidden_state_positions, on_hidden_states)
        portions = self.preparer.prepare_portions(
            prompts,
            sampling_params,
            priority,
            tokenization_kwargs=tokenization_kwargs,
            use_tqdm=use_tqdm,
            on_error=on_error,
            lora_request=lora_request,
            at_once=wanted is not None or on_finish is not None,
        )
        return self._complete(portions, use_tqdm, on_finish, wanted)

    @rare_collections()
    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: Priorities = None,
        on_finish: OnFinish | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        hidden_states: Sequence[int] | None = None,
        hidden_state_positions: Literal["prompt", "last"] = "prompt",
        on_hidden_states: OnHiddenStates | None = None,
        lora_request: LoRARequests = None,
    ) -> RequestOutputs:
        """Answer one conversation or many, written out by the tokenizer's own chat template.

        messages: a list of {"role": ..., "content": text or parts, also images}, or a list or a column of such lists.
        tools: functions, or their JSON schemas, that the model is told of.
        tool_choice: "required" forces a tool call; {"type": "function", "function": {"name": ...}} names the tool.
        add_generation_prompt: end the prompt with the template's beginning of an answer.
        continue_final_message: with add_generation_prompt=False, continue the last message instead.
        chat_template: a template to use in place of the tokenizer's own.
        chat_template_kwargs: other arguments of the template, such as {"enable_thinking": False}.
        mm_processor_kwargs: options of the image processor; they override those given to `LLM`.

        `output.message` is the answer as {"role", "content", "reasoning", "tool_calls"}, for the next call's messages.
        Other arguments and errors are as in `generate`. Also raises RequestError for a message without role or
        content, and if there is no tokenizer or no template.
        """
        check_on_finish(on_finish)
        wanted = self._states_reader.read(hidden_states, hidden_state_positions, on_hidden_states)
        template_options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        portions = self.preparer.prepare_chats(
            messages,
            self._response_reader.with_tool_choice(sampling_params, tools, tool_choice),
            template_options,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            use_tqdm=use_tqdm,
            on_error=on_error,
            lora_request=lora_request,
            at_once=wanted is not None or on_finish is not None,
        )
        return self._complete(portions, use_tqdm, self._response_reader.reading(tools, on_finish), wanted)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, *, lora_request: LoRARequests = None
    ) -> Iterator[StreamChunk]:
        """Complete one prompt or many, and yield chunks of each as its tokens come.

        The arguments are as in `generate`, and so are the errors, raised by this call. The requests are queued
        when the first chunk is asked for. Other calls may run between two chunks. Leaving the loop early aborts
        unfinished requests: the next step of any call frees what they hold. With n > 1 the samples' chunks come side
        by side, and `sample` says which one a chunk belongs to. Raises RequestError for prompt_logprobs too, since
        chunks have no field for them.
        """
        requests = self.preparer.prepare(as_list_of_prompts(prompts), sampling_params, lora_request=lora_request)
        check_streamable([request.sampling_params for request in requests])
        return self._stream(requests)

    def add_request(
        self,
        prompt: GivenPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Queue a request for `step` to run and return its id. Raises RequestError for one that cannot be served."""
        requests = self.preparer.prepare([as_prompt(prompt)], sampling_params, [priority], lora_request=lora_request)
        return self.queue.add_requests(requests, self._inbox)[0]

    def add_chat_request(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Queue a conversation, as `chat` reads it, for `step` to answer, and return its id."""
        template_options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        options = {"priority": [priority], "lora_request": lora_request}
        requests = self.preparer.prepare_chat(messages, sampling_params, template_options, **options)
        with self.queue.lock:  # or the `step` of another thread could return the output before it is expected
            return self._response_reader.expect(self.queue.add_requests(requests, self._inbox)[0], tools)

    def step(self) -> list[RequestOutput]:
        """Return the outputs of `add_request`'s requests that have finished; if none has, run one step first."""
        if not self._inbox.outputs:
            self.queue.step()
        return self._response_reader.read_expected(self.queue.collect(self._inbox))

    def is_finished(self) -> bool:
        """Return whether no request of any call is left, and `step` has nothing more to return."""
        return self.engine.is_finished() and not self._inbox.outputs

    def abort(self, request_ids: int | Collection[int]) -> None:
        """Have the next step finish these requests as they are, with finish_reason "abort".

        Ids that are unknown or finished are ignored. Raises RequestError for a value that is not an id.
        """
        self.engine.act_later(Action.ABORT, as_request_ids(request_ids))

    def pause(self, request_ids: int | Collection[int]) -> None:
        """Have these requests compute nothing from the next step on, until they are resumed. Ids as in `abort`.

        A paused request is the first to give up its KV cache when another request needs blocks; after `resume` the
        cache is then computed again. Its tokens do not change. A token that is being computed still comes. While only
        paused requests are left, `generate` and similar calls wait, and `step` waits 10 ms at most.
        """
        self.engine.act_later(Action.PAUSE, as_request_ids(request_ids))

    def resume(self, request_ids: int | Collection[int]) -> None:
        """Have paused requests go on with the next step. Ids as in `abort`; requests that are not paused do not change.

        A request that has lost its blocks goes back into the queue, to the place of its priority and arrival.
        """
        self.engine.act_later(Action.RESUME, as_request_ids(request_ids))

    def get_metrics(self) -> EngineMetrics:
        """Return the work done since this LLM was made, and what it holds now."""
        return self.engine.metrics()

    def on_step(self, callback: StepCallback) -> Callable[[], None]:
        """Call `callback` with a StepEvent after each step; return a function that ends these calls.

        It is called once the step's outputs are made, in the thread that runs the step, and delays the next one. An
        error in it ends the call that ran the step. Raises RequestError if `callback` cannot be called.
        """
        return self.engine.on_step(callback)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, from transformers; None where the model's folder has none."""
        tokenizer = self.preparer.prompt_processor.tokenizer
        return tokenizer.hf if tokenizer else None

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's own generation_config.json recommends. Raises ModelError where that is out of range."""
        return self._default_sampling_params()

    def get_tokenizer(self) -> Any:
        """Return `tokenizer`: vLLM's name for it."""
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, as `generate` makes them. Raises RequestError where there is no tokenizer."""
        return self.preparer.prompt_processor.encode_text(text)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of one token id or several. Raises RequestError for a wrong id, or without a tokenizer."""
        return self.preparer.prompt_processor.decode(token_ids, skip_special_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.queue.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and the cache; closing twice is fine."""
        with self.queue.lock:
            self.engine.close()
            self.preparer.close()
            if self._write_trace is not None:
                self._write_trace()

    exit = close  # nano-vllm's name

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complete(
        self,
        portions: Portions,
        use_tqdm: bool,
        on_finish: OnFinish | None = None,
        wanted: HiddenStatesOptions | None = None,
    ) -> RequestOutputs:
        """Run the requests of a call to their end."""
        portions = portions if wanted is None else wanted.add_to(portions)
        progress = Progress(self.engine.metrics, portions.num_requests, use_tqdm)
        with progress, raising_errors(wanted, progress.show) as show:
            outputs = self.queue.complete(portions, show, on_finish)
        return RequestOutputs(outputs)

    def _stream(self, requests: list[PreparedRequest]) -> Iterator[StreamChunk]:
        """Run these requests and yield their chunks; if the loop is left early, a later step aborts the rest."""
        inbox, with_part = Inbox(is_stream=True), self._response_reader.telling_parts(requests)
        try:
            self.queue.add_requests(requests, inbox)
            while not inbox.is_complete or inbox.chunks:  # in this order: another thread's step may bring the last ones
                if inbox.chunks:
                    yield with_part(inbox.chunks.popleft())
                else:
                    self.queue.step()
        finally:
            self.queue.abandon(inbox)


LLM.__signature__ = inspect.signature(EngineConfig)  # type: ignore[attr-defined]  # for help() and for notebooks
LLM.__doc__ = f"{inspect.cleandoc(LLM.__doc__ or '')}\n\n{describe_options()}\n"
