"""The deployment's own KMS key: that it exists, and that its policy allows the services."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from botocore.exceptions import ClientError

from infra.config import Config
from infra.ops.preflight.account import NotReady


def check_key(config: Config, kms: Any) -> None:
    """Raise NotReady for a key that cannot encrypt here, or whose policy omits a service."""
    key, region = config.kms_key, kms.meta.region_name
    if not key:
        return
    if key.split(":")[3] != region:
        raise NotReady(f"kms_key is in {key.split(':')[3]}, but the deployment is in {region}.")
    try:
        found = kms.describe_key(KeyId=key)["KeyMetadata"]
    except ClientError as exc:
        if exc.response["Error"]["Code"] == "NotFoundException":
            raise NotReady(f"kms_key {key} not found: set another one.") from exc
        raise
    if found["KeyState"] != "Enabled" or found["KeySpec"] != "SYMMETRIC_DEFAULT":
        raise NotReady(
            f"kms_key is {found['KeyState']} with key spec {found['KeySpec']}: a deployment "
            "requires an Enabled key with SYMMETRIC_DEFAULT."
        )
    policy = json.loads(kms.get_key_policy(KeyId=key, PolicyName="default")["Policy"])
    let_in = {name for statement in _each(policy["Statement"]) for name in _principals(statement)}
    services = [f"{name}.amazonaws.com" for name in ("s3", "events", "cloudwatch")]
    logs = {"logs.amazonaws.com", f"logs.{region}.amazonaws.com", f"logs.{region}.amazonaws.com.cn"}
    missing = [name for name in services if not let_in & {name, "*"}]
    if not let_in & {*logs, "*"}:
        missing.append(f"logs.{region}.amazonaws.com")
    if missing:
        raise NotReady(
            f"The policy of kms_key does not allow {', '.join(missing)} to use it: "
            "docs/reference/configuration.md has the statements."
        )


def _principals(statement: Mapping[str, Any]) -> Iterator[str]:
    """Yield the services that a statement allows to create data keys, or `*` for all."""
    principal = statement.get("Principal")
    # `NotAction` allows nearly everything.
    patterns = [pattern.lower() for pattern in _each(statement.get("Action", "*"))]
    is_enough = any(fnmatchcase("kms:generatedatakey", pattern) for pattern in patterns)
    if statement["Effect"] != "Allow" or not principal or not is_enough:
        return
    if principal == "*" or "*" in _each(principal.get("AWS", [])):
        yield "*"
        return
    yield from _each(principal.get("Service", []))


def _each(value: Any) -> list[Any]:
    """Return the values of a policy element that may be one or a list."""
    return value if isinstance(value, list) else [value]
