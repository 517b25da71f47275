"""Chat batch route: several conversations in one request, as vLLM has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import CHAT_COMPLETIONS
from tidemill.protocol.stream import is_stream
from tidemill.protocol.validation import short_repr

from .context import ServerContext
from .disconnect import run_until_disconnect
from .errors import reply_response
from .inference_routes import InferenceRoute
from .request_bodies import new_request_id

PATHS: Final = tuple(f"{url}/batch" for url in sorted(CHAT_COMPLETIONS.exact))
"""URLs of batches of conversations."""

MAX_CONVERSATIONS: Final = 2_048
"""Maximum number of conversations in one request."""

_MAX_FIELDS: Final = 256
_AT_ONCE: Final = 32  # conversations that start in one turn of the event loop


def routes(context: ServerContext) -> list[Route]:
    """Return the routes of batches of conversations."""
    return [Route(path, ChatBatchRoute(context), methods=["POST"]) for path in PATHS]


class ChatBatchRoute(InferenceRoute):
    """ASGI endpoint that answers several conversations with the same parameters."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run the conversations and send one completion, with a choice for each."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            conversations, fields = batch_of_body(body)
            with self.context.admission.admit(len(conversations)):
                reply = await run_until_disconnect(receive, self._run(conversations, fields))
                await (await reply_response(reply))(scope, receive, send)

    async def _run(self, conversations: Sequence[object], fields: Mapping[str, Any]) -> Reply:
        """Return one reply; the first error ends all other conversations."""
        created = int(time.time())
        replies: dict[int, Reply] = {}
        room = asyncio.Semaphore(2 * self.context.admission.max_running)

        async def answer(place: int, messages: object) -> None:
            chat = {**fields, "messages": messages}
            reply = await self.reply(CHAT_COMPLETIONS.name, chat, new_request_id(), created)
            assert isinstance(reply, Reply)
            if reply.status_code != 200:
                raise _Failed(_error_of(place, reply))
            replies[place] = reply
            room.release()

        try:
            async with asyncio.TaskGroup() as group:
                for place, messages in enumerate(conversations):
                    await room.acquire()
                    group.create_task(answer(place, messages))
                    if place % _AT_ONCE == 0:
                        await asyncio.sleep(0)
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, _Failed):
                return first.reply
            raise first from None
        return _joined([replies[place] for place in range(len(conversations))])


class _Failed(Exception):
    """A conversation without an answer; `reply` is that of the whole request."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


def batch_of_body(body: Mapping[str, Any]) -> tuple[Sequence[object], dict[str, Any]]:
    """Return the conversations of a body and their common fields; raises `RequestError`."""
    given = body.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= MAX_CONVERSATIONS:
        words = f"must be a list of 1 to {MAX_CONVERSATIONS:,} conversations"
        shown = f"{len(given):,}" if isinstance(given, list) else short_repr(given)
        raise _refused("messages", f"{words}, each a list of messages; got {shown}")
    for place, messages in enumerate(given):
        if not isinstance(messages, list):
            words = f"must be a list of messages; got {short_repr(messages)}"
            raise _refused(f"messages.{place}", words)
    if "stream" in body and is_stream(body):
        raise _refused("stream", "is not supported for several conversations: omit it")
    if body.get("n") not in (None, 1):  # may be a list
        raise _refused("n", "must be 1 for several conversations: each has one choice")
    if len(body) > _MAX_FIELDS:  # each conversation in flight has its own dictionary of them
        raise RequestError(f"The body must have at most {_MAX_FIELDS} fields; got {len(body):,}.")
    return given, {name: value for name, value in body.items() if name != "messages"}


def _refused(param: str, words: str) -> RequestError:
    return RequestError(f"`{param}` {words}.", param=param)


def _error_of(place: int, reply: Reply) -> Reply:
    """Return the error of a conversation as that of the request: with its number."""
    error = reply.body["error"]
    message, param = str(error["message"]), error.get("param")
    if isinstance(param, str) and param.partition(".")[0] == "messages":
        own = f"messages.{place}{param.removeprefix('messages')}"
        message, param = message.replace(f"`{param}`", f"`{own}`"), own
    named = {**error, "message": f"Conversation {place}: {message}", "param": param}
    return reply._replace(body={"error": named})


def _joined(replies: Sequence[Reply]) -> Reply:
    """Return one completion with the choices of all."""
    choices = [
        {**choice, "index": place}
        for place, reply in enumerate(replies)
        for choice in reply.body["choices"]
    ]
    usages = [reply.body["usage"] for reply in replies if reply.body.get("usage")]
    usage = {"usage": _sum(usages)} if usages else {}
    is_long = any(reply.is_long for reply in replies)
    return Reply(200, {**replies[0].body, "choices": choices, **usage}, is_long=is_long)


def _sum(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the token counts."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            known = total.get(name)
            if isinstance(value, dict):
                total[name] = _sum([*([known] if known else []), value])
            else:
                total[name] = value if known is None else known + (value or 0)
    return total
