"""Routing of a mixture of experts: which experts each token goes to, by a softmax or by sigmoids of its logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.dispatch import op

EPS = 1e-20  # so that scores that are all 0 have a quotient


@op
def route(
    terms: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    row_mask: Tensor | None = None,
    bias: Tensor | None = None,
    shared_expert: int | None = None,
    expert_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the likeliest experts of each token, in order; of equally likely ones, those of the lowest ids.

    Returns their ids, int32, and their weights, float32: (num_tokens, num_experts_per_tok).

    terms: (num_terms, num_tokens, num_experts), whose sum in float32 are the logits; rows contiguous.
    norm_topk_prob: whether the weights of a token are made to sum to 1.
    row_mask: (num_tokens,) bool, False for rows without a token (padding). These get no experts: the id num_experts,
    and weights of 0.
    bias: (num_experts,), added to the logits.
    shared_expert: the id of an expert that computes all tokens, if there is one: num_experts. It is appended to the
    experts of each token, with the sigmoid of its column of the terms as its weight, or 1 if the terms end before it;
    columns behind it are not read. A row without a token then gets the id behind it.
    expert_scales: (num_experts,), by which the weights of each expert are multiplied at last; None: by 1. Then there is
    no shared expert.
    A token whose logits have a NaN gets experts that exist, and NaN as their weights.
    """
    logits, shared = _logits(terms, shared_expert)
    scores = torch.softmax(logits if bias is None else logits + bias.float(), dim=-1)
    expert_ids, weights = _choose(scores, scores, num_experts_per_tok, norm_topk_prob, 1.0, row_mask, shared)
    if expert_scales is not None:
        assert shared is None, "a shared expert has no scale"
        # A row without a token has an expert that does not exist, and weights of 0.
        weights = weights * expert_scales[expert_ids.clamp(max=len(expert_scales) - 1)].float()
    return expert_ids, weights


@op
def route_by_sigmoid(
    terms: Tensor,
    bias: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    row_mask: Tensor | None = None,
    shared_expert: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token whose sigmoid plus bias is largest; of equal ones, those of the lowest ids.

    Their weights are the sigmoids alone, times the scaling factor. The terms and the rest: see `route`.
    """
    logits, shared = _logits(terms, shared_expert)
    scores = logits.sigmoid()
    return _choose(scores, scores + bias, num_experts_per_tok, norm_topk_prob, scaling_factor, row_mask, shared)


def route_in_groups(
    terms: Tensor,
    bias: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    num_groups: int,
    num_chosen_groups: int,
    row_mask: Tensor | None = None,
    shared_expert: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `route_by_sigmoid`, but only with the groups of experts whose two best scores have the largest sums."""
    logits, shared = _logits(terms, shared_expert)
    scores = logits.sigmoid()
    groups = (scores + bias).unflatten(1, (num_groups, -1))
    of_groups = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    order = _in_best_groups(groups, of_groups, num_chosen_groups)
    return _choose(scores, order, num_experts_per_tok, norm_topk_prob, scaling_factor, row_mask, shared)


def route_in_groups_by_softmax(
    terms: Tensor,
    num_experts_per_tok: int,
    scaling_factor: float,
    num_groups: int,
    num_chosen_groups: int,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `route`, but only with the groups of experts whose best ones are likeliest (DeepSeek-V2).

    Weights are not made to sum to 1; they are multiplied by the scaling factor.
    """
    scores = torch.softmax(terms.sum(0, dtype=torch.float32), dim=-1)
    groups = scores.unflatten(1, (num_groups, -1))
    order = _in_best_groups(groups, groups.amax(dim=-1), num_chosen_groups)
    return _choose(scores, order, num_experts_per_tok, False, scaling_factor, row_mask)


def _logits(terms: Tensor, shared_expert: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the experts' logits, and the weights of a shared expert, (num_tokens, 1), if there is one."""
    logits = terms.sum(0, dtype=torch.float32)
    if shared_expert is None:
        return logits, None
    if logits.shape[1] == shared_expert:
        return logits, torch.ones_like(logits[:, :1])
    return logits[:, :shared_expert], logits[:, shared_expert : shared_expert + 1].sigmoid()


def _in_best_groups(groups: Tensor, of_groups: Tensor, num_chosen: int) -> Tensor:
    """Return the scores of experts, (num_tokens, num_experts), with -inf outside the groups that score best.

    groups: the scores, (num_tokens, num_groups, experts of a group). of_groups: what each group scores, (num_tokens,
    num_groups).
    """
    chosen = torch.sort(of_groups, dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, chosen, True)
    return groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(1)


def _choose(
    scores: Tensor,
    order: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    row_mask: Tensor | None,
    shared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts that are first in order, and their scores as weights, as `route` does.

    shared: the weights of an expert that is appended to them, (num_tokens, 1).
    """
    num_experts = scores.shape[1]
    expert_ids = torch.sort(order, dim=-1, descending=True, stable=True).indices[:, :num_experts_per_tok]
    weights = scores.gather(1, expert_ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + EPS)
    weights, expert_ids = weights * scaling_factor, expert_ids.int()
    if shared is not None:
        weights = torch.cat((weights, shared), 1)
        expert_ids = F.pad(expert_ids, (0, 1), value=num_experts)
        num_experts += 1
    if row_mask is not None:
        no_token = ~row_mask.unsqueeze(1)
        expert_ids, weights = expert_ids.masked_fill(no_token, num_experts), weights.masked_fill(no_token, 0.0)
    return expert_ids.contiguous(), weights.contiguous()
