"""`/v1/embeddings` over a scripted encoder: its requests, and the bodies from its values."""

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
from tidemill.engine.endpoints.vectors import as_base64, as_numbers, converted
from tidemill.engine.model.encoders.pooling_config import Pooling
from tidemill.engine.scheduling.encoding import EncodingRequest, EncodingResult
from tidemill.protocol.embeddings import TYPE_CODES, OutputDtype
from tidemill.protocol.errors import RequestError

URL = "/v1/embeddings"
LONG = "word " * 40


def ids(text: str) -> list[int]:
    """Return the ids of a text between its special tokens."""
    return minilm_tokenizer().encode(text, add_special_tokens=True)


def unit(vector: np.ndarray) -> np.ndarray:
    """Return a vector at length 1."""
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
async def test_each_form_of_input_has_its_tokens(value: Any, expected: list[list[int]]) -> None:
    """Texts get their special tokens; token ids are used unchanged."""
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


async def test_a_body_validates_as_openais() -> None:
    """It has an id that depends only on the request, and the requested model name."""
    scene = Scene()
    body = await scene.body(URL, input=["a", "b"], model="tiny")
    parsed = CreateEmbeddingResponse.model_validate(body, strict=True)
    assert (parsed.object, parsed.model, len(parsed.data)) == ("list", "tiny", 2)
    assert (body["id"], body["created"]) == ("embd-0123", 1_700_000_000)
    assert (await scene.reply(URL, input="a")).usage.prompt_tokens == 3


async def test_base64_contains_the_same_floats_as_the_list() -> None:
    """They are little-endian and four bytes each, as OpenAI's client reads them."""
    scene = Scene()
    [plain] = (await scene.body(URL, input="a"))["data"]
    [packed] = (await scene.body(URL, input="a", encoding_format="base64"))["data"]
    read = np.frombuffer(b64decode(packed["embedding"]), dtype="<f4")
    assert np.array_equal(np.array(plain["embedding"], dtype=np.float32), read)


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float", [0.5, -0.5, 0.1, -0.1, 0.0, 0.65, -0.2, -0.155]),
        ("float16", [0.5, -0.5, 0.1, -0.1, 0.0, 0.65, -0.2, -0.155]),
        ("int8", [64, -64, 13, -13, 0, 83, -25, -20]),
        ("uint8", [192, 64, 141, 115, 128, 211, 103, 108]),
        ("ubinary", [0b10100100]),
        ("binary", [0b10100100 - 128]),
    ],
)
def test_elements_have_the_requested_type_in_both_encodings(
    dtype: OutputDtype, expected: list[float], encoding: str
) -> None:
    """Halves of an integer are rounded to the even one; zero is not above zero."""
    vector = np.array([0.5, -0.5, 0.1, -0.1, 0, 0.65, -0.2, -0.155], np.float32)
    found = converted(vector, dtype)
    elements: Any = as_numbers(found)
    if encoding == "base64":
        elements = np.frombuffer(b64decode(as_base64(found)), f"<{TYPE_CODES[dtype]}")
    assert np.allclose(elements, expected, atol=1e-3)
    assert np.array(elements).nbytes == found.nbytes or encoding == "float"


async def test_a_body_names_the_requested_type_of_its_elements() -> None:
    """Base64 does not show it."""
    scene = Scene()
    body = await scene.body(URL, input="a", output_dtype="int8")
    [vector] = [entry["embedding"] for entry in body["data"]]
    exact = unit(values_of(scene.encoder.requests[0], WIDTH))
    assert (body["output_dtype"], vector) == ("int8", np.rint(127 * exact).tolist())
    assert "output_dtype" not in await scene.body(URL, input="a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_dtype": "int8", "use_activation": False}, "must have length 1"),
        ({"output_dtype": "uint8", "use_activation": False}, "must have length 1"),
        ({"output_dtype": "binary", "dimensions": 4}, "multiple of 8"),
        ({"output_dtype": "int4"}, "'binary' or 'ubinary'"),
        ({"output_dtype": ["int8"]}, "'binary' or 'ubinary'"),
    ],
)
async def test_an_element_type_that_does_not_fit_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    """Values above 1 would be cut off, and bits of a byte would be missing."""
    scene = Scene(encoder_model(matryoshka=frozenset()))
    error = await scene.error(URL, input="a", **fields)
    assert error["param"] == "output_dtype"
    assert message in error["message"]


def test_a_value_beyond_float16_is_refused() -> None:
    """JSON has no infinity."""
    with pytest.raises(RequestError, match="beyond"):
        converted(np.array([1e5], np.float32), "float16")


@pytest.mark.parametrize(
    ("normalize", "fields", "is_unit"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"use_activation": False}, False),
        (False, {"use_activation": True}, True),
        (True, {"normalize": False}, False),
    ],
)
async def test_a_vector_has_length_one_if_the_model_or_the_request_sets_it(
    *, normalize: bool, fields: dict[str, bool], is_unit: bool
) -> None:
    """The request overrides the model."""
    scene = Scene(encoder_model(normalize=normalize))
    [entry] = (await scene.body(URL, input="a", **fields))["data"]
    vector = values_of(scene.encoder.requests[0], WIDTH)
    assert np.allclose(entry["embedding"], unit(vector) if is_unit else vector, rtol=1e-6)


@pytest.mark.parametrize("widths", [frozenset(), frozenset({2, 4})])
async def test_dimensions_truncate_a_vector_before_normalization(
    widths: frozenset[int],
) -> None:
    """Only Matryoshka models support it."""
    scene = Scene(encoder_model(matryoshka=widths))
    [entry] = (await scene.body(URL, input="a", dimensions=4))["data"]
    vector = unit(values_of(scene.encoder.requests[0], WIDTH)[:4])
    assert np.allclose(entry["embedding"], vector, atol=1e-6)


@pytest.mark.parametrize(
    ("widths", "dimensions", "words"),
    [
        (None, 4, "cannot be truncated"),
        (None, 9, "vectors have 8 dimensions."),
        (frozenset(), 9, "vectors have 8 dimensions"),
        (frozenset(), 0, "greater than or equal to 1"),
        (frozenset({2, 4}), 3, "supports 2, 4"),
    ],
)
async def test_unsupported_dimensions_are_rejected(
    widths: frozenset[int] | None, dimensions: int, words: str
) -> None:
    """The error contains the supported dimensions."""
    error = await Scene(encoder_model(matryoshka=widths)).error(
        URL, input="a", dimensions=dimensions
    )
    assert error["param"] == "dimensions"
    assert words in error["message"]


async def test_the_full_width_is_a_valid_dimension() -> None:
    """It truncates nothing."""
    [entry] = (await Scene().body(URL, input="a", dimensions=WIDTH))["data"]
    assert len(entry["embedding"]) == WIDTH


async def test_the_error_of_a_too_long_text_has_its_length() -> None:
    """The error contains its number, its length, and how to truncate it."""
    error = await Scene().error(URL, input=["a", LONG])
    assert error["message"] == (
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, text 2 of `input`"
        " has 42 tokens. To truncate it, set `truncate_prompt_tokens`, or pass"
        " --truncate-prompt-tokens for all requests."
    )
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": -1}, [CLS, *[2773] * 14, SEP]),
        ({"truncate_prompt_tokens": 4}, [CLS, 2773, 2773, SEP]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [CLS, 2773, 2203, SEP]),
        ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, [2773] * 4),
    ],
)
async def test_a_text_is_cut_on_request_and_its_special_tokens_stay(
    fields: dict[str, Any], expected: list[int]
) -> None:
    """It is truncated at its end or at its start."""
    scene = Scene()
    await scene.body(URL, input=f"{LONG}end", **fields)
    assert scene.encoder.requests[0].token_ids == expected


async def test_the_engines_truncation_is_the_default_of_requests() -> None:
    """A request's own value takes precedence; -1 is the model's context."""
    for default, fields, expected in ((4, {}, 4), (-1, {}, MAX_MODEL_LEN), (4, {"to": 5}, 5)):
        scene = Scene(replace(encoder_model(), truncate_prompt_tokens=default))
        own = {"truncate_prompt_tokens": fields["to"]} if fields else {}
        await scene.body(URL, input=LONG, **own)
        assert len(scene.encoder.requests[0].token_ids) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "must be at most 16"),
        ({"truncate_prompt_tokens": 2}, "special tokens"),
    ],
)
async def test_an_invalid_truncation_is_rejected(fields: dict[str, Any], words: str) -> None:
    """It is above the model's context, or leaves no token."""
    error = await Scene().error(URL, input=LONG, **fields)
    assert error["param"] == "truncate_prompt_tokens"
    assert words in error["message"]


async def test_token_ids_are_cut_too() -> None:
    """They are truncated at the requested side."""
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
    """The message names the invalid one."""
    error = await Scene().error(URL, input=[5, token_id])
    assert error["message"] == (
        f"`input` contains token ID {token_id}; "
        "token IDs of this model must be between 0 and 30521."
    )


async def test_prompts_come_before_texts_by_their_names() -> None:
    """The prompt is the model's default one, or the requested one."""
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
    """The special token before it is skipped too, as in sentence-transformers."""
    pooling = Pooling(("mean",), include_prompt=False)
    scene = Scene(encoder_model(prompts={"query": "find: "}, pooling=pooling))
    await scene.body(URL, input="a")
    await scene.body(URL, input="a", prompt_name="query")
    await scene.body(URL, input="a", prompt_name="query", add_special_tokens=False)
    assert [request.num_skipped for request in scene.encoder.requests] == [0, 3, 2]


async def test_a_conversation_is_rendered_by_the_models_template() -> None:
    """The template writes its special tokens itself."""
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
    """The message names the alternatives."""
    error = await Scene().error(URL, messages=[{"role": "user", "content": "Hello"}])
    assert (error["param"], "--chat-template" in error["message"]) == ("messages", True)


@pytest.mark.parametrize("url", [URL, "/pooling"])
async def test_an_image_is_refused_by_a_model_of_texts(url: str) -> None:
    """Its template would leave the image out; a document is not called an image."""
    scene = Scene(encoder_model(template="{{ messages[0].content }}"))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    document = {"type": "file", "file": {"file_url": "data:application/pdf;base64,AA=="}}
    for part, words in ((image, "is an image:"), (document, "is a document, which is shown as")):
        error = await scene.error(url, messages=[{"role": "user", "content": [part]}])
        assert (error["param"], error["code"]) == ("messages.0.content.0", "images_not_supported")
        assert words in error["message"]


async def test_values_that_are_not_finite_fail_their_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row has an engine error instead of nulls."""
    scene = Scene()

    async def broken(requests: list[EncodingRequest]) -> list[EncodingResult]:
        return [EncodingResult(np.full(WIDTH, np.nan, np.float32), 3) for _ in requests]

    monkeypatch.setattr(scene.encoder, "generate", broken)
    reply = await scene.reply(URL, input="a")
    assert (reply.status_code, reply.body["error"]["type"]) == (500, "server_error")


async def test_the_error_of_a_url_of_other_models_names_them() -> None:
    """It also names the URLs of this model."""
    error = await Scene().error("/v1/chat/completions", messages=[])
    assert error["message"] == (
        "Model does not support endpoint: /v1/chat/completions. It requires a text generation "
        "model; this model supports /v1/embeddings, /v2/embed, /v1/score, /v1/rerank, "
        "/pooling."
    )
