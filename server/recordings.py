"""Routes of recordings: a form with a file, as OpenAI's clients send it, or the body of a line."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.contract import Reply
from engine.protocol.audio import FILE, FILE_URL
from engine.protocol.errors import RequestError
from engine.protocol.routes import TRANSCRIPTIONS, TRANSLATIONS
from server.answers import Answers
from server.bodies import check_type, header, media_type, parsed
from server.errors import answered
from server.forms import FormReader, values
from server.means import Means

_FORM, _JSON = "multipart/form-data", "application/json"
# What a form holds is text: of these fields nothing else, however it looks.
_TEXTS = frozenset({"model", "file_url", "language", "to_language", "prompt", "response_format"})
_PLAIN = frozenset({"text", "srt", "vtt"})


def routes(means: Means) -> list[Route]:
    """Return the routes of recordings."""
    urls = (TRANSCRIPTIONS.name, TRANSLATIONS.name)
    return [Route(url, Recordings(means), methods=["POST"]) for url in urls]


class Recordings(Answers):
    """Answers one recording, in the form that was asked for: some are no JSON, some a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the form, ask the engine, and send what it answers."""
        check_type(scope, _FORM, _JSON)
        is_form = media_type(scope) == _FORM
        # Before the body: a form without a boundary is refused at once.
        reader = FormReader(header(scope, b"content-type") or "", FILE) if is_form else None
        parse = parsed if reader is None else partial(_read_form, reader)
        read = self.means.bodies.read(scope, receive, parse, is_json=not is_form)
        async with read as body:
            is_plain = is_form and body.get("response_format") in _PLAIN
            shown = partial(_response, is_form=is_form, is_plain=is_plain)
            await self.answer(scope["path"], body, scope, receive, send, shown=shown)


async def _response(reply: Reply, *, is_form: bool, is_plain: bool) -> Response:
    if reply.status_code == 200 and is_plain:
        return PlainTextResponse(reply.body["text"])
    return await answered(_as_form(reply) if is_form else reply)


def _as_form(reply: Reply) -> Reply:
    """Return a reply in the words of a form, which calls the recording `file`."""
    error = reply.body.get("error")
    if not error or error["param"] != FILE_URL:
        return reply
    message = error["message"].replace(f"`{FILE_URL}`", f"`{FILE}`")
    return Reply(reply.status_code, {"error": error | {"message": message, "param": FILE}})


async def _read_form(reader: FormReader, data: bytes) -> dict[str, Any]:
    return await asyncio.to_thread(_of_form, reader, data)


def _of_form(reader: FormReader, data: bytes) -> dict[str, Any]:
    """Return the body that a form stands for; raises `RequestError` for one that is none."""
    recording = reader.read(data)
    reader.end()
    body = values(reader, _TEXTS)
    if reader.has_file == (FILE_URL in body):
        raise RequestError(f"Send `{FILE}`, the recording, or a `{FILE_URL}`.", param=FILE)
    return body | {FILE: recording} if reader.has_file else body
