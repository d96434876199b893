"""Lists what users of vLLM write and nanoinfer spells otherwise, does in any case, or does not have.

The rule: an option of vLLM is accepted with a value that says what nanoinfer does anyway, and with None. With any other
value it is refused, with our name for it or with the reason. A string below is our name, `only` has the values. Those
for SamplingParams are where its options are declared.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from nanoinfer.errors import NOT_SUPPORTED, Foreign, Foreigners, checking_names

Class = TypeVar("Class", bound=type)

# Options of LLM for what nanoinfer does not have, and the values that do not ask for it.
WITHOUT: dict[str, tuple[Any, ...]] = {
    """
        aggregate_engine_logging calculate_kv_scales data_parallel_external_lb data_parallel_hybrid_lb
        disable_sliding_window enable_dbo enable_elastic_ep enable_eplb enable_expert_parallel
        enable_mm_embeds enable_prompt_adapter enable_prompt_embeds fully_sharded_loras
        interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill ray_workers_use_nsight skip_mm_profiling
        skip_tokenizer_init trust_remote_code use_tqdm_on_load
    """: (False,),
    """
        cpu_offload_gb kv_offloading_size long_prefill_token_threshold num_lookahead_slots tokenizer_pool_size
    """: (0,),
    """
        decode_context_parallel_size max_long_partial_prefills max_num_partial_prefills nnodes num_scheduler_steps
        pipeline_parallel_size prefill_context_parallel_size stream_interval
    """: (1,),
    "config_format guided_decoding_backend lora_dtype tokenizer_mode": ("auto",),
    """
        additional_config code_revision cuda_graph_sizes cudagraph_capture_sizes
        default_mm_loras hf_config_path kv_events_config kv_transfer_config
        lora_extra_vocab_size lora_local_path lora_modules max_cpu_loras
        max_parallel_loading_workers model_loader_extra_config
        override_generation_config pooler_config quantization_param_path
        scheduler_cls tokenizer_revision worker_cls worker_extension_cls
    """: (),
}
CHUNKS = "prompts above max_num_batched_tokens are always computed in chunks"
GUIDED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")


def only(*accepted: Any, why: str = NOT_SUPPORTED) -> Foreign:
    """Describe an option that is accepted with these values, or left out."""
    return accepted, why


def guided(form: str) -> dict[str, str | Foreign | None]:
    """Return the options that vLLM had before structured_outputs, and what takes their place, written into `form`."""
    return {f"guided_{kind}": form.format(f"{kind}=...") for kind in GUIDED_KINDS}


LLM_NAMES: Foreigners = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "async_scheduling": "overlap",
    "torch_dtype": "dtype",
    **dict.fromkeys(("num_speculative_tokens", "speculative_model"), "speculative_config"),
    "reasoning_parser": "response_template",
    "tool_call_parser": "response_template",
    "rope_scaling": "hf_overrides={'rope_scaling': ...}",
    "rope_theta": "hf_overrides={'rope_theta': ...}",
    **guided("structured_outputs=StructuredOutputsParams({}) of SamplingParams"),
    "guided_decoding_disable_any_whitespace": "structured_outputs_config",
    "guided_decoding_disable_additional_properties": "structured_outputs_config",
    **{name: (accepted, NOT_SUPPORTED) for names, accepted in WITHOUT.items() for name in names.split()},
    "enable_chunked_prefill": only(True, why=CHUNKS),
    "enable_sleep_mode": only(True, False, why="sleep and wake_up need no preparation"),
    "compilation_config": only(why="compile=True compiles layers of transformers; nanoinfer's own need none"),
    "disable_custom_all_reduce": only(False, why="GPUs that reach each other's memory always use it"),
    "disable_cascade_attn": only(False, why="common prefixes are always read together where that is faster"),
    "disable_log_requests": only(True, why="requests are not logged; on_step shows what runs"),
    "enable_log_requests": only(False, why="requests are not logged; on_step shows what runs"),
    "disable_log_stats": only(True, why="get_metrics has the statistics, and nothing logs them"),
    "disable_async_output_proc": only(False, why="overlap=False collects each step before the next is launched"),
    "generation_config": only("vllm", why="what the model recommends is llm.default_sampling_params"),
    "hf_token": only(why="the hub's library reads the variable HF_TOKEN"),
    "ignore_patterns": only("original/**/*", why="only what is needed is downloaded"),
    "logits_processors": only(why="functions of one request are SamplingParams(logits_processors=[...])"),
    "max_seq_len_to_capture": only(why="CUDA graphs serve sequences of any length"),
    "preemption_mode": only("recompute", why="preempted sequences are computed again"),
    "scheduling_policy": only("fcfs", "priority", why="the order is that of priorities, then of arrival"),
    "served_model_name": only(why="nothing is served"),
    "swap_space": only(0, why="preempted sequences are computed again, and nothing is swapped"),
    "task": only("auto", "generate", why="runner='pooling' embeds, and a head is what the architecture says"),
    "convert": only("auto", "none", why="the architecture says what the model is; runner='pooling' embeds"),
    "use_v2_block_manager": only(True, why="there is one block manager"),
}

RANKS = "vLLM's score ranks pairs of texts, which classify and reward do here"
PROMPT_NAMES: Foreigners = {
    "prompt_token_ids": "prompts, as lists of token ids",
    "truncate_prompt_tokens": "tokenization_kwargs",
    **dict.fromkeys(("lora_request", "prompt_adapter_request", "mm_processor_kwargs", "multi_modal_data")),
}
CALL_NAMES: Foreigners = {
    **PROMPT_NAMES,
    **guided("structured_outputs=StructuredOutputsParams({}) of SamplingParams"),
    "guided_options_request": "structured_outputs of SamplingParams",
    "chat_template_content_format": only("auto"),
}

# The same for fields of a line of run-batch beside sampling options, those of OpenAI included. Where nothing else is
# said, OpenAI's default is accepted. Fields that no answer depends on have no place here: `IGNORED` of
# batch/openai_format.py has them.
LINE_NAMES: Foreigners = {
    **{f"guided_{kind}": f'"structured_outputs": {{"{kind}": ...}}' for kind in GUIDED_KINDS},
    "add_generation_prompt": only(True, why="every answer is a new message"),
    "audio": only(why="answers are texts"),
    "chat_template": only(why="--tokenizer names a folder with another template for all lines"),
    "continue_final_message": only(
        False, why="every answer is a new message; use /v1/completions to go on with a text"
    ),
    "documents": only(why="write them into a message"),
    "echo": only(False, why="only prompts of /v1/completions come back"),
    "function_call": only("auto", "none", why="functions are given as tools"),
    "functions": only(why="give them as tools"),
    "include_reasoning": only(True, why="nothing of an answer is left out; --response-template has thoughts apart"),
    "logits_processors": only(why="a file has no functions; use logit_bias, or generate of LLM"),
    "modalities": only(["text"], why="answers are texts"),
    "moderation": only(why="nothing is moderated"),
    "parallel_tool_calls": only(
        True, why="tool calls are as many as the model writes; tool_choice that names a function has one"
    ),
    "priority": only(0, why="lines are asked in the order of the file"),
    "reasoning_effort": only(
        "medium",
        why="the chat template decides about reasoning; use what it reads as chat_template_kwargs, such as "
        '{"reasoning_effort": "low"} or {"enable_thinking": false}',
    ),
    "request_id": only(why="a line is named by its custom_id"),
    "return_token_ids": only(False, why="an answer has its token ids where it has no text"),
    "return_tokens_as_token_ids": only(False),
    "skip_reading_prefix_cache": only(False, why="--no-enable-prefix-caching is for all lines"),
    "stream": only(False, why="each answer is written once, when it is complete"),
    "suffix": only(why="write the model's own tokens for a gap into the prompt"),
    "tool_choice": only(
        "auto",
        why="the model decides what it calls; give tools to have one of them called",
    ),
    "truncate_prompt_tokens": only(why="no prompt is cut; shorten it"),
    "verbosity": only("medium", why="ask for it in a message"),
    "web_search_options": only(why="nothing is looked up; write what was found into a message"),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs")),
}


def with_vllm_names(cls: Class) -> Class:
    """Have all methods of a class, inherited ones too, take vLLM's names of options, and hint at misspelt ones."""
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)  # neither static methods nor those of the class
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(cls, name, _with_checked_names(method))
    return cls


def _with_checked_names(method: Callable[..., Any]) -> Callable[..., Any]:
    name, known = method.__name__, [*inspect.signature(method).parameters][1:]
    if not known:
        return method
    foreign = CALL_NAMES if "sampling_params" in known else PROMPT_NAMES if "prompts" in known else {}
    foreign = {key: its for key, its in foreign.items() if its != "tokenization_kwargs" or its in known}
    if name == "score":
        foreign |= dict.fromkeys(("data_1", "data_2", "text_1", "text_2"), only(why=RANKS))
    return checking_names(method, name, known, foreign)
