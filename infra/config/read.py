"""Reads a configuration; each mistake becomes a sentence with its place in the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from infra.config.deployment import Config
from infra.config.network import MAX_ZONES

DEFAULT_PATH: Final = Path(__file__).parents[1] / "config.toml"


class ConfigRefused(Exception):
    """A configuration that cannot be deployed; the message contains the mistakes."""


def read_config(path: Path) -> Config:
    """Return the configuration in a file; raises ConfigRefused with one sentence per mistake."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigRefused(f"{path} cannot be read: {exc.strerror}.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigRefused(f"{path} is not TOML: {exc}.") from exc
    return make_config(found, str(path))


def make_config(found: Mapping[str, Any], where: str) -> Config:
    """Return the configuration in a table; `where` names it in errors."""
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
            f"{where}: there are {len(config.models)} models; set `aliases` in the configuration "
            "of the model that you mean."
        )
    [model] = config.models
    names = dict.fromkeys((*model.aliases, *aliases))
    names.pop(model.name, None)
    renamed = model.model_dump() | {"aliases": tuple(names)}
    return make_config(config.model_dump() | {"models": (renamed,)}, where)


def with_name(config: Config, name: str, where: str) -> Config:
    """Return the configuration with another name for its only model; several keep their names.

    Raises ConfigRefused for an invalid model name.
    """
    if not name or len(config.models) > 1:
        return config
    renamed = config.models[0].model_dump() | {"name": name}
    return make_config(config.model_dump() | {"models": (renamed,)}, where)


def with_zones(config: Config, zones: Sequence[str], where: str) -> Config:
    """Return the configuration with the region's zones, unless it names some."""
    if not zones or not config.lacks_zones:
        return config
    named = config.network.model_dump() | {"zones": tuple(zones[:MAX_ZONES])}
    return make_config(config.model_dump() | {"network": named}, where)


def with_concurrency(config: Config, found: str) -> Config:
    """Return the configuration with the account's Lambda concurrency, unless it sets one."""
    if config.lambda_concurrency or not found.isdecimal():
        return config
    return config.model_copy(update={"lambda_concurrency": int(found)})


_MESSAGES = {
    "extra_forbidden": "is not a known key",
    "missing": "is required",
    "int_type": "must be a whole number",
    "string_type": "must be a string in quotes",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "too_short": "must have at least one entry",
    "tuple_type": "must be a list in square brackets",
    "model_type": "must be a table",
    "dict_type": "must be a table",
}


# The expected form of a string, by its place in the file.
_PATTERN_HINTS = {
    "alarm_email": "an e-mail address",
    "currency": "a currency's code, such as USD",
    "domain.certificate": "an ACM certificate: arn:aws:acm:eu-west-1:111122223333:certificate/…",
    "domain.name": "a name, such as llm.example.com",
    "image": "an image in ECR: 111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1",
    "kms_key": "a KMS key: arn:aws:kms:eu-west-1:111122223333:key/…",
    "oidc.audience": "an audience, such as a client ID",
    "oidc.issuer": "an issuer's URL: https://login.example.com",
    "oidc.tenant_claim": "the name of a claim",
    "producers.arn": "a role, a user or an account: arn:aws:iam::111122223333:role/producer",
    "producers.tenant": "a tenant's name",
    "models.adapters.name": "a name, such as sql",
    "models.adapters.weights": "s3://bucket/prefix",
    "models.aliases": "a model's name, or * for any",
    "models.name": "a model's name, such as Qwen/Qwen3-0.6B",
    "models.reservation_group": "a group: arn:aws:resource-groups:eu-west-1:1111…:group/mine",
    "models.weights": "s3://bucket/prefix",
    "models.weights_key": "a KMS key: arn:aws:kms:eu-west-1:111122223333:key/…",
    "models.weights_region": "a region, such as eu-west-1",
    "name": "a name of at most 24 lower-case letters, digits and dashes between them",
    "network.security_group_ids": "a security group: sg-0123456789abcdef0",
    "network.subnet_ids": "a subnet: subnet-0123456789abcdef0",
    "network.vpc_id": "a VPC: vpc-0123456789abcdef0",
    "network.zones": "a zone, such as eu-west-1a",
    "permissions_boundary": "a policy's ARN: arn:aws:iam::111122223333:policy/boundary",
    "vpc_endpoint_ids": "a VPC endpoint, such as vpce-0123456789abcdef0",
    "role_path": "a path of roles between slashes: /platform/",
}
# An example of each table in a list, which may be written as a string by mistake.
_TABLE_HINTS = {
    "producers": '{ arn = "arn:aws:iam::111122223333:role/producer" }',
    "models.adapters": '{ name = "sql", weights = "s3://bucket/prefix" }',
}


def _messages(errors: Sequence[Any], where: str) -> Iterator[str]:
    for error in errors:
        place = error["loc"]
        is_echo = error["type"] == "too_short" and any(
            other["loc"][: len(place)] == place and other is not error for other in errors
        )
        if not is_echo:  # of a list with invalid entries
            yield " ".join(filter(None, (f"{where}:", _path(place), f"{_message(error)}.")))


def _path(loc: Iterable[int | str]) -> str:
    """Return a place as `models[1].gpu`, with models counted from 1."""
    path = ""
    for part in loc:
        path += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _message(error: Mapping[str, Any]) -> str:
    given = error["input"]
    place = ".".join(part for part in error["loc"] if isinstance(part, str))
    match error["type"], error.get("ctx", {}):
        case "model_type", _ if place in _TABLE_HINTS:
            return f"must be a table: {_TABLE_HINTS[place]}"
        case kind, _ if kind in _MESSAGES:
            return _MESSAGES[kind]
        case "value_error", context:
            return str(context["error"])
        case "literal_error", context:
            return f"is {given!r}; it can be {context['expected']}"
        case "string_pattern_mismatch", _:
            return f"is {json.dumps(given)}, which does not look like {_PATTERN_HINTS[place]}"
        case "greater_than_equal", context:
            return f"is {given}; it must be {context['ge']:g} or more"
        case "less_than_equal", context:
            return f"is {given}; it must be {context['le']:g} or less"
        case "too_long", context:
            return f"must have at most {context['max_length']} entries"
        case _:
            return f"is {given!r}: {error['msg']}"
