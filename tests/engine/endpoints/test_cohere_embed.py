"""`/v2/embed` over a scripted encoder: Cohere's body becomes the one of `/v1/embeddings`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.scripted_encoder import CLS, MAX_MODEL_LEN, Scene, encoder_model

URL = "/v2/embed"
IMAGE = "data:image/png;base64,AA=="
PART = {"type": "image_url", "image_url": {"url": IMAGE}}
LONG = "word " * 40


async def test_an_answer_has_the_vectors_of_each_type_once() -> None:
    """They are those of `/v1/embeddings`, and the answer has the fields of Cohere's."""
    scene = Scene()
    texts = ["Hello there", "Hello"]
    types = ["int8", "float", "base64", "int8"]
    body = await scene.body(URL, texts=texts, embedding_types=types)
    assert set(body["embeddings"]) == {"float", "int8", "base64"}
    for name, fields in {
        "float": {},
        "int8": {"output_dtype": "int8"},
        "base64": {"encoding_format": "base64"},
    }.items():
        data = (await scene.body("/v1/embeddings", input=texts, **fields))["data"]
        assert body["embeddings"][name] == [entry["embedding"] for entry in data]
    assert (body["texts"], body["response_type"]) == (texts, "embeddings_by_type")
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 7}}


async def test_inputs_are_joined_texts_and_floats_are_the_default() -> None:
    """Parts of one input are one text."""
    scene = Scene()
    parts = [{"type": "text", "text": text} for text in ("Hello", "there")]
    body = await scene.body(URL, inputs=[{"content": parts}])
    assert list(body["embeddings"]) == ["float"]
    assert body["texts"] == ["Hello\nthere"]


@pytest.mark.parametrize(
    ("prompts", "kind", "expected"),
    [
        ({"query": "q: ", "passage": "p: "}, "search_query", "q: "),
        ({"query": "q: ", "passage": "p: "}, "search_document", "p: "),
        ({"query": "q: ", "search_query": "s: "}, "search_query", "s: "),
        ({"Clustering": "c: "}, "clustering", "c: "),
        ({"query": "q: "}, "classification", ""),
        ({}, "search_query", ""),
    ],
)
async def test_an_input_type_selects_the_prompt_of_the_model(
    prompts: dict[str, str], kind: str, expected: str
) -> None:
    """Models have it by Cohere's name or by the usual one; a model without it has none."""
    scene = Scene(encoder_model(prompts=prompts))
    await scene.body(URL, texts=["Hello"], input_type=kind)
    await scene.body("/v1/embeddings", input=f"{expected}Hello")
    given, plain = scene.encoder.requests
    assert given.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({}, MAX_MODEL_LEN),
        ({"truncate": "START"}, MAX_MODEL_LEN),
        ({"max_tokens": 4}, 4),
        ({"max_tokens": 2**40}, MAX_MODEL_LEN),
    ],
)
async def test_long_texts_are_cut_by_default(fields: dict[str, Any], num_tokens: int) -> None:
    """Cohere cuts them, too, at the end or the start."""
    scene = Scene()
    await scene.body(URL, texts=[LONG], **fields)
    [request] = scene.encoder.requests
    assert len(request.token_ids) == num_tokens
    assert request.token_ids[0] == CLS


async def test_a_default_of_the_server_cuts_texts_unless_the_body_forbids_it() -> None:
    """Texts of bodies without a length have the server's."""
    model = replace(encoder_model(), truncate_prompt_tokens=5)
    scene = Scene(model)
    await scene.body(URL, texts=[LONG])
    [request] = scene.encoder.requests
    assert len(request.token_ids) == 5
    error = await scene.error(URL, texts=[LONG], truncate="NONE")
    assert "has 42 tokens" in error["message"]


async def test_bytes_are_of_vectors_of_length_one() -> None:
    """The floats of the same answer stay as the model has them."""
    scene = Scene(encoder_model(normalize=False))
    body = await scene.body(URL, texts=["a"], embedding_types=["float", "int8"])
    [vector], [small] = body["embeddings"]["float"], body["embeddings"]["int8"]
    exact = np.array(vector) / np.linalg.norm(vector)
    assert np.linalg.norm(vector) > 1.1
    assert np.abs(127 * exact - small).max() <= 0.5


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "texts", "`texts` is required"),
        ({"texts": ["a"], "inputs": []}, "inputs", "must not be empty"),
        (
            {"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "b"}]}]},
            "inputs",
            "cannot be used together",
        ),
        ({"texts": ["a", ""]}, "texts.1", "must not be empty"),
        ({"texts": "a"}, "texts", "must be"),
        ({"texts": [LONG], "truncate": "NONE"}, "texts", "remove `truncate`."),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "truncate", "cannot be 'NONE'"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types.0", "must be"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types", "must not be empty"),
        ({"texts": ["a"], "embedding_types": "int8"}, "embedding_types", "must be"),
        ({"texts": ["a"], "output_dimension": 3}, "output_dimension", "`output_dimension` cannot"),
        ({"texts": ["a"], "input_type": "serch_query"}, "input_type", "one of classification"),
        ({"texts": ["a"], "images": [IMAGE]}, "images", "cannot be used together"),
        ({"images": [IMAGE]}, "images.0", "this model does not support images"),
        ({"images": []}, "images", "must not be empty"),
        ({"images": ["a.png"]}, "images.0", "must be an http://, https:// or s3:// URL"),
        ({"inputs": [{"content": [PART]}]}, "inputs.0.content.0", "does not support images"),
        ({"inputs": [{"content": [PART, PART]}]}, "inputs.0.content", "or one image part"),
    ],
)
async def test_an_invalid_body_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], param: str, message: str
) -> None:
    """The names are those of Cohere's body."""
    error = await Scene().error(URL, **fields)
    assert (error["param"], message in error["message"]) == (param, True), error
