"""Every URL that an engine fetches for a line is one that the worker has checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.lines import RawLine, parse_line
from tidemill.engine.config import ImageLimits
from tidemill.engine.endpoints.chat import _placed_images
from tidemill.engine.endpoints.cohere_embed import _placed_images as cohere_images
from tidemill.engine.endpoints.decisions.next_token import _placed_urls
from tidemill.engine.endpoints.encoder_requests import _placed_images as vector_images
from tidemill.engine.endpoints.image_inputs import ImageInputs
from tidemill.engine.endpoints.media_fetch import RecordingFetcher
from tidemill.handler.worker.shard.media_access import refuse_media
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.cohere_embed import CohereEmbedRequest
from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.decisions.systemone_body import SystemOneRequest
from tidemill.protocol.embeddings import EmbeddingRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.responses.request import ResponsesRequest
from tidemill.protocol.urls import is_object

OWN = "s3://bucket/media/acme/"
URLS = st.sampled_from(
    [f"{OWN}a", "s3://theirs/a", "S3://theirs/b", "s3://bucket/media/other/a", "https://x.com/a"]
)
PLAIN: list[Callable[[str], dict[str, Any]]] = [
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    lambda url: {"type": "image_url", "image_url": url},
    lambda url: {"type": "file", "file": {"file_url": url}},
    lambda url: {"type": "file", "file": {"file_data": url}, "pages": "1"},
    lambda url: {"type": "input_image", "image_url": url},
    lambda url: {"type": "input_file", "file_url": url},
    lambda url: {"type": "input_file", "file_data": url},
    lambda url: {"type": "text", "text": url},
    lambda url: {"type": "input_text", "text": url},
]
DECOYS = st.dictionaries(
    st.sampled_from(["input_image", "input_file", "image", "url", "file_url", "image_url", "file"]),
    URLS | st.builds(lambda url: {"url": url}, URLS),
    max_size=2,
)
PARTS = st.lists(
    st.builds(lambda plain, url, decoys: decoys | plain(url), st.sampled_from(PLAIN), URLS, DECOYS),
    min_size=1,
    max_size=3,
)
QUESTION = {"type": "predicate", "instructions": "Torn?"}
NOUL = {"type": "noul", "instructions": "Torn?"}


def body_of(kind: str, parts: list[Any], decoys: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the parts, and decoys in addition to its fields."""
    match kind:
        case "chat":
            return decoys | {"messages": [{"role": "user", "content": parts}]}
        case "tool":
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages = [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": parts},
            ]
            return decoys | {"messages": messages}
        case "response":
            return decoys | {"input": [{"role": "user", "content": parts}]}
        case "output":
            call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "1", "output": parts}
            return decoys | {"input": [{"role": "user", "content": "?"}, call, output]}
        case "decision":
            items = [{"role": "user", "content": parts}]
            return decoys | {"input": items, "questions": [QUESTION | {"instructions": parts}]}
        case "vector":
            return decoys | {"messages": [{"role": "user", "content": parts[:1]}]}
        case "cohere":
            return decoys | {"inputs": [{"content": [part]} for part in parts]}
    urls = [part.get("image_url") for part in parts]
    return decoys | {"state": "?", "images": urls, "questions": {"q": NOUL}}


KINDS: dict[str, tuple[Any, Any]] = {
    "chat": (ChatCompletionRequest, _placed_images),
    "tool": (ChatCompletionRequest, _placed_images),
    "response": (ResponsesRequest, ResponsesRequest.images),
    "output": (ResponsesRequest, ResponsesRequest.images),
    "decision": (DecisionRequest, _placed_urls),
    "vector": (EmbeddingRequest, vector_images),
    "cohere": (CohereEmbedRequest, cohere_images),
    "systemone": (SystemOneRequest, _placed_urls),
}


class Recorder:
    """A fetcher that fetches nothing."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    @asynccontextmanager
    async def fetched(
        self, urls: Mapping[str, str], *, max_bytes: int | None = None
    ) -> AsyncIterator[dict[str, bytes]]:
        """Record the URLs."""
        del max_bytes
        self.urls += urls
        yield dict.fromkeys(urls, b"")


def fetched_by_engine(kind: str, body: dict[str, Any]) -> list[str]:
    """Return the URLs that an engine fetches for a body."""
    recorder = Recorder()
    inputs = ImageInputs(cast("Any", None), None)
    support = SimpleNamespace(
        limits=ImageLimits(), fetcher=recorder, image_spec=None, max_per_prompt=16
    )
    inputs._image_support = cast("Any", support)

    async def fetch() -> None:
        step: Any = RecordingFetcher(cast("Any", recorder)).step_after(lambda _: None)(body)
        if kind != "recording":
            step = inputs.fetched(body, *KINDS[kind])
        async with step:
            pass

    try:
        asyncio.run(fetch())
    except RequestError:
        assert not recorder.urls
    return recorder.urls


@pytest.mark.parametrize("kind", [*KINDS, "recording"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=PARTS, decoys=DECOYS, is_escaped=st.booleans())
def test_engines_fetch_no_object_that_is_not_the_tenants(
    kind: str, parts: list[Any], decoys: dict[str, Any], *, is_escaped: bool
) -> None:
    """Whatever a body's other fields say, and however its characters are spelled."""
    body = {"file_url": parts[0].get("image_url")} if kind == "recording" else {}
    body = decoys | body if body else body_of(kind, parts, decoys)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/x", "body": body}
    data = json.dumps(line)
    if is_escaped:
        data = data.replace("s3", "\\u00733").replace("S3:", "S\\u0033\\u003A").replace("/", "\\/")
    raw = RawLine(1, data.encode())
    if refuse_media([raw], AllowedMedia("bucket", "acme")):
        return
    for url in fetched_by_engine(kind, parse_line(raw).body):
        assert not is_object(url) or url.startswith(OWN)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_fetch_images_of_each_kind(kind: str) -> None:
    """The property is not of bodies that are all refused."""
    name = "image_url" if kind in {"chat", "tool", "vector", "cohere"} else "input_image"
    part = {"type": name, "image_url": f"{OWN}a"}
    assert set(fetched_by_engine(kind, body_of(kind, [part], {}))) == {f"{OWN}a"}
