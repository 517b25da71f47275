"""`/v1/score` and `/v1/rerank` over a scripted encoder: with a reranker, and with two vectors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.endpoints.test_dispatcher import JSON_VALUES
from tests.engine.scripted_encoder import (
    CLS,
    MAX_MODEL_LEN,
    SCORE,
    SEP,
    WIDTH,
    Scene,
    encoder_model,
    minilm_tokenizer,
    values_of,
)
from tidemill.engine.endpoints.scoring import ACTIVATIONS
from tidemill.engine.scheduling.encoding import EncodingRequest

HELLO, THERE, WORLD = 7592, 2045, 2088
PAIR = EncodingRequest([CLS, HELLO, SEP, THERE, SEP], [0, 0, 0, 1, 1])
LONG = "there " * 40
TEMPLATE = (
    "{% for m in messages %}[CLS]{{ m.role }} {{ m.content }}{% endfor %} {{ instruction }}[SEP]"
)


def reranker(**fields: Any) -> Scene:
    """Return a model that returns scores."""
    return Scene(encoder_model(SCORE, **fields))


def raw(request: EncodingRequest) -> float:
    """Return the score of a pair before its activation."""
    return float(values_of(request, 1)[0])


def cosine(first: str, second: str) -> float:
    """Return the cosine of the vectors of two texts."""
    one, other = (
        values_of(EncodingRequest(minilm_tokenizer().encode(text, add_special_tokens=True)), WIDTH)
        for text in (first, second)
    )
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
async def test_a_reranker_reads_the_texts_of_a_pair_together(names: tuple[str, str]) -> None:
    """The tokenizer's pair template is used, and the second text is a separate segment."""
    scene = reranker()
    body = await scene.body("/score", **dict(zip(names, ("Hello", "there"), strict=True)))
    assert scene.encoder.requests == [PAIR]
    assert body["data"] == [
        {
            "index": 0,
            "object": "score",
            "score": pytest.approx(1 / (1 + np.exp(-raw(PAIR))), rel=1e-6),
        }
    ]
    assert (body["id"], body["object"], body["model"]) == ("score-0123", "list", "tiny")
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


async def test_segments_are_sent_only_to_a_model_that_has_them() -> None:
    """Other models have no weights for them."""
    scene = Scene(encoder_model(SCORE))
    without = encoder_model(SCORE)
    object.__setattr__(without, "has_types", False)
    other = Scene(without)
    for each in (scene, other):
        await each.body("/score", text_1="Hello", text_2="there")
    assert [s.encoder.requests[0].type_ids is None for s in (scene, other)] == [False, True]


@pytest.mark.parametrize(
    ("firsts", "seconds", "pairs"),
    [
        ("Hello", ["there", "world"], [(HELLO, THERE), (HELLO, WORLD)]),
        (["Hello", "world"], ["there", "there"], [(HELLO, THERE), (WORLD, THERE)]),
    ],
)
async def test_one_goes_with_many_and_many_go_with_as_many(
    firsts: Any, seconds: Any, pairs: list[tuple[int, int]]
) -> None:
    """The scores are in the order of the second side."""
    scene = reranker()
    await scene.body("/v1/score", text_1=firsts, text_2=seconds)
    read = [(request.token_ids[1], request.token_ids[3]) for request in scene.encoder.requests]
    assert read == pairs


@pytest.mark.parametrize("url", ["/rerank", "/v1/rerank", "/v2/rerank", "/v1/score"])
async def test_documents_are_ordered_by_score(url: str) -> None:
    """It includes rankings requested at the URL of scores, as by openai-batch."""
    scene = reranker()
    documents = ["there", {"text": "world"}, "you"]
    body = await scene.body(url, query="Hello", documents=documents, top_n=2)
    scores = [1 / (1 + np.exp(-raw(request))) for request in scene.encoder.requests]
    best = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert [result["index"] for result in body["results"]] == best
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], rel=1e-6)
        assert result["document"]["text"] == ["there", "world", "you"][result["index"]]
    assert (body["id"], body["usage"]) == (
        "rerank-0123",
        {"prompt_tokens": 15, "total_tokens": 15},
    )


async def test_a_score_without_activation_is_the_models_output() -> None:
    """It is requested, or the model has no activation."""
    for scene, fields in (
        (reranker(), {"use_activation": False}),
        (reranker(activation="Identity"), {}),
    ):
        body = await scene.body("/score", text_1="Hello", text_2="there", **fields)
        assert body["data"][0]["score"] == pytest.approx(raw(PAIR), rel=1e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_torchs(name: str) -> None:
    """They agree to the last digits, also far from zero."""
    import torch

    scores = np.array([-200.0, -30.0, -1.5, 0.0, 2.5, 40.0, 800.0])
    expected = getattr(torch.nn, name)()(torch.from_numpy(scores)).numpy()
    assert np.allclose(ACTIVATIONS[name](scores), expected, rtol=1e-12, atol=0)


async def test_the_score_of_two_vectors_is_their_cosine() -> None:
    """Each text is encoded once, however often it comes."""
    scene = Scene()
    body = await scene.body("/score", text_1="Hello", text_2=["there", "Hello", "there"])
    assert [entry["score"] for entry in body["data"]] == [
        pytest.approx(cosine("Hello", "there"), abs=1e-6),
        pytest.approx(1, abs=1e-6),
        pytest.approx(cosine("Hello", "there"), abs=1e-6),
    ]
    assert [request.token_ids[1] for request in scene.encoder.requests] == [HELLO, THERE]
    assert body["usage"]["prompt_tokens"] == 12
    body = await scene.body("/score", text_1=["Hello", "world"], text_2=["there", "world"])
    assert body["data"][0]["score"] == pytest.approx(cosine("Hello", "there"), abs=1e-6)
    assert body["data"][1]["score"] == pytest.approx(1, abs=1e-6)


async def test_vectors_are_compared_as_returned_by_embeddings() -> None:
    """They use the model's default prompt, and always have length 1."""
    prompts: dict[str, Any] = {"prompts": {"q": "find: "}, "default_prompt_name": "q"}
    scene = Scene(encoder_model(normalize=False, **prompts))
    body = await scene.body("/rerank", query="Hello", documents=["there"])
    expected = cosine("find: Hello", "find: there")
    assert body["results"][0]["relevance_score"] == pytest.approx(expected, abs=1e-6)


async def test_a_query_counts_once_for_each_of_its_documents() -> None:
    """A reranker reads it again with each, and 70 kB of a body would be gigabytes of text."""
    fields = {"query": "a" * 40_000, "documents": ["b"] * 2_000}
    error = await reranker().error("/rerank", **fields)
    assert error["message"].startswith("The pairs have 80,002,000 characters; the maximum is")
    assert error["param"] == "documents"


@pytest.mark.parametrize("scene", [reranker(), Scene()], ids=["reranker", "vectors"])
async def test_the_error_of_a_too_long_document_has_its_length(scene: Scene) -> None:
    """It also has the field and the number of the text."""
    error = await scene.error("/rerank", query="Hello", documents=["there", LONG])
    num_tokens = 40 + (4 if scene.model.description.task == "score" else 2)
    assert error["message"].startswith(
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, text 2 of "
        f"`documents` has {num_tokens} tokens."
    )
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": -1}, [CLS, HELLO, WORLD, SEP, *[THERE] * 11, SEP]),
        ({"truncate_prompt_tokens": 7}, [CLS, HELLO, WORLD, SEP, THERE, THERE, SEP]),
        ({"max_tokens_per_doc": 1}, [CLS, HELLO, WORLD, SEP, THERE, SEP]),
        (
            {"max_tokens_per_doc": 2, "max_tokens_per_query": 1},
            [CLS, HELLO, SEP, THERE, THERE, SEP],
        ),
        (
            {"max_tokens_per_query": 1, "truncate_prompt_tokens": 6},
            [CLS, HELLO, SEP, THERE, THERE, SEP],
        ),
    ],
)
async def test_the_document_of_a_pair_is_truncated(
    fields: dict[str, int], expected: list[int]
) -> None:
    """The query stays complete unless it has its own limit."""
    scene = reranker()
    await scene.body("/rerank", query="Hello world", documents=[LONG], **fields)
    assert scene.encoder.requests[0].token_ids == expected


async def test_the_engines_truncation_is_the_default_for_documents() -> None:
    """It holds for pairs that are read together, and for texts whose vectors are compared."""
    for model in (encoder_model(SCORE), encoder_model()):
        scene = Scene(replace(model, truncate_prompt_tokens=7))
        await scene.body("/rerank", query="Hello world", documents=[LONG])
        assert len(scene.encoder.requests[-1].token_ids) == 7


async def test_a_truncation_without_any_document_token_is_rejected() -> None:
    """The message contains the reason."""
    for scene in (reranker(), reranker(template=TEMPLATE)):
        error = await scene.error(
            "/rerank", query="Hello world", documents=[LONG], truncate_prompt_tokens=5
        )
        assert error["param"] == "truncate_prompt_tokens"


async def test_texts_whose_vectors_are_compared_are_cut_each_by_its_own_limit() -> None:
    """The limit counts the text itself, without special tokens."""
    scene = Scene()
    limits = {"max_tokens_per_doc": 2, "max_tokens_per_query": 1}
    await scene.body("/rerank", query="Hello world", documents=[LONG], **limits)
    read = [request.token_ids for request in scene.encoder.requests]
    assert read == [[CLS, HELLO, SEP], [CLS, THERE, THERE, SEP]]


async def test_a_template_makes_one_text_of_a_pair() -> None:
    """It reads both roles and other fields; only the document is truncated."""
    scene = reranker(template=TEMPLATE)
    encode = minilm_tokenizer().encode
    pair = {"query": "Hello", "documents": ["there"]}
    await scene.body("/rerank", **pair, instruction="Rank")
    await scene.body("/rerank", **pair, chat_template_kwargs={"instruction": "world"})
    await scene.body("/rerank", query="Hello", documents=[LONG], truncate_prompt_tokens=12)
    texts = [
        "[CLS]query Hello[CLS]document there Rank[SEP]",
        "[CLS]query Hello[CLS]document there world[SEP]",
        "[CLS]query Hello[CLS]document there there there there [SEP]",
    ]
    read = [request.token_ids for request in scene.encoder.requests]
    assert read == [encode(text, add_special_tokens=True) for text in texts]


@pytest.mark.parametrize("name", ["instruction", "chat_template_kwargs"])
@pytest.mark.parametrize("scene", [reranker(), Scene()], ids=["reranker", "vectors"])
async def test_template_fields_are_rejected_without_a_template(scene: Scene, name: str) -> None:
    """Ignoring them would give a plausible but wrong score."""
    value: Any = "Rank" if name == "instruction" else {"a": 1}
    error = await scene.error("/score", text_1="a", text_2="b", **{name: value})
    assert error["param"] == name


async def test_a_reranker_does_not_serve_embeddings() -> None:
    """The message names its endpoints."""
    error = await reranker().error("/v1/embeddings", input="a")
    assert error["message"] == (
        "Model does not support endpoint: /v1/embeddings. It requires an embedding model; "
        "this model supports /v1/score, /v1/rerank."
    )


TEXT = st.text(max_size=6) | st.sampled_from(["Hello", "there world", LONG])
TEXTS = st.lists(TEXT | st.fixed_dictionaries({"text": TEXT}), max_size=3) | TEXT
NUMBER = st.integers(-2, 20) | st.just(2**80)
FLAG = st.booleans() | st.none()
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "input": TEXTS | st.lists(st.integers(-1, 40_000), max_size=20),
    "messages": st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXTS}), max_size=2),
    "encoding_format": st.sampled_from(["float", "base64", "int8", None]),
    "output_dtype": st.sampled_from(["int8", "binary", "float16", None]),
    "dimensions": NUMBER,
    "normalize": FLAG,
    "prompt_name": TEXT,
    "add_special_tokens": FLAG,
    "text_1": TEXTS,
    "text_2": TEXTS,
    "queries": TEXTS,
    "items": TEXTS,
    "query": TEXT,
    "documents": TEXTS,
    "top_n": NUMBER,
    "return_documents": FLAG,
    "max_tokens_per_doc": NUMBER,
    "max_tokens_per_query": NUMBER,
    "truncate_prompt_tokens": NUMBER,
    "truncation_side": st.sampled_from(["left", "right", "both", None]),
    "use_activation": FLAG,
    "instruction": TEXT,
    "chat_template_kwargs": st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=2),
    "model": st.sampled_from(["tiny", None, 5]),
}
GIVEN: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/v1/score": {"text_1": "Hello", "text_2": ["there", "world"]},
    "/v1/rerank": {"query": "Hello", "documents": ["there", "world"]},
}
ANY_SCENE = [
    Scene(encoder_model(prompts={"q": "find: "}, default_prompt_name="q", matryoshka=frozenset())),
    reranker(),
    reranker(template=TEMPLATE),
]


@given(
    scene=st.sampled_from(ANY_SCENE),
    url=st.sampled_from(sorted(GIVEN)),
    likely=st.fixed_dictionaries({}, optional=LIKELY),
    names=st.lists(st.sampled_from(sorted(LIKELY)), max_size=5),
    wrong=st.dictionaries(st.sampled_from(sorted(LIKELY)), JSON_VALUES, max_size=1),
)
def test_no_body_breaks_an_endpoint(
    scene: Scene, url: str, likely: dict[str, Any], names: list[str], wrong: dict[str, Any]
) -> None:
    """Any JSON gets an answer, or a 4xx in OpenAI's format that fits any row; never a 500."""
    body = GIVEN[url] | {name: likely[name] for name in names if name in likely} | wrong
    before = repr(body)
    reply = asyncio.run(scene.served.respond(url, body, "req_1", 0))
    assert json.dumps(reply.body, ensure_ascii=False, allow_nan=False).encode()
    assert repr(body) == before
    if reply.status_code != 200:
        assert 400 <= reply.status_code < 500, reply.body
        assert reply.body["error"].keys() == {"message", "type", "param", "code"}
