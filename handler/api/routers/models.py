"""`/v1/models`: what lines may ask for."""

from __future__ import annotations

from typing import Literal
from urllib.parse import unquote

from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter
from pydantic import BaseModel

from handler.api.envelope.errors import NotFound
from handler.deployment import deployment

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


class ModelObject(BaseModel):
    """OpenAI's Model; nobody knows when one was made."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["tidemill"] = "tidemill"


class ModelList(BaseModel):
    """All models; there are few, so that OpenAI's list has no pages."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


@router.get("/v1/models")
def list_models() -> ModelList:
    """List the models that are served."""
    return ModelList(data=[ModelObject(id=name) for name in deployment().work])


@router.get("/v1/models/.+")
def retrieve_model() -> ModelObject:
    """Return one model; its name may hold slashes, which clients may quote."""
    name = unquote(router.current_event.path.removeprefix("/v1/models/"))
    if name not in deployment().work:
        raise NotFound(f"There is no model {name[:100]}.", code="model_not_found")
    return ModelObject(id=name)
