"""`/v1/models`: the models that requests may name."""

from __future__ import annotations

from typing import Literal
from urllib.parse import unquote

from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter
from pydantic import BaseModel

from tidemill.protocol.names import ANY_MODEL, model_of

from ...deployment import deployment
from ..envelope.caller import aws
from ..envelope.errors import NotFound

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


class ModelObject(BaseModel):
    """OpenAI's Model; its creation time is unknown. `root` is the model that serves this name.

    The `parent` of an adapter is its base model.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["tidemill"] = "tidemill"
    root: str
    parent: str | None = None


class ModelSpeed(BaseModel):
    """Rate that one worker of a model measured, in written tokens; it reads eight times as many.

    The cost per hour is that of its GPUs, null without a price.
    """

    tokens_per_second: float
    cost_per_hour: float | None


class ModelDetails(ModelObject):
    """A model with its speed in `tidemill`, null before workers have measured it."""

    tidemill: ModelSpeed | None


class ModelList(BaseModel):
    """All model names; there are few, so the list has no pages.

    `any_model` serves every other name; it is null if other names are refused.
    """

    object: Literal["list"] = "list"
    data: list[ModelObject]
    any_model: str | None = None


@router.get("/v1/models")
def list_models() -> ModelList:
    """List the models that are served; aliases come last."""
    models = deployment().models
    found = [_model_object(name, root) for name, root in models.items() if name != ANY_MODEL]
    found.sort(key=lambda model: model.id != model.root)
    return ModelList(data=found, any_model=models.get(ANY_MODEL))


@router.get("/v1/models/.+")
def retrieve_model() -> ModelDetails:
    """Return one model; its name may contain slashes, which clients may quote."""
    name = unquote(router.current_event.path.removeprefix("/v1/models/"))
    root = model_of(name, deployment().models)
    if root is None:
        raise NotFound(f"Model {name[:100]} not found.", code="model_not_found")
    return ModelDetails(**_model_object(name, root).model_dump(), tidemill=_speed_of(root))


def _speed_of(model: str) -> ModelSpeed | None:
    rate = aws().run(deployment().fleets.get_rate(model))
    if not rate.expected_work_per_second:
        return None
    cost = rate.cost_per_hour(deployment().settings.gpu_hour_price(model))
    return ModelSpeed(tokens_per_second=rate.expected_work_per_second, cost_per_hour=cost)


def _model_object(name: str, root: str) -> ModelObject:
    return ModelObject(id=name, root=root, parent=deployment().settings.model_adapters.get(name))
