"""`/v1/embeddings` over a scripted encoder: what it asks for, and what it makes of the numbers."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from tests.engine.scripted_encoder import (
    CLS,
    MAX_MODEL_LEN,
    SEP,
    WIDTH,
    Scene,
    encoder_model,
    minilm_tokenizer,
    values_of,
)
from tidemill.engine.model.encoders.pooling_config import Pooling
from tidemill.engine.scheduling.encoding import EncodingRequest, EncodingResult

URL = "/v1/embeddings"
LONG = "word " * 40


def ids(text: str) -> list[int]:
    """Return the ids of a text between its special tokens."""
    return minilm_tokenizer().encode(text, add_special_tokens=True)


def unit(vector: np.ndarray) -> np.ndarray:
    """Return it at length 1."""
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Hello there", [[CLS, 7592, 2045, SEP]]),
        (["Hello", "there"], [[CLS, 7592, SEP], [CLS, 2045, SEP]]),
        ([7592, 2045], [[7592, 2045]]),
        ([[7592], [2045, 5]], [[7592], [2045, 5]]),
    ],
)
async def test_each_form_of_input_is_what_it_says(value: Any, expected: list[list[int]]) -> None:
    """Texts get their special tokens; token ids are taken as they are."""
    scene = Scene()
    body = await scene.body(URL, input=value)
    assert [request.token_ids for request in scene.encoder.requests] == expected
    assert [entry["index"] for entry in body["data"]] == list(range(len(expected)))
    for entry, token_ids in zip(body["data"], expected, strict=True):
        vector = unit(values_of(EncodingRequest(token_ids), WIDTH))
        assert np.allclose(entry["embedding"], vector, atol=1e-6)
    num_tokens = sum(map(len, expected))
    assert body["usage"] == {
        "prompt_tokens": num_tokens,
        "completion_tokens": 0,
        "total_tokens": num_tokens,
    }


async def test_a_body_is_one_of_openais() -> None:
    """With an id that the line alone decides, and the name that was asked for."""
    scene = Scene()
    body = await scene.body(URL, input=["a", "b"], model="tiny")
    parsed = CreateEmbeddingResponse.model_validate(body, strict=True)
    assert (parsed.object, parsed.model, len(parsed.data)) == ("list", "tiny", 2)
    assert (body["id"], body["created"]) == ("embd-0123", 1_700_000_000)
    assert (await scene.reply(URL, input="a")).usage.prompt_tokens == 3


async def test_base64_holds_the_same_floats_as_the_list() -> None:
    """Four bytes each, the lowest first, as OpenAI's client reads them."""
    scene = Scene()
    [plain] = (await scene.body(URL, input="a"))["data"]
    [packed] = (await scene.body(URL, input="a", encoding_format="base64"))["data"]
    read = np.frombuffer(b64decode(packed["embedding"]), dtype="<f4")
    assert np.array_equal(np.array(plain["embedding"], dtype=np.float32), read)


@pytest.mark.parametrize(
    ("normalize", "asked", "is_unit"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"use_activation": False}, False),
        (False, {"use_activation": True}, True),
        (True, {"normalize": False}, False),
    ],
)
async def test_a_vector_has_length_one_where_the_model_or_the_request_says_so(
    *, normalize: bool, asked: dict[str, bool], is_unit: bool
) -> None:
    """The request has the last word."""
    scene = Scene(encoder_model(normalize=normalize))
    [entry] = (await scene.body(URL, input="a", **asked))["data"]
    vector = values_of(scene.encoder.requests[0], WIDTH)
    assert np.allclose(entry["embedding"], unit(vector) if is_unit else vector, rtol=1e-6)


@pytest.mark.parametrize("widths", [frozenset(), frozenset({2, 4})])
async def test_dimensions_cut_a_vector_before_it_is_brought_to_length_one(
    widths: frozenset[int],
) -> None:
    """Only of a model that is made for it."""
    scene = Scene(encoder_model(matryoshka=widths))
    [entry] = (await scene.body(URL, input="a", dimensions=4))["data"]
    vector = unit(values_of(scene.encoder.requests[0], WIDTH)[:4])
    assert np.allclose(entry["embedding"], vector, atol=1e-6)


@pytest.mark.parametrize(
    ("widths", "dimensions", "words"),
    [
        (None, 4, "cannot be truncated"),
        (None, 9, "cannot be truncated"),
        (frozenset(), 9, "vectors have 8 dimensions"),
        (frozenset(), 0, "greater than or equal to 1"),
        (frozenset({2, 4}), 3, "supports 2, 4"),
    ],
)
async def test_dimensions_that_mean_nothing_are_refused(
    widths: frozenset[int] | None, dimensions: int, words: str
) -> None:
    """With what this model's vectors are."""
    error = await Scene(encoder_model(matryoshka=widths)).error(
        URL, input="a", dimensions=dimensions
    )
    assert error["param"] == "dimensions"
    assert words in error["message"]


async def test_all_of_a_vector_may_be_asked_for_by_its_width() -> None:
    """Which cuts nothing."""
    [entry] = (await Scene().body(URL, input="a", dimensions=WIDTH))["data"]
    assert len(entry["embedding"]) == WIDTH


async def test_a_text_that_is_too_long_is_told_by_how_much() -> None:
    """Which of several it is, how long, and what would cut it."""
    error = await Scene().error(URL, input=["a", LONG])
    assert error["message"] == (
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, text 2 of `input`"
        " has 42 tokens. To truncate it, set `truncate_prompt_tokens`, or pass"
        " --truncate-prompt-tokens for all requests."
    )
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"truncate_prompt_tokens": -1}, [CLS, *[2773] * 14, SEP]),
        ({"truncate_prompt_tokens": 4}, [CLS, 2773, 2773, SEP]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [CLS, 2773, 2203, SEP]),
        ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, [2773] * 4),
    ],
)
async def test_a_text_is_cut_on_request_and_its_special_tokens_stay(
    asked: dict[str, Any], expected: list[int]
) -> None:
    """From its end, or from its start."""
    scene = Scene()
    await scene.body(URL, input=f"{LONG}end", **asked)
    assert scene.encoder.requests[0].token_ids == expected


async def test_an_engine_cuts_texts_of_requests_that_do_not_say_so() -> None:
    """A request's own number comes first; -1 is what the model takes."""
    for default, asked, expected in ((4, {}, 4), (-1, {}, MAX_MODEL_LEN), (4, {"to": 5}, 5)):
        scene = Scene(replace(encoder_model(), truncate_prompt_tokens=default))
        own = {"truncate_prompt_tokens": asked["to"]} if asked else {}
        await scene.body(URL, input=LONG, **own)
        assert len(scene.encoder.requests[0].token_ids) == expected


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "must be at most 16"),
        ({"truncate_prompt_tokens": 2}, "special tokens"),
    ],
)
async def test_a_cut_that_cannot_be_is_refused(asked: dict[str, Any], words: str) -> None:
    """Above what the model takes, or so short that nothing would be left."""
    error = await Scene().error(URL, input=LONG, **asked)
    assert error["param"] == "truncate_prompt_tokens"
    assert words in error["message"]


async def test_token_ids_are_cut_too() -> None:
    """As they stand, from the side that is asked for."""
    scene = Scene()
    await scene.body(URL, input=[list(range(20)), [5]], truncate_prompt_tokens=3)
    await scene.body(URL, input=list(range(20)), truncate_prompt_tokens=3, truncation_side="left")
    assert [request.token_ids for request in scene.encoder.requests] == [
        [0, 1, 2],
        [5],
        [17, 18, 19],
    ]


@pytest.mark.parametrize("token_id", [30_522, -1, 2**70])
async def test_token_ids_must_be_the_models(token_id: int) -> None:
    """The message names the one that is not."""
    error = await Scene().error(URL, input=[5, token_id])
    assert error["message"] == (
        f"`input` contains token ID {token_id}; token IDs of this model must be between 0 and 30521."
    )


async def test_prompts_come_before_texts_by_their_names() -> None:
    """The model's default one, or the one that is asked for."""
    prompts = {"query": "find: ", "none": ""}
    scene = Scene(encoder_model(prompts=prompts, default_prompt_name="query"))
    await scene.body(URL, input="a")
    await scene.body(URL, input="a", prompt_name="none")
    await scene.body(URL, input=[5, 6])
    read = [request.token_ids for request in scene.encoder.requests]
    assert read == [ids("find: a"), ids("a"), [5, 6]]
    error = await scene.error(URL, input="a", prompt_name="other")
    assert error["message"] == ("Unknown `prompt_name` 'other'; this model has none, query.")


async def test_a_prompt_that_is_not_pooled_is_skipped() -> None:
    """With the special token before it, as sentence-transformers does."""
    pooling = Pooling(("mean",), include_prompt=False)
    scene = Scene(encoder_model(prompts={"query": "find: "}, pooling=pooling))
    await scene.body(URL, input="a")
    await scene.body(URL, input="a", prompt_name="query")
    await scene.body(URL, input="a", prompt_name="query", add_special_tokens=False)
    assert [request.num_skipped for request in scene.encoder.requests] == [0, 3, 2]


async def test_a_conversation_is_rendered_by_the_models_template() -> None:
    """It writes its special tokens itself."""
    template = "{% for m in messages %}[CLS]{{ m.content }}{{ end }}{% endfor %}"
    scene = Scene(encoder_model(template=template))
    messages = [{"role": "user", "content": "Hello"}]
    await scene.body(URL, messages=messages, chat_template_kwargs={"end": " there"})
    await scene.body(URL, messages=messages, add_special_tokens=True)
    assert [request.token_ids for request in scene.encoder.requests] == [
        [CLS, 7592, 2045],
        [CLS, CLS, 7592, SEP],
    ]


async def test_a_conversation_needs_a_template() -> None:
    """The message says what there is instead."""
    error = await Scene().error(URL, messages=[{"role": "user", "content": "Hello"}])
    assert (error["param"], "--chat-template" in error["message"]) == ("messages", True)


async def test_numbers_that_are_none_fail_their_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a failure of the engine, no row with nulls."""
    scene = Scene()

    async def broken(requests: list[EncodingRequest]) -> list[EncodingResult]:
        return [EncodingResult(np.full(WIDTH, np.nan, np.float32), 3) for _ in requests]

    monkeypatch.setattr(scene.encoder, "generate", broken)
    reply = await scene.reply(URL, input="a")
    assert (reply.status_code, reply.body["error"]["type"]) == (500, "server_error")


async def test_a_url_of_other_models_says_which() -> None:
    """And what this one answers."""
    error = await Scene().error("/v1/chat/completions", messages=[])
    assert error["message"] == (
        "Model does not support endpoint: /v1/chat/completions. It takes a model that writes text; "
        "this one serves /v1/embeddings, /v1/score, /v1/rerank."
    )
