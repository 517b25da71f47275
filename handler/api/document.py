"""OpenAPI document: derived from the routes by Powertools and completed here.

Powertools describes errors in its own format, which no route of this API returns.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from aws_lambda_powertools.event_handler import APIGatewayHttpResolver

from .open_paths import is_open

_TITLE: Final = "Tidemill"
_ABOUT: Final = (
    "OpenAI-compatible batch API; extensions are described where they occur. "
    "Errors have OpenAI's format."
)
_ERRORS: Final = {
    HTTPStatus.BAD_REQUEST: "Invalid request; `param` names the invalid parameter.",
    HTTPStatus.UNAUTHORIZED: "The API key or token is missing, wrong, expired or revoked.",
    HTTPStatus.NOT_FOUND: "Not found for this tenant.",
    HTTPStatus.GONE: "The object existed but has been deleted.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large; upload larger files in parts.",
    HTTPStatus.TOO_MANY_REQUESTS: "Rate limit reached; retry after `Retry-After` seconds.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "Internal error, logged under the `x-request-id` header.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Not ready yet; retry after `Retry-After` seconds.",
}
_ALWAYS: Final = {HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND}
_WAITS: Final = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
# Additional statuses of some routes, by the names of their functions.
_ALSO: Final = {
    "list_results": {HTTPStatus.GONE},
    "list_history": {HTTPStatus.GONE},
}
_REDIRECTS: Final = {
    "file_content": {
        "description": "Redirect to a URL valid for one hour; do not send the API key to it.",
        "headers": {"Location": {"schema": {"type": "string", "format": "uri"}}},
    }
}
_TEXTS: Final = {"show_metrics": "text/plain"}
# A name may contain slashes, so its route is a pattern.
_MODEL: Final = {"in": "path", "name": "model", "required": True, "schema": {"type": "string"}}
_PATTERNS: Final = {"/v1/models/.+": ("/v1/models/{model}", [_MODEL])}


@cache
def text(app: APIGatewayHttpResolver) -> str:
    """Return the document as JSON text, as it is served and checked in."""
    return json.dumps(document(app), indent=2, sort_keys=True) + "\n"


def document(app: APIGatewayHttpResolver) -> dict[str, Any]:
    """Return the document of all public routes."""
    found = app.get_openapi_schema(title=_TITLE, version="1", description=_ABOUT)
    made: dict[str, Any] = json.loads(found.model_dump_json(by_alias=True, exclude_none=True))
    for route in (*app._static_routes, *app._dynamic_routes):  # noqa: SLF001 - as it does itself
        item = made["paths"].get(route.openapi_path)
        if item and route.method.lower() in item:
            _complete(item[route.method.lower()], route.func, route.openapi_path)
    _link(made["paths"])
    for pattern, (path, parameters) in _PATTERNS.items():
        for operation in made["paths"][pattern].values():
            operation["parameters"] = parameters
        made["paths"][path] = made["paths"].pop(pattern)
    schemas = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError", "ResponseValidationError"):
        schemas.pop(name)
    made["components"] |= {"responses": _responses(), "securitySchemes": _SECURITY}
    schemas |= {"Error": _ERROR}
    made["security"] = [{"key": []}]
    named: dict[str, Any] = json.loads(_with_plain_names(json.dumps(made)))
    return named


def _complete(operation: dict[str, Any], function: Any, path: str) -> None:
    """Add an operation's ID, summary and all of its responses."""
    head, *words = function.__name__.split("_")
    summary, _, description = (inspect.getdoc(function) or "").partition("\n\n")
    operation["operationId"] = head + "".join(word.capitalize() for word in words)
    operation["summary"] = " ".join(summary.split()).removesuffix(".")
    if description:
        operation["description"] = " ".join(description.split())
    operation["tags"] = [path.removeprefix("/v1").split("/")[1]]
    operation["responses"] = {
        status: answer for status, answer in operation["responses"].items() if status < "4"
    }
    if function.__name__ in _REDIRECTS:
        operation["responses"] = {"307": _REDIRECTS[function.__name__]}
    else:
        operation["responses"]["200"]["description"] = "Success."
    if function.__name__ in _TEXTS:
        text = {_TEXTS[function.__name__]: {"schema": {"type": "string"}}}
        operation["responses"]["200"]["content"] = text
    statuses = _ALWAYS | _ALSO.get(function.__name__, set())
    if is_open(path):
        operation["security"] = []
    else:
        statuses |= {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.UNAUTHORIZED}
        # For example when a token's issuer cannot be reached.
        statuses |= {HTTPStatus.SERVICE_UNAVAILABLE}
    if "requestBody" in operation:
        statuses |= {HTTPStatus.REQUEST_ENTITY_TOO_LARGE}
    for status in statuses:
        operation["responses"][str(int(status))] = {
            "$ref": f"#/components/responses/{_name_of(status)}"
        }


def _link(paths: dict[str, Any]) -> None:
    """Link each creating operation to the paths that take the new ID, and a file to a batch."""
    for path, item in paths.items():
        under = [name for name in paths if re.match(rf"{re.escape(path)}/{{\w+}}", name)]
        if "post" not in item or not under:
            continue
        links = item["post"]["responses"]["200"]["links"] = {}
        for operation in (found for name in under for found in paths[name].values()):
            id_name = operation["parameters"][0]["name"]
            links[operation["operationId"]] = {
                "operationId": operation["operationId"],
                "parameters": {id_name: "$response.body#/id"},
            }
    makes_file = paths["/v1/files"]["post"]["responses"]["200"]
    maker = paths["/v1/batches"]["post"]["operationId"]
    body = {"input_file_id": "$response.body#/id", "endpoint": "/v1/chat/completions"}
    makes_file["links"][maker] = {"operationId": maker, "requestBody": body}


def _responses() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        _name_of(status): {"description": words, "content": content}
        for status, words in _ERRORS.items()
    }
    for status in _WAITS:
        found[_name_of(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return found


def _name_of(status: HTTPStatus) -> str:
    # Python 3.13 calls it CONTENT_TOO_LARGE; the document does not depend on the version.
    is_too_large = status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    name = "REQUEST_ENTITY_TOO_LARGE" if is_too_large else status.name
    return "".join(word.capitalize() for word in name.split("_"))


def _with_plain_names(made: str) -> str:
    """Return the document with readable schema names: BatchPage, CreateFileForm."""

    def form(match: re.Match[str]) -> str:
        return "".join(word.capitalize() for word in match[1].split("_")) + "Form"

    made = re.sub(r"\bPage_(\w+?)Object_", r"\1Page", made)
    return re.sub(r"\bBody_(\w+?)_v1_\w+", form, made)


_SECURITY: Final = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key from `tidemill keys create`, or a user's OIDC token.",
    }
}
_TEXT_OR_NULL: Final = {"type": ["string", "null"]}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
