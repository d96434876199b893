"""What changes the logits of a row before its token is drawn."""

import torch
from torch import Tensor


def penalise(logits: Tensor, token_ids: Tensor, context_lens: Tensor, penalties: Tensor) -> Tensor:
    """Logits (num_rows, vocab_size) less the penalties for the tokens that came before, in float32.

    The repetition penalty (Keskar et al. 2019) is for tokens of the prompt and the completion, the others for those of
    the completion: presence once, frequency for each time.

    token_ids: (num_rows, max_tokens) int, the first `context_lens` of them known. penalties: (num_rows, 4) float32,
    each row's number of prompt tokens, presence, frequency and repetition penalty.
    """
    prompt_lens, presence, frequency, repetition = penalties.unsqueeze(2).unbind(1)
    num_rows, vocab_size = logits.shape
    places = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = places < context_lens[:, None]
    is_generated = is_known & (places >= prompt_lens)
    # What is not to be counted goes to a column of its own.
    counts = torch.zeros(num_rows, vocab_size + 1, device=logits.device)
    counts.scatter_add_(1, torch.where(is_generated, token_ids, vocab_size).long(), is_generated.float())
    seen = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=logits.device)
    seen.scatter_(1, torch.where(is_known, token_ids, vocab_size).long(), True)
    counts, seen = counts[:, :vocab_size], seen[:, :vocab_size]
    repetition = torch.where(seen, repetition, 1.0)
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    return penalised - counts * frequency - (counts > 0) * presence
