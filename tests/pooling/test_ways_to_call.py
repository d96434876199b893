"""Embeddings by run-batch and asyncio are those of `embed`."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoinfer import LLM, PoolingParams, RequestError, SamplingParams, tiny_model_path
from nanoinfer.batch.batch_job import run_batch
from tests.pooling.test_decoders import assert_close, embeddings

TEXTS = ["12+34=", "7*8=", "What is 3 + 4?"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        yield llm


def run(llm: LLM, folder: Path, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job of these bodies and return its records, in the order of the lines."""
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": body}
        for index, body in enumerate(bodies)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    load: Any = lambda: nullcontext(llm)  # noqa: E731 (`run_batch` would close it)
    summary = run_batch(load, folder / "in.jsonl", folder / "out.jsonl", use_tqdm=False)
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert summary.num_prompt_tokens == sum(
        record["response"]["body"]["usage"]["prompt_tokens"] for record in records if record["response"]
    )
    return sorted(records, key=lambda record: int(record["custom_id"]))


def test_lines_for_embeddings_are_answered_as_openai_does(llm: LLM, tmp_path: Path) -> None:
    expected = embeddings(llm, TEXTS)
    cut = embeddings(llm, TEXTS[:1], PoolingParams(dimensions=4))
    bodies = [
        {"model": "any", "input": TEXTS},
        {"input": TEXTS[1], "encoding_format": "base64"},
        {"input": TEXTS[0], "dimensions": 4},
        {"input": llm.encode(TEXTS[0])},
    ]
    records = run(llm, tmp_path, *bodies)
    data = [record["response"]["body"]["data"] for record in records]
    assert [[entry["index"] for entry in entries] for entries in data] == [[0, 1, 2], [0], [0], [0]]
    assert_close(np.float32([entry["embedding"] for entry in data[0]]), np.stack(expected))
    assert_close(np.frombuffer(base64.b64decode(data[1][0]["embedding"]), np.float32), expected[1])
    assert_close(np.float32(data[2][0]["embedding"]), cut[0])
    assert_close(np.float32(data[3][0]["embedding"]), expected[0])
    num_tokens = sum(len(llm.encode(text)) for text in TEXTS)
    assert records[0]["response"]["body"]["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_the_answers_are_of_openais_types(llm: LLM, tmp_path: Path) -> None:
    types = pytest.importorskip("openai.types")
    [record] = run(llm, tmp_path, {"input": TEXTS})
    types.CreateEmbeddingResponse.model_validate(record["response"]["body"], strict=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "a", "temperature": 1}, "unknown fields: temperature; known are input, dimensions, encoding_format"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format='hex' is not served; use 'float' or 'base64'"),
        ({"input": "a", "dimensions": 10**6}, "dimensions=1000000 is not what this model was made for"),
        ({"input": ""}, "prompt 0 is empty"),
        ({"prompt": "a"}, "there is prompt; give input"),
    ],
)
def test_a_wrong_line_gets_an_error_record(llm: LLM, tmp_path: Path, body: dict[str, Any], message: str) -> None:
    wrong, _ = run(llm, tmp_path, body, {"input": "a"})
    assert wrong["response"] is None
    assert message in wrong["error"]["message"]


def test_tasks_embed_side_by_side_and_beside_others(llm: LLM) -> None:
    expected = embeddings(llm, TEXTS)
    params = SamplingParams(temperature=0, max_tokens=4)
    alone = [output.token_ids for output in llm.generate(TEXTS, params, use_tqdm=False)]

    async def main() -> list[Any]:
        calls = [llm.aembed(text) for text in TEXTS]
        return await asyncio.gather(llm.aembed(TEXTS), llm.agenerate(TEXTS, params), *calls)

    together, generated, *single = asyncio.run(main())
    assert [output.token_ids for output in generated] == alone
    assert_close(np.stack([output.embedding for output in together]), np.stack(expected))
    assert_close(np.stack([output.embedding for [output] in single]), np.stack(expected))
    with pytest.raises(RequestError, match="classify needs a classification head"):
        asyncio.run(llm.aclassify(TEXTS))
