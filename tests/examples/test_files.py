"""The files in `examples/`, as vLLM's documents have them, through `tidemill run`."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from tests.examples.runs import bodies_of, lines_of
from tools.demo.train_reranker import assemble, base_path

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
RIGHT = 1
"""The place of the document that answers, in the examples of vLLM."""


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo reranker."""
    folder = tmp_path_factory.mktemp("reranker")
    assemble(folder)
    return folder


@pytest.mark.long  # vectors are in the mixed file, below
def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Each line's vector is what the library gives for its input, of length one."""
    from sentence_transformers import SentenceTransformer

    bodies = bodies_of("embeddings.jsonl", base_path(), MINILM, tmp_path)
    theirs = SentenceTransformer(str(base_path()), device="cpu")
    for line in lines_of("embeddings.jsonl"):
        [found] = bodies[line["custom_id"]]["data"]
        wanted = theirs.encode(line["body"]["input"], normalize_embeddings=True)
        assert float(wanted @ np.array(found["embedding"])) > 0.9999
        assert float(np.linalg.norm(found["embedding"])) == pytest.approx(1, abs=1e-5)


@pytest.mark.long  # as rankings of the same model, below
def test_scores_tell_what_is_relevant(reranker: Path, tmp_path: Path) -> None:
    """The document that answers is scored above the other, each as sentence-transformers has it."""
    from sentence_transformers import CrossEncoder

    bodies = bodies_of("score.jsonl", reranker, "tidemill-reranker", tmp_path)
    theirs = CrossEncoder(str(reranker), device="cpu")
    for line in lines_of("score.jsonl"):
        body = line["body"]
        found = [entry["score"] for entry in bodies[line["custom_id"]]["data"]]
        wanted = theirs.predict([(body["queries"], text) for text in body["documents"]])
        assert found == pytest.approx(wanted.tolist(), abs=1e-4)
        assert found[RIGHT] > 0.5 > found[1 - RIGHT]


def test_rankings_begin_with_what_answers(reranker: Path, tmp_path: Path) -> None:
    """All three URLs rank correctly and identify each document by its index in the line."""
    bodies = bodies_of("rerank.jsonl", reranker, "tidemill-reranker", tmp_path)
    assert len(bodies) == 3
    for line in lines_of("rerank.jsonl"):
        results = bodies[line["custom_id"]]["results"]
        assert [result["index"] for result in results] == [RIGHT, 1 - RIGHT]
        for result in results:
            text = line["body"]["documents"][result["index"]]
            assert result["document"]["text"] == text
        assert results[0]["relevance_score"] > 0.5 > results[1]["relevance_score"]


def test_one_file_may_ask_one_model_at_several_urls(tmp_path: Path) -> None:
    """Vectors in either form, scores and a ranking by cosines; chat has a row that says no."""
    from sentence_transformers import SentenceTransformer

    bodies = bodies_of("mixed.jsonl", base_path(), MINILM, tmp_path)
    theirs = SentenceTransformer(str(base_path()), device="cpu")
    first, second = (np.array(entry["embedding"]) for entry in bodies["vector"]["data"])
    assert first @ second > 0.3
    raw = base64.b64decode(bodies["base64"]["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4") == pytest.approx(first, abs=1e-5)
    scores = [entry["score"] for entry in bodies["score"]["data"]]
    body = lines_of("mixed.jsonl")[2]["body"]
    query, *documents = theirs.encode([body["text_1"], *body["text_2"]])
    assert scores == pytest.approx([float(query @ one) for one in documents], abs=1e-4)
    alike, unlike = (entry["score"] for entry in bodies["pairs"]["data"])
    assert alike > 0.7
    assert unlike < 0.2
    results = bodies["ranking"]["results"]
    assert [len(results), results[0]["index"]] == [2, 1]
    assert "does not support endpoint" in bodies["chat"]["error"]["message"]
