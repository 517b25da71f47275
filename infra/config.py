"""Configuration of a deployment: one TOML file, read once and fully validated."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic import field_validator as field_check
from pydantic import model_validator as model_check

from infra.gpus import GPUS
from tidemill.batch.batch_request import MAX_WINDOW_SECONDS, window_seconds
from tidemill.batch.errors import InvalidOption

DEFAULT_PATH = Path(__file__).parent / "config.toml"

Days = Annotated[int, Field(ge=0, le=3650)]
Count = Annotated[int, Field(ge=0, le=10**15)]
# CloudWatch Logs keeps logs for one of these numbers of days only.
LogDays = Literal[1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731]
Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]{2}-[a-z0-9-]+-[0-9]+[a-z]$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]
_PREFIX = r"s3://[a-z0-9.-]{3,63}/[^*?$]+"
Alias = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._/:-]{0,127})$")]
# In ECR, which is all that workers reach; by its tag or its digest.
_IMAGE = (
    r"[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/[a-z0-9][a-z0-9._/-]*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)
_KEY = r"arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+"
# What a network gets that names no zones: CDK knows no more of an account it must not ask.
DEFAULT_ZONES = 2
_DAY_SECONDS = 24 * 3600
# Winding up a batch is given up after one day; the next one makes sure.
_MIN_WORK_DAYS = MAX_WINDOW_SECONDS // _DAY_SECONDS + 2


class ConfigRefused(Exception):
    """A configuration that cannot be deployed; the message says what to change."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Windows(_Table):
    """Completion windows of batches."""

    default: str = "24h"

    @field_check("default")
    @classmethod
    def _check_default(cls, window: str) -> str:
        try:
            window_seconds(window, param="default")
        except InvalidOption as exc:
            raise ValueError(f'is "{window}"; it can be from 30m to 14d, such as 24h') from exc
        return window


class Retention(_Table):
    """Retention periods in days; `output_days = 0` keeps results for ever."""

    output_days: Days = 90
    work_days: Annotated[int, Field(ge=_MIN_WORK_DAYS, le=3650)] = _MIN_WORK_DAYS
    log_days: LogDays = 30
    table_days: Annotated[int, Field(ge=2, le=3650)] = 90

    @property
    def file_days(self) -> int:
        """Of files that the API made; among them are inputs, which batches read while they work."""
        return self.output_days and max(self.output_days, self.work_days)


class Limits(_Table):
    """Default limits of a tenant, unless `tidemill tenants set` changes them; 0 is no limit."""

    requests_per_minute: Count = 3000
    requests_per_day: Count = 0
    queued_lines: Count = 0
    bytes_per_day: Count = 0


class Isolated(_Table):
    """Settings of an isolated network: VPC endpoints for AWS's services, in some of its zones.

    With `internet` there is a way to hosts that lines name, through a NAT gateway.
    """

    internet: bool = False
    endpoint_zones: Annotated[int, Field(ge=1, le=6)] = 1


class Adapter(_Table):
    """An adapter of a model: a name that requests may ask for, and where its folder lies."""

    name: Name
    weights: Annotated[str, StringConstraints(pattern=rf"^{_PREFIX}$")]


class Model(_Table):
    """A served model and the workers that run it.

    `weights_region` is said of weights that are in another region than the workers, adapters too;
    `weights_key` of those that a key of KMS encrypts.
    """

    name: Name
    weights: Annotated[str, StringConstraints(pattern=rf"^({_PREFIX})?$")] = ""
    weights_region: Annotated[str, StringConstraints(pattern=r"^([a-z]{2}(-[a-z]+)+-[0-9]+)?$")] = (
        ""
    )
    weights_key: Annotated[str, StringConstraints(pattern=rf"^({_KEY})?$")] = ""
    gpu: str
    gpus_per_worker: Annotated[int, Field(ge=1, le=8)] = 1
    max_workers: Annotated[int, Field(ge=1, le=1000)] = 1
    target_minutes: Annotated[int, Field(ge=1, le=MAX_WINDOW_SECONDS // 60)] = 60
    idle_minutes: Annotated[int, Field(ge=1, le=24 * 60)] = 5
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    quantization: Literal["", "fp8"] = ""
    gpu_hour_price: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = 0.0
    aliases: Annotated[tuple[Alias, ...], Field(strict=False)] = ()
    adapters: Annotated[tuple[Adapter, ...], Field(strict=False)] = ()
    args: tuple[str, ...] = Field(default=(), strict=False)

    @field_check("gpu")
    @classmethod
    def _check_gpu(cls, gpu: str) -> str:
        if gpu not in GPUS:
            raise ValueError(f'is "{gpu}"; it can be {", ".join(GPUS)}')
        return gpu

    @model_check(mode="after")
    def _check_count(self) -> Self:
        counts = GPUS[self.gpu].instances
        if self.gpus_per_worker not in counts:
            shown = ", ".join(str(count) for count in counts)
            raise ValueError(
                f"has gpus_per_worker = {self.gpus_per_worker}; "
                f"machines with {self.gpu} have {shown} of them"
            )
        return self

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return where weights lie, the model's and its adapters', as s3://bucket/prefix."""
        named = (self.weights, *(adapter.weights for adapter in self.adapters))
        return tuple(prefix for prefix in named if prefix)

    @property
    def slug(self) -> str:
        """Return the name as it may stand in names of AWS resources."""
        letters = (char if char.isalnum() else "-" for char in self.name.lower())
        return "-".join(word for word in "".join(letters).split("-") if word)[:40].rstrip("-")


class Config(_Table):
    """A whole deployment."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$")] = (
        "tidemill"
    )
    alarm_email: Annotated[str, StringConstraints(pattern=r"^([^@\s]+@[^@\s]+\.[^@\s]+)?$")] = ""
    compute: Literal["managed-instances", "asg", "sagemaker"] = "managed-instances"
    spot: bool = False
    network: Literal["public", "isolated"] = "public"
    zones: Annotated[tuple[Zone, ...], Field(max_length=6, strict=False)] = ()
    image: Annotated[str, StringConstraints(pattern=rf"^({_IMAGE})?$")] = ""
    auth: Literal["keys", "iam"] = "keys"
    strict_endpoint: bool = False
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")] = "USD"
    windows: Windows = Field(default_factory=Windows)
    retention: Retention = Field(default_factory=Retention)
    limits: Limits = Field(default_factory=Limits)
    isolated: Isolated = Field(default_factory=Isolated)
    models: Annotated[tuple[Model, ...], Field(min_length=1, strict=False)]

    @field_check("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "default":
            raise ValueError('is "default", as an event bus and a cluster of every account are')
        return name

    @field_check("network", mode="before")
    @classmethod
    def _check_network(cls, network: object) -> object:
        if isinstance(network, Mapping):
            raise ValueError(  # noqa: TRY004 - pydantic takes these
                'is no table any more: say network = "public" or "isolated" and put zones beside '
                "it, internet and endpoint_zones into [isolated]"
            )
        return network

    @field_check("zones")
    @classmethod
    def _check_zones(cls, zones: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(zones)) < len(zones):
            raise ValueError("names a zone twice")
        return zones

    @field_check("models")
    @classmethod
    def _check_models(cls, models: tuple[Model, ...]) -> tuple[Model, ...]:
        own = {model.name for model in models}
        aliases = [alias for model in models for alias in model.aliases]
        adapters = [adapter.name for model in models for adapter in model.adapters]
        if taken := own & set(aliases):
            raise ValueError(f"has the alias {min(taken)}, which is the name of a model")
        if taken := {*own, *aliases} & set(adapters):
            raise ValueError(f"has the adapter {min(taken)}, as a model or an alias is called")
        for words, names in (
            ("has twice the name", [model.name for model in models]),
            ("has twice the alias", aliases),
            ("has twice the adapter", adapters),
            ("has names that are the same in AWS:", [model.slug for model in models]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{words} {min(twice)}")
        return models

    @model_check(mode="after")
    def _check_isolated(self) -> Self:
        if self.network == "public" and self.isolated != Isolated():
            raise ValueError('[isolated] is of networks that are: say network = "isolated"')
        zones = len(self.zones) or DEFAULT_ZONES
        if self.isolated.endpoint_zones > zones:
            raise ValueError(
                f"isolated.endpoint_zones must be at most {zones}, the zones there are"
            )
        if self.zones and not self.has_network:
            raise ValueError("zones are SageMaker's own choice where the network is public")
        far = [model.name for model in self.models if model.weights_region]
        if far and self.network == "isolated" and not self.isolated.internet:
            raise ValueError(
                f"{far[0]} has weights_region, and an isolated network has a way to other "
                "regions by isolated.internet alone"
            )
        return self

    @property
    def has_network(self) -> bool:
        """Say whether workers have a network of this deployment's, and not SageMaker's."""
        return self.compute != "sagemaker" or self.network == "isolated"

    @property
    def fleets_path(self) -> str:
        """Return the path of the parameters that say how workers are started."""
        # SSM takes no parameter whose name begins with its own or with AWS's.
        return f"/tidemill/{self.name}/fleets"

    def fleet_name(self, model: Model) -> str:
        """Return the name of what a model's workers are started from, such as its tasks' family."""
        return f"{self.name}-{model.slug}"


def read_config(path: Path) -> Config:
    """Return what the file asks for; raises ConfigRefused with one sentence for each mistake."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigRefused(f"{path} cannot be read: {exc.strerror}.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigRefused(f"{path} is not TOML: {exc}.") from exc
    return make_config(found, str(path))


def make_config(found: Mapping[str, Any], where: str) -> Config:
    """Return the configuration that a table holds; `where` names it in errors."""
    try:
        return Config.model_validate(found)
    except ValidationError as exc:
        raise ConfigRefused("\n".join(_messages(exc.errors(), where))) from exc


def with_aliases(config: Config, aliases: Sequence[str], where: str) -> Config:
    """Return the configuration with more names for its only model; raises ConfigRefused."""
    if not aliases:
        return config
    if len(config.models) > 1:
        raise ConfigRefused(
            f"{where}: there are {len(config.models)} models; `aliases` in the configuration say "
            "which of them is meant."
        )
    [model] = config.models
    names = dict.fromkeys((*model.aliases, *aliases))
    names.pop(model.name, None)
    renamed = model.model_dump() | {"aliases": tuple(names)}
    return make_config(config.model_dump() | {"models": (renamed,)}, where)


_MESSAGES = {
    "extra_forbidden": "is no key that Tidemill knows",
    "missing": "must be given",
    "int_type": "must be a whole number",
    "string_type": "must be a text in quotes",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "too_short": "must hold at least one",
    "tuple_type": "must be a list in square brackets",
    "model_type": "must be a table",
}


# What a text must look like, by its place in the file.
_PATTERN_HINTS = {
    "alarm_email": "an e-mail address",
    "image": "an image in ECR: 111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1",
    "models.adapters.name": "a name, such as sql",
    "models.adapters.weights": "s3://bucket/prefix",
    "models.aliases": "a model's name, or * for any",
    "models.name": "a model's name, such as Qwen/Qwen3-0.6B",
    "models.weights": "s3://bucket/prefix",
    "models.weights_key": "a key of KMS: arn:aws:kms:eu-west-1:111122223333:key/…",
    "models.weights_region": "a region, such as eu-west-1",
    "name": "a short name of small letters, digits and dashes between them",
    "zones": "a zone, such as eu-west-1a",
}


def _messages(errors: Sequence[Any], where: str) -> Iterator[str]:
    for error in errors:
        place = error["loc"]
        is_echo = error["type"] == "too_short" and any(
            other["loc"][: len(place)] == place and other is not error for other in errors
        )
        if not is_echo:  # of a list whose entries are wrong
            yield " ".join(filter(None, (f"{where}:", _path(place), f"{_message(error)}.")))


def _path(loc: Iterable[int | str]) -> str:
    """Return a place as `models[1].gpu`, with models counted from 1 as a person does."""
    path = ""
    for part in loc:
        path += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _message(error: Mapping[str, Any]) -> str:
    given = error["input"]
    match error["type"], error.get("ctx", {}):
        case kind, _ if kind in _MESSAGES:
            return _MESSAGES[kind]
        case "value_error", context:
            return str(context["error"])
        case "literal_error", context:
            return f"is {given!r}; it can be {context['expected']}"
        case "string_pattern_mismatch", _:
            place = ".".join(part for part in error["loc"] if isinstance(part, str))
            return f"is {json.dumps(given)}, which does not look like {_PATTERN_HINTS[place]}"
        case "greater_than_equal", context:
            return f"is {given}; it must be {context['ge']:g} or more"
        case "less_than_equal", context:
            return f"is {given}; it must be {context['le']:g} or less"
        case "too_long", context:
            return f"must not hold more than {context['max_length']}"
        case _:
            return f"is {given!r}: {error['msg']}"
