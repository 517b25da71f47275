"""Lines of other vendors' batch files, and rows of chats, as lines of requests.

Only the envelope is checked here. What a body contains is checked like that of any request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pydantic_core import to_json

from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.json_printing import discard, print_json
from tidemill.protocol.routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    URLS_OF_FIELDS,
    find_route,
    url_of_body,
)
from tidemill.protocol.vendors.anthropic import (
    chat_of_message,
    message_error_at,
    message_origins,
)
from tidemill.protocol.vendors.converse import (
    chat_of_converse,
    converse_error_at,
    converse_origins,
    is_converse,
)
from tidemill.protocol.vendors.error_names import Origin
from tidemill.protocol.vendors.gemini import chat_of_contents, contents_error_at, contents_origins

from .lines import (
    BOM,
    JSON_WHITE_SPACE,
    MAX_LINE_BYTES,
    METHOD,
    PLACES_MARK,
    ROW_ERROR,
    VENDOR_PLACES,
    RawLine,
    Vendor,
    name_of_type,
)

_ANTHROPIC_FIELDS: Final = ("anthropic_version", "system", "stop_sequences", "thinking")
_LARGE_BYTES: Final = 2**20  # the values of longer lines are freed one by one
_DEPTH: Final = 9  # of the arguments of a call
_ID_NAMES: Final = ("custom_id", "id")
OF_REQUESTS: Final = frozenset({"method", "url", "body"})
"""Fields of a request that a line gets when it becomes one."""

VENDOR_FIELDS: Final = "vendor_fields"
"""Field of a line with the fields of these names that the vendor's line has, if any."""

# Names of Bedrock's models for texts, and those of a completion.
_PARAMETERS: Final = {
    "max_gen_len": "max_tokens",
    "maxTokenCount": "max_tokens",
    "topP": "top_p",
    "stopSequences": "stop",
}


class _Envelope(NamedTuple):
    """Fields of a vendor's line: those of its ID and of its body."""

    id: str
    body: str
    needs_id: bool = True


_ENVELOPES: Final[Mapping[Vendor, _Envelope]] = {
    "anthropic": _Envelope("custom_id", "params"),
    "bedrock": _Envelope("recordId", "modelInput", needs_id=False),
    "gemini": _Envelope("key", "request", needs_id=False),
    "no_url": _Envelope("custom_id", "body"),
}


def request_lines(vendor: Vendor, pieces: Iterable[bytes], url: str | None) -> Iterator[bytes]:
    r"""Yield the lines of a vendor's file as requests, under the same numbers.

    A piece without the end of a line gives an empty one. `url` is the endpoint of requests whose
    body does not tell.
    """
    number, held, num_bytes = 1, list[bytes](), 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        requests = []
        for text in (first, *others[:-1]) if others else ():
            num_bytes += len(text)
            requests.append(_request_line(vendor, number, [*held, text], num_bytes, url) + b"\n")
            number, held, num_bytes = number + 1, [], 0
        rest = others[-1] if others else first
        num_bytes += len(rest)
        if num_bytes <= MAX_LINE_BYTES:
            held.append(rest)
        else:
            held.clear()
        yield b"".join(requests)
    yield _request_line(vendor, number, held, num_bytes, url)


def _request_line(
    vendor: Vendor, number: int, texts: list[bytes], num_bytes: int, url: str | None
) -> bytes:
    if num_bytes > MAX_LINE_BYTES:
        words = f"too long: {num_bytes:,} bytes, and the limit is {MAX_LINE_BYTES:,}"
        return _error(None, f"{words}; split the request")
    return request_line(vendor, RawLine(number, b"".join(texts)), url)


def request_line(vendor: Vendor, raw: RawLine, url: str | None = None) -> bytes:
    """Return a vendor's line as a request; a line that is not one gives the reason instead."""
    data = raw.data.removeprefix(BOM)
    if not data.strip(JSON_WHITE_SPACE):
        return b""
    try:
        fields = load_json(data, cache_strings="keys", in_slices=True)
    except ValueError:
        return data  # its error is that of any line
    if not isinstance(fields, dict) or (vendor == "chats" and _is_request(fields)):
        return data
    try:
        request = _request(vendor, fields, raw.number, url)
        line = print_json(request, inf_nan_mode="constants")
    except _BadLineError as exc:
        known_id = fields.get("custom_id" if vendor == "chats" else _ENVELOPES[vendor].id)
        return _error(known_id if isinstance(known_id, str) else None, str(exc), exc.param)
    if len(data) > _LARGE_BYTES:
        discard(fields, _DEPTH)
    return line


class _BadLineError(Exception):
    """A line that is not of its file's vendor; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _request(
    vendor: Vendor, fields: dict[str, Any], number: int, url: str | None
) -> dict[str, Any]:
    if vendor == "chats":
        return _chat_row(fields, number, url)
    envelope = _ENVELOPES[vendor]
    body, custom_id = fields.get(envelope.body), fields.get(envelope.id)
    if not isinstance(body, dict):
        raise _BadLineError(_words(envelope.body, body, "an object"), envelope.body)
    if envelope.body != "body" and isinstance(fields.get("body"), dict):
        raise _BadLineError(f"`{envelope.body}` and `body` are two requests: remove one", "body")
    if custom_id is None and not envelope.needs_id:
        custom_id = str(number)
    if not isinstance(custom_id, str):
        raise _BadLineError(_words(envelope.id, custom_id, "a string"), envelope.id)
    found, chat = _TRANSLATORS[vendor](body, url)
    line: dict[str, Any] = {"custom_id": custom_id, "method": METHOD, "url": found, "body": chat}
    own_names = {ROW_ERROR, VENDOR_FIELDS, VENDOR_PLACES}
    others = fields.keys() - {"custom_id", envelope.id, envelope.body, *own_names}
    if vendor != "no_url" and (own := others & OF_REQUESTS):
        line[VENDOR_FIELDS] = {name: fields[name] for name in fields if name in own}
        others -= own
    if (form := _form_of(vendor, body)) is not None:
        line[VENDOR_PLACES] = [form, [*_FORMS[form].origins(body)]]
    line |= {name: fields[name] for name in fields if name in others}
    known = others - OF_REQUESTS
    return {name: value for name, value in line.items() if value is not None or name in known}


def _is_request(fields: dict[str, Any]) -> bool:
    """Return whether a line is already a request in OpenAI's form."""
    is_named = all(isinstance(fields.get(name), str) for name in ("custom_id", "url"))
    return is_named and isinstance(fields.get("body"), dict)


def _chat_row(fields: dict[str, Any], number: int, url: str | None) -> dict[str, Any]:
    if not isinstance(fields.get("messages"), list):
        raise _BadLineError(_words("messages", fields.get("messages"), "an array"), "messages")
    ids = [fields[name] for name in _ID_NAMES if type(fields.get(name)) in {str, int}]
    custom_id = str(ids[0]) if ids else f"line-{number}"  # a number may be the ID of another line
    body = {name: value for name, value in fields.items() if name not in _ID_NAMES}
    route = find_route(url or "")
    if route is None or route not in URLS_OF_FIELDS["messages"]:
        route = CHAT_COMPLETIONS
    return {"custom_id": custom_id, "method": METHOD, "url": route.name, "body": body}


def _words(name: str, value: object, kind: str) -> str:
    if value is None:
        return f"`{name}` is required and must be {kind}"
    return f"`{name}` must be {kind}, not {name_of_type(value)}"


def _of_params(body: dict[str, Any], _: str | None) -> tuple[str, dict[str, Any]]:
    return CHAT_COMPLETIONS.name, chat_of_message(body)


def _of_contents(body: dict[str, Any], _: str | None) -> tuple[str, dict[str, Any]]:
    return CHAT_COMPLETIONS.name, chat_of_contents(body)


def _of_model_input(body: dict[str, Any], _: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the request of a `modelInput`: Converse's, Anthropic's, or one with OpenAI's names."""
    if is_converse(body):
        return CHAT_COMPLETIONS.name, chat_of_converse(body)
    if is_anthropic(body):
        return CHAT_COMPLETIONS.name, chat_of_message(body)
    if isinstance(text := body.get("inputText"), str):
        rest = {name: value for name, value in body.items() if name != "inputText"}
        config = rest.pop("textGenerationConfig", None)
        if config is None:
            return EMBEDDINGS.name, {"input": text, **rest}
        if not isinstance(config, dict):
            words = _words("textGenerationConfig", config, "an object")
            raise _BadLineError(words, "modelInput.textGenerationConfig")
        return COMPLETIONS.name, {"prompt": text, **rest, **_renamed(config)}
    if "max_gen_len" in body:
        body = _renamed(body)
    return url_of_body(body, CHAT_COMPLETIONS.name), body


def own_error(error: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return the error of a converted line with the names and places of the vendor's line.

    The error of any other line is returned as it is.
    """
    if PLACES_MARK not in data:
        return error
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        form, given = load_json(data)[VENDOR_PLACES]
        origins = [Origin(*each) for each in given]
        renamed = _FORMS[form].error_at
        named = {"message": renamed(error["message"], origins)}
        if error.get("param"):
            named["param"] = renamed(f"`{error['param']}`", origins).strip("`")
        return error | named
    return error


def _form_of(vendor: Vendor, body: Mapping[str, Any]) -> str | None:
    """Return the form of a request that becomes a chat with other names; None for any other."""
    if vendor != "bedrock":
        return vendor if vendor in _FORMS else None
    if is_converse(body):
        return "converse"
    return "anthropic" if is_anthropic(body) else None


def _renamed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {_PARAMETERS.get(name, name): value for name, value in parameters.items()}


def _of_body(body: dict[str, Any], url: str | None) -> tuple[str | None, dict[str, Any]]:
    return url_of_body(body, url), body


_TRANSLATORS: Final[
    Mapping[Vendor, Callable[[dict[str, Any], str | None], tuple[str | None, dict[str, Any]]]]
] = {
    "anthropic": _of_params,
    "bedrock": _of_model_input,
    "gemini": _of_contents,
    "no_url": _of_body,
}


class _Form(NamedTuple):
    """Functions of a form: the origins of its chats' messages, and an error with their places."""

    origins: Callable[[Mapping[str, Any]], Iterable[Origin]]
    error_at: Callable[[str, Sequence[Origin]], str]


_FORMS: Final[Mapping[str, _Form]] = {
    "anthropic": _Form(message_origins, message_error_at),
    "converse": _Form(converse_origins, converse_error_at),
    "gemini": _Form(contents_origins, contents_error_at),
}


def is_anthropic(body: Mapping[str, Any]) -> bool:
    """Return whether a `modelInput` is a request for Anthropic's Messages API."""
    if any(name in body for name in _ANTHROPIC_FIELDS):
        return True
    tools = body.get("tools")
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and "input_schema" in tool for tool in tools
    )


def _error(custom_id: str | None, message: str, param: str | None = None) -> bytes:
    error = {"message": message, "column": param, "code": "invalid_json_line"}
    return to_json({"custom_id": custom_id, ROW_ERROR: error})
