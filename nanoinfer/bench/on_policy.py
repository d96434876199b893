"""`nanoinfer bench on-policy`: the log-probabilities that tokens are sampled with, against a trainer's forward pass.

The trainer is a model of transformers. Its own difference between two batch sizes says what rounding alone does. Models
with experts are compared once more with the engine's routing replayed: where rounding moves a token to another expert,
everything after it differs.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench.report import describe_machine, find_device, print_row, print_title
from nanoinfer.bench.workloads import Load, draw_workload
from nanoinfer.checkpoint.hub import resolve_model_folder
from nanoinfer.errors import ConfigError
from nanoinfer.outputs import RequestOutput

NUM_PROMPTS, MAX_PROMPT, MAX_TOKENS, BATCH = 32, 100, 64, 8


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Sample, compute the same log-probabilities with transformers, print a table, and return all figures."""
    device, folder = find_device(), str(resolve_model_folder(args.model))
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    trainer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    has_experts = bool(_routers(trainer))
    options: dict[str, Any] = {"device": device, "dtype": dtype, "logprobs_mode": "processed_logprobs"}
    options |= {"enable_return_routed_experts": has_experts, "gpu_memory_utilization": 0.4}
    with LLM(folder, **options) as llm:
        llm.update_weights(trainer.named_parameters())  # as a trainer does
        lengths: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(temperature=args.temperature, logprobs=0, flat_logprobs=True, **lengths)
        load = Load(NUM_PROMPTS, (1, MAX_PROMPT), (MAX_TOKENS, MAX_TOKENS))
        prompts = draw_workload(args.seed, load, trainer.config.get_text_config().vocab_size).prompts
        outputs = llm.generate(prompts, params, use_tqdm=False)
        name = repr(llm)
    logprobs: list[Any] = [output.outputs[0].logprobs for output in outputs]  # FlatLogprobs
    sampled = torch.tensor([value for logprobs in logprobs for value in logprobs.of_tokens()])
    alone = _logprobs(trainer, outputs, 1, args.temperature)
    differences = {
        "engine and trainer": sampled - alone,
        f"trainer, 1 and {BATCH} rows at a time": alone - _logprobs(trainer, outputs, BATCH, args.temperature),
    }
    if has_experts:
        replayed = _logprobs(trainer, outputs, 1, args.temperature, replays=True)
        differences["engine and trainer, its routing replayed"] = sampled - replayed
    figures = {
        what: {"mean": gaps.abs().mean().item(), "worst": gaps.abs().max().item()} for what, gaps in differences.items()
    }
    print(f"{name}: {len(sampled)} sampled tokens at temperature {args.temperature:g}")
    print_title("log-probabilities of", "mean difference", "worst")
    for what, gap in figures.items():
        print_row(what, f"{gap['mean']:.2g}", f"{gap['worst']:.2g}")
    return {"model": folder, "dtype": dtype, "differences": figures, **describe_machine(device)}


@torch.inference_mode()
def _logprobs(
    model: Any, outputs: list[RequestOutput], rows_at_once: int, temperature: float, replays: bool = False
) -> Tensor:
    """Return the log-probabilities of all completions' tokens, end to end; rows of a pass are padded on the right."""
    parts = []
    for start in range(0, len(outputs), rows_at_once):
        some = outputs[start : start + rows_at_once]
        rows = [torch.tensor((output.prompt_token_ids + output.token_ids)[:-1]) for output in some]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        lengths = torch.tensor([*map(len, rows)], device=model.device)
        mask = (torch.arange(ids.shape[1], device=model.device) < lengths[:, None]).long()
        with _replayed(model, some[0].outputs[0].routed_experts if replays else None):
            logits = model(ids, attention_mask=mask).logits.float()
        for row, output in enumerate(some):
            first, chosen = len(output.prompt_token_ids) - 1, torch.tensor(output.token_ids, device=model.device)
            scores = (logits[row, first : first + len(chosen)] / (temperature or 1.0)).log_softmax(dim=1)
            parts.append(scores.gather(1, chosen[:, None])[:, 0].cpu())
    return torch.cat(parts)


def _routers(model: Any) -> dict[int, Any]:
    """Return the routers by their layers, those that transformers has in a module of its own."""
    routers = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            routers[int(name.split("layers.")[1].split(".")[0])] = module
    return routers


@contextmanager
def _replayed(model: Any, routing: Any) -> Iterator[None]:
    """Replay routing, (num_positions, num_layers, k), in the routers while the block runs; None: they choose freely."""
    hooks = []
    if routing is not None:
        for layer, router in _routers(model).items():
            ids = torch.from_numpy(routing[:, layer].astype("int64")).to(model.device)
            hooks.append(router.register_forward_hook(lambda router, _, output, ids=ids: _route(router, output, ids)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _route(router: Any, output: tuple[Tensor, Tensor, Tensor], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a router returns, with these experts and their weights."""
    logits, weights, its_ids = output

    def weights_of(chosen: Tensor) -> Tensor:
        probs = logits.float().softmax(dim=-1).gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return probs.to(weights.dtype)

    if not torch.allclose(weights_of(its_ids), weights, atol=1e-2):
        raise ConfigError(f"{type(router).__name__} does not weigh its experts by a softmax, and is not replayed")
    return logits, weights_of(ids), ids
