"""`/v1/models`: what lines may ask for."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from handler.api.errors import NotFound
from handler.settings import deployment

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


@router.get("/v1/models")
def list_models() -> dict[str, Any]:
    """List the models that are served."""
    return {"object": "list", "data": [_shown(name) for name in deployment().work]}


@router.get("/v1/models/.+")
def retrieve_model() -> dict[str, Any]:
    """Return one model; its name may hold slashes, which clients may quote."""
    name = unquote(router.current_event.path.removeprefix("/v1/models/"))
    if name not in deployment().work:
        raise NotFound(f"There is no model {name[:100]}.", code="model_not_found")
    return _shown(name)


def _shown(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidemill"}
