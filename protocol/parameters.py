"""Parameter names: the known ones of each endpoint, and the unknown ones of a body.

A request with an unknown parameter runs without it, as with OpenAI and vLLM. Because a misspelt
name would silently change results, it is counted and reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .routes import Route, find_route

if TYPE_CHECKING:
    from pydantic import BaseModel

WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("request_id", "rid"),
    *("guided_decoding_backend", "stream", "stream_options"),
)
"""Other servers' parameters that change no row, in addition to the fields of requests."""

# Accepted with a neutral value, or supported only by other servers, so never suggested.
_UNSUGGESTED = (
    *("best_of", "file", "add_special_tokens", "stream_include_usage"),
    *("stream_continuous_usage_stats", "guided_decoding_backend"),
)

# Sent next to the parameters for other servers or by mistake.
_TEMPLATE_KWARGS = "chat_template_kwargs"
_TEMPLATE_VARIABLES = frozenset(
    {"enable_thinking", "thinking", "think", "thinking_budget", "extra_body"}
)

_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})
_MAX_CACHED_CHARS = 256
_MIN_LIKENESS = 0.7


@dataclass(frozen=True, slots=True)
class EndpointParameters:
    """Known parameters of an endpoint; `nested` has those of objects by the objects' paths.

    Objects that are not in `nested` may have any keys, such as `chat_template_kwargs`. `flat` are
    the parameters without the objects.
    """

    endpoint: str
    flat: frozenset[str]
    names: frozenset[str]
    suggested: tuple[str, ...]
    nested: Mapping[str, frozenset[str]]

    def unknown_in(self, body: Mapping[str, Any]) -> Sequence[str]:
        """Return the unknown parameters of a body in its order, nested ones as dotted paths."""
        if self.flat.issuperset(body):  # nearly every line
            return ()
        unknown = [name for name in body if name not in self.names]
        for path, names in self.nested.items():
            value = _at(body, path)
            # A structural tag has its own fields.
            if isinstance(value, dict) and value.get("type") != "structural_tag":
                unknown += [f"{path}.{name}" for name in value if name not in names]
        return unknown

    def nearest(self, name: str) -> str | None:
        """Return the known parameter that an unknown one was probably meant to be, if any."""
        if name in _TEMPLATE_VARIABLES and _TEMPLATE_KWARGS in self.names:
            return _TEMPLATE_KWARGS
        for path in sorted(self.nested, key=len, reverse=True):
            if name.startswith(f"{path}."):
                found = _nearest(name.removeprefix(f"{path}."), sorted(self.nested[path]))
                return found and f"{path}.{found}"
        return _nearest(name, self.suggested)


def find_parameters(url: str) -> EndpointParameters | None:
    """Return the parameters of a URL's endpoint; None for an unknown URL."""
    # Long URLs are not cached: one may be as long as a line.
    return _of_short_url(url) if len(url) <= _MAX_CACHED_CHARS else _of_url(url)


def unknown_parameters(url: str, body: Mapping[str, Any]) -> Sequence[str]:
    """Return the names in a body that are not parameters of its URL; none for an unknown URL."""
    endpoint = find_parameters(url)
    return endpoint.unknown_in(body) if endpoint else ()


def _of_url(url: str) -> EndpointParameters | None:
    route = find_route(url)
    return None if route is None else _of_route(route)


_of_short_url = lru_cache(maxsize=64)(_of_url)


@cache
def _of_route(route: Route) -> EndpointParameters:
    # A late import: loading the models takes 0.1 s, which some processes never need.
    from .constraints.request import ConstrainedRequest, JsonSchemaFormat, ResponseFormat
    from .requests import neutral_values, request_types

    kinds = request_types(route)
    fields = [name for kind in kinds for name in _names_of(kind)]
    refused = {name for kind in kinds for name in neutral_values(kind)}
    nested = {"stream_options": _STREAM_OPTIONS}
    if any(issubclass(kind, ConstrainedRequest) for kind in kinds):
        nested["response_format"] = frozenset(_names_of(ResponseFormat))
        described = {*_names_of(JsonSchemaFormat), "name", "description"}
        nested["response_format.json_schema"] = frozenset(described)
    suggested = {*fields, *WITHOUT_EFFECT} - {*_UNSUGGESTED, *refused}
    names = frozenset({*fields, *WITHOUT_EFFECT, *_UNSUGGESTED, *refused})
    return EndpointParameters(
        route.name,
        names - nested.keys(),
        names,
        tuple(sorted(suggested)),
        MappingProxyType(nested),
    )


def _names_of(kind: type[BaseModel]) -> list[str]:
    """Return all JSON names of a model's fields."""
    from pydantic import AliasChoices

    names = []
    for name, field in kind.model_fields.items():
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
        names += [choice for choice in choices if isinstance(choice, str)]
    return names


def _at(body: Mapping[str, Any], path: str) -> object:
    """Return the value at a dotted path; None if there is none."""
    value: object = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _nearest(name: str, known: Sequence[str]) -> str | None:
    matches = get_close_matches(name.lower(), known, n=1, cutoff=_MIN_LIKENESS)
    return matches[0] if matches else None
