"""Chat batch route: several conversations in one request, as vLLM has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.contract import Reply, StreamedReply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import num_sequences
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


def routes(context: ServerContext) -> list[Route]:
    """Return the routes of batches of conversations."""
    return [Route(path, ChatBatchRoute(context), methods=["POST"]) for path in PATHS]


class ChatBatchRoute(InferenceRoute):
    """ASGI endpoint that answers several conversations with the same parameters."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run the conversations and send one completion, with a choice for each."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            chats = chats_of_batch(body)
            with self.context.admission.admit(sum(map(num_sequences, chats))):
                reply = await run_until_disconnect(receive, self._run(chats))
                await (await reply_response(reply))(scope, receive, send)

    async def _run(self, chats: Sequence[dict[str, Any]]) -> Reply:
        created = int(time.time())
        tasks = [
            asyncio.create_task(self.reply(CHAT_COMPLETIONS.name, chat, new_request_id(), created))
            for chat in chats
        ]
        try:
            replies = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _joined(replies)


def chats_of_batch(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat requests of a batch of conversations; raises `RequestError`."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        words = "must be a list of conversations, each a list of messages"
        raise _refused("messages", f"{words}; got {short_repr(given)}")
    for place, messages in enumerate(given):
        if not isinstance(messages, list):
            words = f"must be a list of messages; got {short_repr(messages)}"
            raise _refused(f"messages.{place}", words)
    if "stream" in body and is_stream(body):
        raise _refused("stream", "is not supported for several conversations: omit it")
    if body.get("n") not in (None, 1):  # may be a list
        raise _refused("n", "must be 1 for several conversations: each has one choice")
    return [{**body, "messages": messages} for messages in given]


def _refused(param: str, words: str) -> RequestError:
    return RequestError(f"`{param}` {words}.", param=param)


def _joined(replies: Sequence[Reply | StreamedReply]) -> Reply:
    """Return one completion with the choices of all, or the first error with its number."""
    bodies: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    is_long = False
    for place, reply in enumerate(replies):
        assert isinstance(reply, Reply)
        if reply.status_code != 200:
            error = reply.body["error"]
            message = f"Conversation {place}: {error['message']}"
            return reply._replace(body={"error": {**error, "message": message}})
        bodies.append(reply.body)
        choices += [{**choice, "index": place} for choice in reply.body["choices"]]
        is_long |= reply.is_long
    usages = [body["usage"] for body in bodies if body.get("usage")]
    usage = {"usage": _sum(usages)} if usages else {}
    return Reply(200, {**bodies[0], "choices": choices, **usage}, is_long=is_long)


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
