"""Checks the size of Lambda environment variables at synth: AWS rejects them mid-deployment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from aws_cdk import Stack

from infra.config import ConfigRefused

# The limit for all variables of a function together, as JSON.
MAX_BYTES: Final = 4096
# The longest value that CloudFormation substitutes for a reference: a generated name ends
# in thirteen random characters, and a queue is referred to by its URL.
_MADE_UP: Final = "-" * 13
_MAX_NAME: Final = 80
_QUEUE_URL: Final = "https://sqs.ap-southeast-2.amazonaws.com/111122223333/"


def check_environment_size(stack: Stack, variables: Mapping[str, str], num_models: int) -> None:
    """Raise ConfigRefused if Lambda's limit is exceeded; `stack` resolves references."""
    values = {
        name: estimate_value(value, name, stack.stack_name)
        for name, value in stack.resolve(dict(variables)).items()
    }
    num_bytes = len(json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode())
    if num_bytes > MAX_BYTES:
        raise ConfigRefused(
            f"{num_models} models are too many for one deployment: their settings need about "
            f"{num_bytes:,} bytes of a Lambda's environment, and AWS allows {MAX_BYTES:,}. Use "
            "shorter names, or move some models to another deployment with a different `name`."
        )


def estimate_value(value: Any, variable: str, stack_name: str) -> str:
    """Estimate a variable's deployed value by a text of the same length."""
    match value:
        case str():
            return value
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(estimate_value(part, variable, stack_name) for part in parts)
        case {"Ref": logical_id}:
            before = _QUEUE_URL if "QUEUE" in variable else ""
            return before + f"{stack_name}-{logical_id}{_MADE_UP}"[:_MAX_NAME]
    raise AssertionError(value)
