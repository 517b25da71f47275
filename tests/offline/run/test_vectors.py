"""`tidemill run` with a real model of vectors: one file of all its urls, and all that is wrong."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from tests.engine.scripted_encoder import minilm
from tests.offline.given import rows
from tidemill.cli.main import main

EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
FRANCE = "What is the capital of France?"
PARIS, PIZZA = "Paris is the capital of France.", "Pizza is made of dough."
GOOD = [
    (EMBED, {"input": FRANCE, "model": "minilm"}),
    ("/embeddings", {"input": [FRANCE, PARIS], "encoding_format": "base64"}),
    (EMBED, {"input": [[101, 3000, 102], [101, 102]], "user": "me"}),
    (SCORE, {"text_1": FRANCE, "text_2": [PARIS, PIZZA]}),
    ("/api/v1/score", {"queries": [FRANCE, PIZZA], "items": [PARIS, PIZZA]}),
    (RERANK, {"query": FRANCE, "documents": [PIZZA, {"text": PARIS}], "top_n": 1}),
    ("/v2/rerank", {"query": FRANCE, "documents": [PIZZA, PARIS], "top_n": 9}),
    (SCORE, {"query": FRANCE, "documents": PARIS, "top_n": 0}),
]
# Each with the field that its error names, and some of its words.
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (EMBED, {"input": ""}, "input", "must not be empty"),
    (EMBED, {"input": []}, "input", "must not be empty"),
    (EMBED, {"input": ["a"] * 10_000}, "input", "more than 2,048"),
    (EMBED, {"input": [5, 30_522]}, "input", "contains token ID 30522"),
    (EMBED, {"input": [5, -1]}, "input", "contains token ID -1"),
    (EMBED, {"input": ["a", None]}, "input.1", "must be a string"),
    (EMBED, {"input": {"a": 1}}, "input", "must be a string"),
    (EMBED, {"input": "word " * 300}, "input", "302 tokens"),
    (EMBED, {"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
    (EMBED, {"input": "a", "dimensions": 64}, "dimensions", "cannot be truncated"),
    (EMBED, {"input": "a", "dimensions": 385}, "dimensions", "384 dimensions"),
    (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    (EMBED, {"messages": [{"role": "user", "content": "a"}]}, "messages", "no chat template"),
    (EMBED, {"input": "a", "stream": True}, "stream", "stream mode"),
    (SCORE, {"text_1": "a"}, "text_1", "requires two sides"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "or both the same number"),
    (SCORE, {"text_1": "a", "text_2": 5}, "text_2", "must be a string"),
    (RERANK, {"query": "a", "documents": []}, "documents", "must not be empty"),
    (RERANK, {"query": "a", "documents": ["b", ""]}, "documents.1", "must not be empty"),
    (RERANK, {"query": "a", "documents": ["b", "word " * 300]}, "documents", "302 tokens"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal"),
    ("/v1/completions", {"prompt": "a"}, "url", "It requires a text generation model; this"),
    ("/v1/audio/translations", {"file_url": "https://example.com/a.wav"}, "url", "speech"),
    ("/v1/embed", {"input": "a"}, "url", "Supported endpoints: "),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the rows of one file of good and bad lines, in turns."""
    folder = tmp_path_factory.mktemp("vectors")
    bad = [(url, body) for url, body, _, _ in BAD]
    mixed = [line for pair in zip(GOOD, bad, strict=False) for line in pair] + bad[len(GOOD) :]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": body})
        for i, (url, body) in enumerate(mixed)
    ]
    (folder / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    files = ["-i", f"{folder}/in.jsonl", "-o", f"{folder}/out.jsonl"]
    model = ["--model", str(minilm()), "--served-model-name", "minilm", "--dtype", "float32"]
    assert main(["run", *files, *model, "--device", "cpu"]) == 0
    read = rows(Path(folder) / "out.jsonl")
    assert [row["custom_id"] for row in read] == [str(i) for i in range(len(mixed))]
    return [*read[: 2 * len(GOOD) : 2], *read[1 : 2 * len(GOOD) : 2], *read[2 * len(GOOD) :]]


@pytest.mark.parametrize("number", range(len(BAD)), ids=[case[3] for case in BAD])
def test_what_is_wrong_is_its_own_rows_400(written: list[dict[str, Any]], number: int) -> None:
    """The error has the field and a sentence; all other rows go on."""
    _, _, param, words = BAD[number]
    response = written[len(GOOD) + number]["response"]
    error = response["body"]["error"]
    assert (response["status_code"], error["param"]) == (400, param)
    assert words in error["message"]


def test_all_urls_of_the_model_are_answered_in_one_file(written: list[dict[str, Any]]) -> None:
    """Vectors in both forms, scores that are their cosines, and rankings by these."""
    assert [row["response"]["status_code"] for row in written[: len(GOOD)]] == [200] * len(GOOD)
    one, two, ids, score, pairs, best, ranking, sent_to_score = (
        row["response"]["body"] for row in written[: len(GOOD)]
    )
    for body in (one, ids):
        parsed = CreateEmbeddingResponse.model_validate(body, strict=True)
        assert all(len(entry.embedding) == 384 for entry in parsed.data)
    assert one["model"] == "minilm"
    france, paris = (np.frombuffer(b64decode(e["embedding"]), "<f4") for e in two["data"])
    assert np.allclose(one["data"][0]["embedding"], france, atol=1e-6)
    [of_paris, of_pizza] = [entry["score"] for entry in score["data"]]
    assert of_paris == pytest.approx(float(france @ paris), abs=1e-5)
    assert of_pizza < of_paris - 0.5
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([of_paris, 1.0], abs=1e-5)
    assert [result["index"] for result in best["results"]] == [1]
    assert [result["index"] for result in ranking["results"]] == [1, 0]
    assert sent_to_score["results"][0]["relevance_score"] == pytest.approx(of_paris, abs=1e-5)
    assert ids["usage"]["prompt_tokens"] == 5
