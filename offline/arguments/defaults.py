"""Default parameters of a run, for lines that do not set them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tidemill.protocol.contract import Reply, Responder, Served

TEMPERATURE, MAX_TOKENS, SYSTEM_PROMPT = "--temperature", "--max-tokens", "--system-prompt"

_SYSTEM_ROLES = {"system", "developer"}
_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
_MAX_CACHED_CHARS = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of `--temperature`, `--max-tokens` and `--system-prompt`; None means no default."""

    temperature: float | None = None
    max_tokens: int | None = None
    system_prompt: str | None = None

    @property
    def flags(self) -> frozenset[str]:
        """Return the flags that were given."""
        given = {
            TEMPERATURE: self.temperature,
            MAX_TOKENS: self.max_tokens,
            SYSTEM_PROMPT: self.system_prompt,
        }
        return frozenset(flag for flag, value in given.items() if value is not None)

    @property
    def is_empty(self) -> bool:
        """Return whether no flag was given."""
        return self.temperature is None and self.max_tokens is None and self.system_prompt is None

    def without_effect(self, url: str) -> frozenset[str]:
        """Return the given flags that have no corresponding parameter in requests to a URL."""
        return self.flags - _flags_of(url)

    def apply(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the body with defaults for missing parameters.

        A null counts as missing.
        """
        if self.is_empty:
            return body
        known = _flags_of(url)
        given: dict[str, Any] = {}
        lacks_temperature = TEMPERATURE in known and body.get("temperature") is None
        if self.temperature is not None and lacks_temperature:
            given["temperature"] = self.temperature
        if self.max_tokens is not None and MAX_TOKENS in known and _lacks_limit(body):
            given[_limit_of(url)] = self.max_tokens
        if self.system_prompt is not None and SYSTEM_PROMPT in known:
            given |= _with_system_prompt(url, body, self.system_prompt)
        return {**body, **given} if given else body


class DefaultingServed:
    """A `Served` that applies defaults to each request and delegates."""

    def __init__(self, served: Served, defaults: Defaults) -> None:
        self.info = served.info
        self.stats = served.stats
        self.close = served.close
        self.respond = DefaultingResponder(served, defaults).respond


class DefaultingResponder:
    """A `Responder` that applies defaults to each request and delegates."""

    def __init__(self, responder: Responder, defaults: Defaults) -> None:
        self._responder = responder
        self._defaults = defaults

    def respond(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Coroutine[Any, Any, Reply]:
        """Answer one request."""
        body = self._defaults.apply(url, body)
        return self._responder.respond(url, body, request_id, created)


def _lacks_limit(body: Mapping[str, Any]) -> bool:
    return _LIMITS.isdisjoint(body) or all(body.get(name) is None for name in _LIMITS)


def _cached_by_url(find: Callable[[str], _T]) -> Callable[[str], _T]:
    """Cache the results for URLs, except long ones: one may be as long as a line."""
    cached = lru_cache(maxsize=64)(find)
    return lambda url: cached(url) if len(url) <= _MAX_CACHED_CHARS else find(url)


@_cached_by_url
def _limit_of(url: str) -> str:
    """Return the parameter that limits the answers of requests to a URL."""
    return "max_output_tokens" if _is_response(url) else "max_tokens"


def _is_response(url: str) -> bool:
    from tidemill.protocol import routes

    return url in routes.RESPONSES.exact


def _with_system_prompt(url: str, body: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Return the field with a system prompt, for a conversation or a response without one."""
    if _is_response(url):
        has_prompt = body.get("instructions") is not None or _has_system_message(body.get("input"))
        return {} if has_prompt else {"instructions": prompt}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or _has_system_message(messages):
        return {}
    return {"messages": [{"role": "system", "content": prompt}, *messages]}


def _has_system_message(messages: object) -> bool:
    """Return whether a conversation, or the input of a response, has instructions."""
    if not isinstance(messages, list):
        return False
    roles = (message.get("role") for message in messages if isinstance(message, Mapping))
    return any(isinstance(role, str) and role in _SYSTEM_ROLES for role in roles)


@_cached_by_url
def _flags_of(url: str) -> frozenset[str]:
    """Return the flags that have a corresponding parameter in requests to a URL."""
    from tidemill.protocol import routes

    match routes.find_route(url):
        case routes.CHAT_COMPLETIONS | routes.RESPONSES:
            return frozenset({TEMPERATURE, MAX_TOKENS, SYSTEM_PROMPT})
        case routes.COMPLETIONS:
            return frozenset({TEMPERATURE, MAX_TOKENS})
        case routes.TRANSCRIPTIONS | routes.TRANSLATIONS:
            return frozenset({TEMPERATURE})
    return frozenset()
