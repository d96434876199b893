"""Makes requests of what a user gives: prompts and conversations are checked and tokenized, grammars are compiled.

Nothing is queued here: see `request_queue.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nanoinfer.engine.interfaces import Constraints, Engine
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import (
    Errors,
    OnError,
    Params,
    Priorities,
    Prompt,
    as_priorities,
    check_on_error,
    one_for_each,
)
from nanoinfer.text.chat import Conversation, Conversations, as_conversations, render_chats
from nanoinfer.text.portions import PORTION_SIZE, Portions
from nanoinfer.text.prompts import PreparedRequest, PromptProcessor


class Preparer:
    """Prepares the requests of calls. Any thread may call any method.

    engine: must be open, and awake. prompt_processor: checks and tokenizes prompts. constraints: compiles what limits
    their tokens.
    """

    def __init__(self, engine: Engine, prompt_processor: PromptProcessor, constraints: Constraints) -> None:
        self._engine, self._constraints = engine, constraints
        self.prompt_processor = prompt_processor
        self.portion_size: int | None = PORTION_SIZE * engine.config.data_parallel_size  # of Portions
        if engine.config.distributed_executor_backend == "external_launcher":
            self.portion_size = None  # or ranks would schedule different steps, as their threads get on

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        priority: Priorities = None,
        **options: Any,
    ) -> list[PreparedRequest]:
        """Check everything that a user can get wrong, before anything is queued. options: of `prepare_portions`."""
        return self.prepare_portions(prompts, sampling_params, priority, at_once=True, **options).take()

    def prepare_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None,
        template_options: Mapping[str, Any],
        **options: Any,
    ) -> list[PreparedRequest]:
        """Do as `prepare` with one conversation. template_options: of `render_chats`."""
        return self.prepare_chats([messages], sampling_params, template_options, at_once=True, **options).take()

    def prepare_chats(
        self,
        messages: Conversations,
        sampling_params: Params,
        template_options: Mapping[str, Any],
        **options: Any,
    ) -> Portions:
        """Do as `prepare_portions` with conversations. template_options: of `render_chats`. options: the others."""
        render = partial(render_chats, self.prompt_processor.require_tokenizer(), **template_options)
        # The template writes the special tokens.
        options |= {"add_special_tokens": False, "render": render}
        return self.prepare_portions(as_conversations(messages), sampling_params, **options)

    def prepare_portions(
        self,
        prompts: Sequence[Any],
        sampling_params: Params = None,
        priority: Priorities = None,
        *,
        add_special_tokens: bool = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
        on_error: OnError = "raise",
        render: Callable[[Mapping[int, Any], Errors], dict[int, Prompt]] | None = None,
        at_once: bool = False,
    ) -> Portions:
        """Check what a user can get wrong, and prepare the requests of a call: the first portion, or all at once.

        render: makes prompts of what was given. at_once: whether all are checked before any is queued; calls with
        priorities always are, and so are calls with grammars and the like, which are compiled in parallel. The other
        arguments, and the errors, are those of `LLM.generate`.
        """
        check_on_error(on_error)
        self._engine.check_open()
        all_params = one_for_each(sampling_params, len(prompts))
        are_shared = len({*map(id, all_params)}) == 1
        priorities = as_priorities(priority, len(prompts))

        def prepare(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
            given = {index: prompts[index] for index in indices}
            given = given if render is None else render(given, errors)
            requests = self.prompt_processor.prepare(
                given, all_params, priorities, errors, add_special_tokens, tokenization_kwargs, are_shared
            )
            if not errors or on_error == "return":
                self._constraints.add_constraints(requests, errors, use_tqdm)
            return [*requests.values()]

        at_once |= priority is not None or self._constraints.is_asked(all_params)
        return Portions(prepare, range(len(prompts)), None if at_once else self.portion_size, on_error)

    def compile_grammars(self, params: Sequence[SamplingParams]) -> None:
        """Compile what these ask for, so that `prepare` finds it. Raises RequestError where that cannot be done."""
        self._constraints.compile(params)
