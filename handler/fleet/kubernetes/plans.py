"""Plans file: how each model's workers are started on Kubernetes, as a user writes it.

It is a JSON object that maps models to plans, mounted from a ConfigMap. A change is a new release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from tidemill.batch.errors import HandlerError
from tidemill.batch.fleet import FleetPlan
from tidemill.batch.weekly_hours import WeeklyHours

from ...settings import Settings
from .config import JobConfig, KubernetesConfig
from .job import release_of

_PREFIX: Final = "TIDEMILL_"
# Settings of a worker that are not settings of the deployment.
_OF_WORKERS: Final = ("REUSE", "REUSE_SAMPLED", "REUSE_MAX_SIZE")
_OF_AWS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS: Final = "AWS_ENDPOINT_URL"


class PlansRefused(HandlerError):
    """An invalid plans file; the message has a sentence per mistake."""

    code = "plans_refused"


def _checked_hours(hours: str) -> str:
    WeeklyHours.parse(hours)
    return hours


class Plan(BaseModel):
    """Plan of one model's workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_workers: Annotated[int, Field(ge=1, le=1000)] = 1
    min_workers: Annotated[int, Field(ge=0, le=1000)] = 0
    min_workers_hours: Annotated[str, AfterValidator(_checked_hours)] = ""
    target_seconds: Annotated[int, Field(ge=1)] = 3600
    start_seconds: Annotated[int, Field(ge=1)] = 300
    idle_seconds: Annotated[int, Field(ge=1)] = 300
    means: JobConfig

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"has min_workers above max_workers = {self.max_workers}")
        return self


_PLANS: Final = TypeAdapter(dict[str, Plan])


def read_plans(
    path: Path, settings: Settings, namespace: str, environment: Mapping[str, str]
) -> dict[str, FleetPlan]:
    """Return the fleet plans of a file by model; raises PlansRefused.

    Workers get the variables of this process that name the deployment's resources.
    """
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise PlansRefused(f"{path} cannot be read: {exc.strerror}") from exc
    try:
        plans = _PLANS.validate_json(text, strict=True)
    except ValidationError as exc:
        raise PlansRefused("\n".join(_complaints(exc.errors(), path))) from exc
    if strangers := sorted(set(plans) - set(settings.work_queues)):
        known = ", ".join(sorted(settings.work_queues)) or "none"
        raise PlansRefused(
            f"{path}: model {strangers[0]} is not in this deployment; "
            f"TIDEMILL_WORK_QUEUES has: {known}"
        )
    return {
        model: _fleet_plan(
            model, plan, settings, namespace, passed_environment(model, settings, environment)
        )
        for model, plan in plans.items()
    }


def passed_environment(
    model: str, settings: Settings, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that a model's workers get from this process: no keys, no other model's.

    So a change to another model of the deployment is not a new release of this one.
    """
    names = {f"{_PREFIX}{name.upper()}" for name in (*Settings.model_fields, *_OF_WORKERS)}
    names -= {f"{_PREFIX}FLEETS"}
    passed = {
        name: value
        for name, value in environment.items()
        if name in names or name in _OF_AWS or name.startswith(_ENDPOINTS)
    }
    own = {
        "WORK_QUEUES": {model: settings.work_queues[model]},
        "MODEL_ALIASES": _of(model, settings.model_aliases),
        "MODEL_ADAPTERS": _of(model, settings.model_adapters),
        "GPU_HOUR_PRICES": {
            name: price for name, price in settings.gpu_hour_prices.items() if name == model
        },
    }
    return passed | {f"{_PREFIX}{name}": json.dumps(value) for name, value in own.items()}


def _of(model: str, names: Mapping[str, str]) -> dict[str, str]:
    return {name: named for name, named in sorted(names.items()) if named == model}


def _fleet_plan(
    model: str, plan: Plan, settings: Settings, namespace: str, passed: Mapping[str, str]
) -> FleetPlan:
    means = plan.means.model_dump(mode="json") | {
        "args": [*_worker_arguments(model, plan, settings), *plan.means.args],
        "environment": {**passed, **plan.means.environment},
        "namespace": namespace,
        "deployment": settings.table,
    }
    return FleetPlan(
        model=model,
        launcher="kubernetes",
        release=release_of(KubernetesConfig.model_validate(means)),
        max_workers=plan.max_workers,
        target_seconds=plan.target_seconds,
        start_seconds=plan.start_seconds,
        min_workers=plan.min_workers,
        min_workers_hours=plan.min_workers_hours,
        means=means,
    )


def _worker_arguments(model: str, plan: Plan, settings: Settings) -> Iterator[str]:
    yield from ("worker", "--served-model-name", model, *_of(model, settings.model_aliases))
    yield from ("--exit-when-idle", str(plan.idle_seconds))
    if plan.min_workers:
        yield from ("--min-workers", str(plan.min_workers))
    if plan.min_workers_hours:
        yield from ("--min-workers-hours", plan.min_workers_hours)
    if plan.means.gpus:  # without its GPU a worker must end: it would only delay shards
        yield from ("--device", "cuda")


def _complaints(errors: Sequence[Any], path: Path) -> Iterator[str]:
    """Yield a sentence for each mistake, with its place in the file."""
    for error in errors:
        place = ""
        for part in error["loc"]:
            place += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if place else part
        yield " ".join(filter(None, (f"{path}:", place, _message(error))))


def _message(error: Mapping[str, Any]) -> str:
    match error["type"], error.get("ctx", {}):
        case "extra_forbidden", _:
            return "is not a known key of a plan"
        case "missing", _:
            return "is required"
        case "json_invalid", context:
            return f"is not JSON: {context['error']}"
        case "value_error", context:
            return str(context["error"])
        case _:
            return f"is {error['input']!r}: {error['msg']}"
