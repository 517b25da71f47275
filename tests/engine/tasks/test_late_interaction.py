"""ColBERT: vectors of queries and documents, and MaxSim, compared with sentence-transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import Tokenizer

from tests.engine.model.encoders.small_encoders import MINILM, save
from tests.engine.tasks.pooled import TEXTS, Serve, answer, refusal, with_files
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints import scoring
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.encoder_requests import EncodingRequestBuilder
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.encoders.pooling_config import PoolingConfig, read_pooling_config
from tidemill.engine.model.encoders.sentence_transformers import (
    MULTI_VECTOR_TYPES,
    MultiVector,
    QueryExpansion,
)
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.tasks.pooling import find_padding_id
from tidemill.protocol.errors import RequestError
from tidemill.protocol.pooling import PoolRequest

pytestmark = pytest.mark.usefixtures("proved")

QUERY = {"prompt_name": "query"}
FAMILIES: dict[str, dict[str, Any]] = {
    "ModernBert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "Electra": {"embedding_size": 48},
}


def colbert(folder: Path, family: str = "Bert", **knobs: Any) -> MultiVectorEncoder:
    """Save a small ColBERT model of sentence-transformers to `folder` and return it."""
    network = save(folder.with_name(f"{folder.name}-network"), family, **FAMILIES.get(family, {}))
    torch.manual_seed(1)
    project = Dense(
        48, 16, bias=False, activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )  # fmt: skip
    mask = MultiVectorMask(["the", ".", "?", "notaword"])
    unit = Normalize(module_input_name="token_embeddings")
    model = MultiVectorEncoder(
        modules=[Transformer(str(network), **knobs), project, mask, unit],
        prompts={"query": "ask: ", "document": "text: "},
        device="cpu",
    )
    model.save_pretrained(str(folder))
    return model


async def test_vectors_of_tokens_are_those_of_sentence_transformers(
    serve: Serve, tmp_path: Path
) -> None:
    """ColBERT projects each token; some words of documents have no vector."""
    model = colbert(tmp_path / "model", document_length=200, query_length=199)
    served = serve(tmp_path / "model")
    endpoints = ("/v1/score", "/v1/rerank", "/pooling")
    assert endpoints_of(EngineConfig(str(tmp_path / "model"))) == endpoints
    for named, expected in (
        ({}, model.encode(TEXTS)),
        ({"prompt_name": "query"}, model.encode_query(TEXTS)),
        ({"prompt_name": "document"}, model.encode_document(TEXTS)),
    ):
        body = await answer(served, "/pooling", input=TEXTS, **named)
        for item, rows in zip(body["data"], expected, strict=True):
            assert np.allclose(item["data"], rows, atol=1e-4)
    long = {"input": "tide " * 250}
    for named, words in (
        ({}, "maximum context length is 200"),
        (QUERY, "queries have at most 199"),
    ):
        reply = await refusal(served, "/pooling", **long, **named)
        assert f"This model's {words} tokens. However, " in reply.body["error"]["message"]
        assert reply.body["error"]["code"] == "context_length_exceeded"
        body = await answer(served, "/pooling", **long, **named, truncate_prompt_tokens=-1)
        assert body["usage"]["prompt_tokens"] == (199 if named else 200)
    await check_scores(served, model)
    reply = await refusal(served, "/pooling", input="a", task="embed")
    assert "this model supports 'token_embed'." in reply.body["error"]["message"]


async def test_checkpoints_of_other_colbert_libraries(serve: Serve, tmp_path: Path) -> None:
    """PyLate's modules, and the class of ColBERT's first authors, give the same vectors.

    Their prefixes are single tokens. Queries are padded with mask tokens, and cut, to one length.
    """
    colbert(tmp_path / "native")
    pylate = tmp_path / "pylate"
    shutil.copytree(tmp_path / "native", pylate)
    kinds = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    listed = [
        {"idx": index, "name": str(index), "type": kind, "path": path}
        for index, (kind, path) in enumerate(zip(kinds, ("", "1_Dense"), strict=True))
    ]
    (pylate / "modules.json").write_text(json.dumps(listed))
    saved = {
        "model_type": "ColBERT",
        "query_prefix": "[unused0]",
        "document_prefix": "[unused1]",
        "skiplist_words": [".", "?"],
        "document_length": 200,
        "query_length": 24,
        "attend_to_expansion_tokens": True,
    }
    (pylate / "config_sentence_transformers.json").write_text(json.dumps(saved))
    first = save(tmp_path / "first", "Bert")
    weights = {f"bert.{key}": each for key, each in load_file(first / "model.safetensors").items()}
    weights["linear.weight"] = load_file(pylate / "1_Dense" / "model.safetensors")["linear.weight"]
    save_file(weights, first / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((first / "config.json").read_bytes())
    (first / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    settings = {"dim": 16, "doc_maxlen": 200, "mask_punctuation": True}
    unmarked = EngineConfig(str(first))
    (first / "artifact.metadata").write_text(json.dumps({**settings, "query_token_id": ""}))
    assert read_pooling_config({**config, "architectures": ["HF_ColBERT"]}, unmarked).prefixes == (
        "[unused1]",
    )
    (first / "artifact.metadata").write_text(json.dumps(settings))
    for folder, length in ((pylate, 24), (first, 32)):
        served, model = serve(folder), MultiVectorEncoder(str(folder), device="cpu")
        await check_queries(served, model, {length})
        expected = model.encode_document(TEXTS)
        body = await answer(served, "/pooling", input=TEXTS, prompt_name="document")
        for item, rows in zip(body["data"], expected, strict=True):
            assert np.allclose(item["data"], rows, atol=1e-4)
        await check_scores(served, model)
    assert saved["model_type"] in MULTI_VECTOR_TYPES


@pytest.mark.parametrize(
    ("family", "expansion", "lengths"),
    [
        # The padding of a short query is beyond the windows of its other tokens.
        ("ModernBert", {"strategy": "min", "length": 24}, {24, 88}),
        ("Electra", {"strategy": "fixed", "length": 24, "token": "[unused5]"}, {24}),
    ],
)
async def test_queries_are_padded_as_by_sentence_transformers(
    family: str, expansion: dict[str, Any], lengths: set[int], serve: Serve, tmp_path: Path
) -> None:
    """No token attends to the padding, by our encoder or by transformers' classes."""
    folder = tmp_path / "model"
    model = colbert(folder, family, query_expansion=expansion)
    saved = json.loads((folder / "config_sentence_transformers.json").read_bytes())
    saved |= {"similarity_fn_name": "meanmaxsim"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(saved))
    served = serve(folder)
    await check_queries(served, model, lengths)
    await check_scores(served, model, is_mean=True)


async def check_queries(
    served: Dispatcher, model: MultiVectorEncoder, lengths: AbstractSet[int]
) -> None:
    """Compare the vectors of queries of some `lengths`, padding included."""
    expected = model.encode_query(TEXTS)
    assert {len(rows) for rows in expected} == lengths
    query = {"input": TEXTS, **QUERY, "truncate_prompt_tokens": -1}
    body = await answer(served, "/pooling", **query)
    for item, rows in zip(body["data"], expected, strict=True):
        assert np.allclose(item["data"], rows, atol=1e-4)


async def check_scores(
    served: Dispatcher, model: MultiVectorEncoder, *, is_mean: bool = False
) -> None:
    """Compare MaxSim of pairs, and of a ranking, with the formula."""
    queries, documents = [TEXTS[0], TEXTS[3]], [TEXTS[2], TEXTS[0]]
    sides = ((model.encode_query, queries), (model.encode_document, documents))
    expected = np.zeros((2, 2))
    vectors = [encode(texts) for encode, texts in sides]
    for place, query in enumerate(vectors[0]):
        for number, document in enumerate(vectors[1]):
            best = (query @ document.T).max(dim=1).values
            expected[place, number] = best.mean() if is_mean else best.sum()
    cut = {"truncate_prompt_tokens": -1}
    body = await answer(served, "/v1/score", text_1=queries, text_2=documents, **cut)
    scores = [item["score"] for item in body["data"]]
    assert np.allclose(scores, expected.diagonal(), atol=1e-3)
    ranked = await answer(served, "/rerank", query=queries[1], documents=documents, **cut)
    by_index = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert np.allclose([by_index[0], by_index[1]], expected[1], atol=1e-3)


async def test_what_late_interaction_refuses(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long queries, too many vectors, and parameters of cross-encoders."""
    colbert(tmp_path / "model", query_expansion={"strategy": "fixed", "length": 24})
    served = serve(tmp_path / "model")
    pair = {"text_1": "What is it?", "text_2": "a mill"}
    monkeypatch.setattr(scoring, "MAX_COMPARED_NUMBERS", 16 * 40)
    for more, param, words in (
        ({"text_1": "tide " * 30}, "text_1", "queries have at most 24 tokens. However, `text_1`"),
        ({"text_2": "mill " * 13}, "text_2", "The texts have 41 tokens with 16 numbers each"),
        ({"instruction": "Judge"}, "instruction", "requires a reranker"),
        ({"text_1": ""}, "text_1", "must not be empty"),
    ):
        reply = await refusal(served, "/v1/score", **(pair | more))
        assert reply.body["error"]["param"] == param
        assert words in reply.body["error"]["message"]
    await answer(served, "/v1/score", **pair | {"text_2": "mill " * 12})
    await answer(served, "/v1/score", **pair | {"text_1": "tide " * 30}, max_tokens_per_query=5)


@pytest.mark.parametrize(
    ("expansion", "words"),
    [
        ({"strategy": "max", "length": 24}, "query_expansion has unsupported strategy 'max'"),
        ({"strategy": "fixed"}, "query_expansion does not set length"),
        ({"strategy": "fixed", "length": 24, "times": 2}, "unsupported times 2"),
    ],
)
def test_an_unknown_padding_of_queries_is_refused(
    expansion: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """It would change their vectors."""
    kinds = ("Transformer", "multi_vector_encoder.modules.MultiVectorMask")
    listed = [{"type": f"sentence_transformers.{kind}", "path": kind[:1]} for kind in kinds]
    listed[0] |= {"type": "sentence_transformers.models.Transformer", "path": ""}
    files = {
        "modules.json": listed,
        "m/config.json": {},
        "sentence_bert_config.json": {"query_expansion": expansion},
    }
    (tmp_path / "empty").mkdir()
    folder = with_files(tmp_path / "empty", tmp_path / "model", files)
    with pytest.raises(ModelRefused, match=re.escape(words)):
        read_pooling_config({"model_type": "bert"}, EngineConfig(str(folder)))


def test_the_padding_must_be_a_token_and_fit_into_the_context() -> None:
    """It is the mask token, or the end of a text if the tokenizer has none."""
    backend = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    vocabulary: Any = SimpleNamespace(backend=backend, special_tokens={"eos_token": "[SEP]"})
    network: Any = SimpleNamespace(recurrent_shapes=(), shapes=(), max_model_len=24)

    def found(expansion: QueryExpansion) -> int | None:
        mode = MultiVector(expansion=expansion)
        described = PoolingConfig({}, "token_embed", multi_vector=mode)
        return find_padding_id("tiny", described, vocabulary, network)

    assert found(QueryExpansion(24)) == backend.token_to_id("[SEP]")
    vocabulary.special_tokens["mask_token"] = "[MASK]"
    assert found(QueryExpansion(24)) == backend.token_to_id("[MASK]")
    assert found(QueryExpansion(24, token="[unused5]")) == 6
    with pytest.raises(ModelRefused, match=r"its tokenizer has no '\[nope\]' to pad its queries"):
        found(QueryExpansion(24, token="[nope]"))
    with pytest.raises(ModelRefused, match="padded to 25 tokens, but the context length is 24"):
        found(QueryExpansion(25))


def test_a_decoder_reads_no_padded_queries() -> None:
    """They would be padded on the left."""
    described = PoolingConfig(
        {}, "token_embed", multi_vector=MultiVector(expansion=QueryExpansion(24))
    )
    network: Any = SimpleNamespace(recurrent_shapes=(), shapes=(SimpleNamespace(is_causal=True),))
    vocabulary: Any = None
    model: Any = SimpleNamespace(
        description=described,
        reader=None,
        images=None,
        max_model_len=99,
        truncate_prompt_tokens=None,
        query_padding_id=find_padding_id("tiny", described, vocabulary, network),
    )
    request = PoolRequest(input="a")
    with pytest.raises(RequestError, match="pads its queries, which is not supported for causal"):
        EncodingRequestBuilder(model).from_prompts(["a"], request, param="input", is_query=True)
