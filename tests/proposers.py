"""An engine whose decode steps have several tokens a row, and a proposer that knows beforehand what it will answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from nanoinfer import LLM, RequestOutput
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.sequence import Sequence

MAX_ROW_TOKENS = 5


@dataclass(frozen=True, slots=True)
class ProposingConfig(EngineConfig):
    """The options of an engine whose decode steps compute up to MAX_ROW_TOKENS tokens of a row."""

    @property
    def max_row_tokens(self) -> int:
        return MAX_ROW_TOKENS


@contextmanager
def proposing_llm(folder: Path | str, **options: Any) -> Iterator[LLM]:
    """An LLM that has room for proposals, and no proposer yet."""
    with patch("nanoinfer.llm.EngineConfig", ProposingConfig), LLM(folder, **options) as llm:
        yield llm


class KnownTexts:
    """Proposes what sequences are known to go on with; often too little, and sometimes a wrong token and what follows.

    outputs: of the same requests without proposals. seed: of the lengths, and of what is wrong. share_right: how many
    proposals are right from their first to their last token. first_id: request_id of the first of these requests.
    may_differ: whether sequences may go on otherwise.
    """

    max_num_tokens = MAX_ROW_TOKENS - 1

    def __init__(
        self,
        outputs: list[RequestOutput],
        vocab_size: int,
        seed: int = 0,
        share_right: float = 0.6,
        first_id: int = 0,
        may_differ: bool = False,
    ) -> None:
        self.texts = {
            (first_id + index, one.index): one.token_ids
            for index, output in enumerate(outputs)
            for one in output.outputs
        }
        self._rng, self._vocab_size, self._share_right = Random(seed), vocab_size, share_right
        self._may_differ = may_differ
        self.num_proposed = 0

    def waits(self, seqs: list[Sequence]) -> bool:
        return True

    def propose(self, seqs: list[Sequence]) -> list[list[int]]:
        proposed = [self._of(seq) for seq in seqs]
        self.num_proposed += sum(map(len, proposed))
        return proposed

    def _of(self, seq: Sequence) -> list[int]:
        rng, known = self._rng, len(seq.token_ids) - seq.num_prompt_tokens
        text = self.texts[seq.request_id, seq.sample]
        is_known = seq.completion_token_ids == text[:known]
        assert is_known or self._may_differ, "an earlier token is not that of single steps"
        right = text[known : known + self.max_num_tokens] + [
            rng.randrange(self._vocab_size) for _ in range(self.max_num_tokens)
        ]
        proposed = right[: rng.randint(0, self.max_num_tokens)]
        if proposed and rng.random() > self._share_right:
            wrong = rng.randrange(len(proposed))
            proposed[wrong] = (proposed[wrong] + rng.randrange(1, self._vocab_size)) % self._vocab_size
        return proposed


def engine_of(llm: LLM) -> LLMEngine:
    assert isinstance(llm.engine, LLMEngine)
    return llm.engine


def assert_same_answers(
    outputs: list[RequestOutput], expected: list[RequestOutput], tolerance: float = 1e-5, rank_tolerance: float = 0.0
) -> None:
    """Tokens, texts and reasons are equal, and log-probabilities as good as equal.

    rank_tolerance: by what share of itself a rank may differ. The less likely a token is, the more are as likely.
    """
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == other.prompt_token_ids
        for one, its in zip(output.outputs, other.outputs, strict=True):
            assert one.token_ids == its.token_ids
            assert (one.text, one.finish_reason, one.stop_reason, one.error) == (
                its.text,
                its.finish_reason,
                its.stop_reason,
                its.error,
            )
            assert (one.logprobs is None) == (its.logprobs is None)
            entries, others = [*(one.logprobs or [])], [*(its.logprobs or [])]
            assert len(entries) == len(others)
            for entry, its_entry in zip(entries, others, strict=True):
                assert entry.keys() == its_entry.keys()
                for found, known in ((entry[token_id], its_entry[token_id]) for token_id in entry):
                    assert found.decoded_token == known.decoded_token
                    assert found.rank is not None
                    assert known.rank is not None
                    assert abs(found.rank - known.rank) <= rank_tolerance * known.rank
                    gap = abs(found.logprob - known.logprob)
                    assert gap <= tolerance, f"log-probabilities differ by {gap}"
