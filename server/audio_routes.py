"""Audio routes: transcriptions and translations, as OpenAI's multipart form or as JSON."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.audio import FILE
from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import FILE_URL
from tidemill.protocol.multipart import FormReader, values
from tidemill.protocol.routes import TRANSCRIPTIONS, TRANSLATIONS

from .context import ServerContext
from .errors import reply_response
from .inference_routes import InferenceRoute
from .request_bodies import check_content_type, header, media_type, parse_object

_FORM, _JSON = "multipart/form-data", "application/json"
# These form fields are always text; the values of others are parsed.
_TEXTS = frozenset({"model", "file_url", "language", "to_language", "prompt", "response_format"})
_PLAIN = frozenset({"text", "srt", "vtt"})


def routes(context: ServerContext) -> list[Route]:
    """Return the audio routes."""
    urls = (TRANSCRIPTIONS.name, TRANSLATIONS.name)
    return [Route(url, AudioRoute(context), methods=["POST"]) for url in urls]


class AudioRoute(InferenceRoute):
    """Answers one audio request in its `response_format`: JSON, plain text or a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the form, run the request on the engine and send the reply."""
        check_content_type(scope, _FORM, _JSON)
        is_form = media_type(scope) == _FORM
        # Before the body: a form without a boundary is refused at once.
        reader = FormReader(header(scope, b"content-type") or "", FILE) if is_form else None
        parse = parse_object if reader is None else partial(_read_form, reader)
        read = self.context.body_reader.read(scope, receive, parse, is_json=not is_form)
        async with read as body:
            is_plain = is_form and body.get("response_format") in _PLAIN
            to_response = partial(_response, is_form=is_form, is_plain=is_plain)
            await self.answer(scope["path"], body, scope, receive, send, to_response=to_response)


async def _response(reply: Reply, *, is_form: bool, is_plain: bool) -> Response:
    if reply.status_code == 200 and is_plain:
        return PlainTextResponse(reply.body["text"])
    return await reply_response(_as_form(reply) if is_form else reply)


def _as_form(reply: Reply) -> Reply:
    """Return a reply whose error names the form's field `file` instead of `file_url`."""
    error = reply.body.get("error")
    if not error or error["param"] != FILE_URL:
        return reply
    message = error["message"].replace(f"`{FILE_URL}`", f"`{FILE}`")
    return Reply(reply.status_code, {"error": error | {"message": message, "param": FILE}})


async def _read_form(reader: FormReader, data: bytes) -> dict[str, Any]:
    return await asyncio.to_thread(_body_of_form, reader, data)


def _body_of_form(reader: FormReader, data: bytes) -> dict[str, Any]:
    """Return a form as a JSON body; raises `RequestError`."""
    recording = reader.read(data)
    reader.end()
    body = values(reader, _TEXTS)
    if reader.has_file == (FILE_URL in body):
        raise RequestError(f"An audio `{FILE}` or a `{FILE_URL}` is required.", param=FILE)
    return body | {FILE: recording} if reader.has_file else body
