"""`/pooling` of embedding models and classifiers, compared with transformers' modules."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer

from tests.engine.model.encoders.small_encoders import save
from tests.engine.scripted_encoder import minilm
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal
from tidemill.engine.endpoints import pooling
from tidemill.engine.endpoints.dispatcher import Dispatcher

pytestmark = pytest.mark.usefixtures("proved")

NAMES = ("O", "B-PER", "I-PER")
LABELS: dict[str, Any] = {"id2label": dict(enumerate(NAMES)), "label2id": {}}


def decoded(text: str, width: int) -> NDArray[np.float32]:
    """Return the rows of a base64 text."""
    return np.frombuffer(b64decode(text), "<f4").reshape(-1, width)


async def test_tokens_have_vectors(served: Dispatcher) -> None:
    """Normalized hidden states, as late-interaction models use; next to texts of one vector."""
    tokenizer, module = AutoTokenizer.from_pretrained(minilm()), AutoModel.from_pretrained(minilm())
    body = await answer(served, "/pooling", input=TEXTS, task="token_embed")
    assert body["object"] == "list"
    for item, text in zip(body["data"], TEXTS, strict=True):
        with torch.inference_mode():
            expected = module(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        unit = torch.nn.functional.normalize(expected, dim=-1)
        assert item["object"] == "pooling"
        assert np.allclose(item["data"], unit, atol=1e-4)
    raw = await answer(served, "/pooling", input=text, task="token_embed", use_activation=False)
    assert np.allclose(raw["data"][0]["data"], expected, atol=1e-3)
    short = {"input": TEXTS[0], "task": "token_embed", "encoding_format": "base64"}
    [packed] = (await answer(served, "/v1/pooling", **short))["data"]
    assert np.allclose(decoded(packed["data"], 384), body["data"][0]["data"], atol=1e-6)
    vectors = (await answer(served, "/v1/embeddings", input=TEXTS))["data"]
    pooled = (await answer(served, "/pooling", input=TEXTS))["data"]
    for item, other in zip(vectors, pooled, strict=True):
        assert np.allclose(item["embedding"], other["data"], atol=1e-6)
    cut = await answer(
        served, "/pooling", input=TEXTS[2], task="token_embed", truncate_prompt_tokens=7
    )
    assert len(cut["data"][0]["data"]) == cut["usage"]["prompt_tokens"] == 7


async def test_classes_of_texts_and_of_tokens(serve: Serve, tmp_path: Path) -> None:
    """The probabilities of `/v1/classify`, and those of each token, special ones included."""
    texts = serve(save(tmp_path / "a", "Bert", "ForSequenceClassification", **LABELS))
    probs = [item["probs"] for item in (await answer(texts, "/classify", input=TEXTS))["data"]]
    pooled = await answer(texts, "/pooling", input=TEXTS, task="classify")
    assert [item["data"] for item in pooled["data"]] == [pytest.approx(each) for each in probs]
    folder = save(tmp_path / "b", "Bert", "ForTokenClassification", **LABELS)
    tokens = serve(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForTokenClassification.from_pretrained(folder)
    by_ids = {"input": [tokenizer(text).input_ids for text in TEXTS]}
    for given in ({"input": TEXTS}, by_ids):
        body = await answer(tokens, "/pooling", **given, use_activation=False)
        for item, text in zip(body["data"], TEXTS, strict=True):
            with torch.inference_mode():
                logits = module(**tokenizer(text, return_tensors="pt")).logits[0]
            assert np.allclose(item["data"], logits, atol=1e-4)
    body = await answer(tokens, "/pooling", input=TEXTS, task="token_classify")
    assert np.allclose(body["data"][-1]["data"], logits.softmax(-1), atol=1e-4)
    for served, task, words in (
        (
            texts,
            "token_classify",
            "`task` cannot be 'token_classify': this model supports 'classify'.",
        ),
        (tokens, "embed", "`task` cannot be 'embed': this model supports 'token_classify'."),
        (tokens, "plugin", "`task` must be"),
        (tokens, 7, "`task` must be"),
    ):
        reply = await refusal(served, "/pooling", input="a", task=task)
        assert reply.body["error"]["param"] == "task"
        assert reply.body["error"]["message"].startswith(words)
    for wrong, words in (
        ({"input": ""}, "must not be empty"),
        ({"input": {"text": "a", "text_pair": "b"}}, "`input` must be"),
        ({"input": [[10**6]]}, "token ID 1000000"),
        ({}, "`input` is required"),
        ({"input": "a", "encoding_format": "bytes"}, "`encoding_format` must be"),
        ({"input": "a", "dimensions": 4}, "is not supported"),
        ({"input": "tide " * 400}, "maximum context length is 320 tokens"),
    ):
        reply = await refusal(tokens, "/pooling", **wrong)
        assert words in reply.body["error"]["message"], reply.body


async def test_a_default_prompt_is_read_for_vectors_only(serve: Serve, tmp_path: Path) -> None:
    """`/pooling` and `/v1/classify` give the same numbers for a text."""
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    for kind in ("ForSequenceClassification", "ForTokenClassification", "Model"):
        folder = save(tmp_path / kind, "Bert", kind, **({} if kind == "Model" else LABELS))
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        served = serve(folder)
        pooled = await answer(served, "/pooling", input=TEXTS)
        url = "/v1/embeddings" if kind == "Model" else "/v1/classify"
        other = await answer(served, url, input=TEXTS)
        assert pooled["usage"] == other["usage"]
        if kind == "Model":
            rows = await answer(served, "/pooling", input=TEXTS, task="token_embed")
            assert rows["usage"] == other["usage"]


async def test_a_response_of_too_many_numbers_is_refused(
    served: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of each token are counted; in base64 four times as many fit into memory."""
    monkeypatch.setattr(pooling, "MAX_NUMBERS", 384 * 10)
    monkeypatch.setattr(pooling, "MAX_PACKED_NUMBERS", 384 * 40)
    ten, packed = (
        {"input": [[7] * 4, [8] * 6], "task": "token_embed"},
        {"encoding_format": "base64"},
    )
    await answer(served, "/pooling", **ten)
    eleven = {**ten, "input": [[7] * 4, [8] * 7]}
    reply = await refusal(served, "/pooling", **eleven)
    assert reply.body["error"]["param"] == "input"
    assert "`input` has 11 tokens with 384 numbers each" in reply.body["error"]["message"]
    await answer(served, "/pooling", **eleven, **packed)
    await answer(served, "/pooling", **{**eleven, "task": "embed"})
    await refusal(served, "/pooling", **packed, **{**ten, "input": [7] * 41})
