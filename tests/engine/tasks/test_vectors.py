"""Models of vectors, from their folder to a body, compared with sentence-transformers."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
    BertConfig,
    BertForMaskedLM,
)

from tests.engine.scripted_encoder import minilm
from tests.engine.tasks.pooled import SMALL, TEXTS, Serve, answer, minilm_with, refusal
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.inspection import inspect_model
from tidemill.protocol.contract import EngineError

pytestmark = pytest.mark.usefixtures("proved")


def planned_context(**settings: Any) -> int:
    """Return the context that `tidemill models` reports for MiniLM."""
    plan = inspect_model(EngineConfig(str(minilm()), device="cpu", **settings)).plan
    assert plan is not None
    return plan.max_model_len


async def test_vectors_equal_those_of_sentence_transformers(served: Dispatcher) -> None:
    """It holds for all lengths and scripts, in either encoding format."""
    body = await answer(served, "/v1/embeddings", input=TEXTS)
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS)
    vectors = np.array([entry["embedding"] for entry in body["data"]], dtype=np.float32)
    assert np.abs(vectors - expected).max() < 1e-5
    assert ((vectors * expected).sum(axis=1) > 0.9999).all()
    packed = await answer(served, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    read = [np.frombuffer(b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    assert np.array_equal(read, vectors)


async def test_scores_of_vectors_are_their_cosines(served: Dispatcher) -> None:
    """They match sentence-transformers within 1e-4, and the ranking follows."""
    reference = SentenceTransformer(str(minilm()), device="cpu")
    query, *documents = TEXTS
    expected = reference.similarity(reference.encode([query]), reference.encode(documents))[0]
    body = await answer(served, "/v1/score", text_1=query, text_2=documents)
    scores = [entry["score"] for entry in body["data"]]
    assert np.allclose(scores, expected, atol=1e-5)
    ranked = await answer(served, "/rerank", query=query, documents=documents)
    order = [result["index"] for result in ranked["results"]]
    assert order == sorted(range(3), key=lambda i: -scores[i])


async def test_the_folder_limits_the_length_of_texts(served: Dispatcher) -> None:
    """The limit is 256 of 512 positions; on request texts are truncated as in the reference."""
    text = "word " * 300
    reply = await refusal(served, "/v1/embeddings", input=text)
    assert "maximum context length is 256 tokens" in reply.body["error"]["message"]
    assert "has 302 tokens" in reply.body["error"]["message"]
    body = await answer(served, "/v1/embeddings", input=text, truncate_prompt_tokens=-1)
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(text)
    assert np.abs(np.array(body["data"][0]["embedding"]) - expected).max() < 1e-5
    assert body["usage"]["prompt_tokens"] == 256
    assert planned_context() == 256


async def test_a_configured_limit_is_at_most_that_of_the_network(serve: Serve) -> None:
    """It may exceed the limit in the folder, but not the number of positions."""
    longer = serve(minilm(), max_model_len=400)
    body = await answer(longer, "/v1/embeddings", input="word " * 300)
    assert body["usage"]["prompt_tokens"] == 302
    assert planned_context(max_model_len=400) == 400
    with pytest.raises(EngineError, match="512"):
        serve(minilm(), max_model_len=513)
    words = r"--truncate-prompt-tokens 257 is above .*'s context of 256 tokens: use -1"
    with pytest.raises(EngineError, match=words):
        serve(minilm(), truncate_prompt_tokens=257)


async def test_prompts_dense_layers_and_lowercasing_follow_the_folder(
    serve: Serve, tmp_path: Path
) -> None:
    """One folder has all settings that accompany a network."""
    from safetensors.torch import save_file

    modules = json.loads((minilm() / "modules.json").read_bytes())
    dense = {"name": "d", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    folder = minilm_with(
        tmp_path,
        {
            "modules.json": [*modules[:2], dense, modules[2]],
            "1_Pooling/config.json": {
                "word_embedding_dimension": 384,
                "pooling_mode": ["cls", "mean"],
                "include_prompt": False,
            },
            "3_Dense/config.json": {"in_features": 768, "out_features": 32},
            "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": True},
            "config_sentence_transformers.json": {
                "prompts": {"query": "Find this: ", "plain": ""},
                "default_prompt_name": "query",
            },
        },
    )
    torch.manual_seed(3)
    weights = {"linear.weight": torch.randn(32, 768), "linear.bias": torch.randn(32)}
    save_file(weights, folder / "3_Dense/model.safetensors")
    reference = SentenceTransformer(str(folder), device="cpu")
    served = serve(folder, hf_overrides={"is_matryoshka": True})
    texts = ["The Capital of France", "a"]
    for fields, options in (({}, {}), ({"prompt_name": "plain"}, {"prompt_name": "plain"})):
        body = await answer(served, "/v1/embeddings", input=texts, **fields)
        vectors = [entry["embedding"] for entry in body["data"]]
        assert np.abs(np.array(vectors) - reference.encode(texts, **options)).max() < 1e-5
    cut = await answer(served, "/v1/embeddings", input=texts, dimensions=8)
    expected = reference.encode(texts, truncate_dim=8, normalize_embeddings=True)
    assert np.abs(np.array([e["embedding"] for e in cut["data"]]) - expected).max() < 1e-5


def test_a_model_without_pooling_files_logs_a_warning(serve: Serve, tmp_path: Path) -> None:
    """One example is a masked language model; a model with such files logs nothing."""
    config = BertConfig(**SMALL, vocab_size=30_522, max_position_embeddings=64)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(minilm() / name, tmp_path)
    head, pooling = serve(tmp_path).info().notes
    assert "the first token's vector" in pooling
    assert "BertForMaskedLM" in head
    assert not any("define pooling" in note for note in serve(minilm()).info().notes)


@pytest.mark.parametrize("kind", [["bert"], {}, 5])
def test_a_model_type_that_is_not_a_string_is_refused(
    kind: object, serve: Serve, tmp_path: Path
) -> None:
    """The error is one sentence, wherever the type is looked up."""
    config = json.loads((minilm() / "config.json").read_bytes())
    folder = minilm_with(tmp_path, {"config.json": {**config, "model_type": kind}})
    with pytest.raises(EngineError, match="model"):
        serve(folder)
