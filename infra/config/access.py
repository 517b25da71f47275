"""What an organisation asks of every resource: a key, a permissions boundary, a path, tags."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, StringConstraints

from infra.config.model import KEY

_BOUNDARY = r"arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/[A-Za-z0-9_+=,.@/-]+"
Boundary = Annotated[str, StringConstraints(pattern=rf"^({_BOUNDARY})?$")]
KmsKey = Annotated[str, StringConstraints(pattern=rf"^({KEY})?$")]
RolePath = Annotated[str, StringConstraints(pattern=r"^/([A-Za-z0-9+=,.@_-]{1,64}/){0,7}$")]

# AWS takes 50 of a resource; CDK, CloudFormation and Tidemill set some themselves.
_MAX_TAGS: Final = 40
_MAX_KEY, _MAX_VALUE = 128, 256
# What the tags of all services may hold.
_TEXT: Final = re.compile(r"[\w .:/=+@-]*")
# `tidemill` is the deployment's own: rights and costs go by it. IAM tells no small letters from
# large ones in keys.
_RESERVED: Final = "tidemill"


def _check_tags(tags: dict[str, str]) -> dict[str, str]:
    if len(tags) > _MAX_TAGS:
        raise ValueError(f"must not hold more than {_MAX_TAGS}")
    keys: dict[str, str] = {}
    for key, value in tags.items():
        if key.lower() == _RESERVED or key.lower().startswith("aws:"):
            raise ValueError(f'has the key "{key}", which is not free')
        if (other := keys.setdefault(key.lower(), key)) != key:
            raise ValueError(f'has "{other}" and "{key}", which are one key to IAM')
        if not 0 < len(key) <= _MAX_KEY or len(value) > _MAX_VALUE:
            raise ValueError(
                f'has "{key}" with a key or value that is too long: a key has 1 to {_MAX_KEY} '
                f"characters, a value at most {_MAX_VALUE}"
            )
        if not _TEXT.fullmatch(key) or not _TEXT.fullmatch(value):
            raise ValueError(
                f'has "{key}" with a character that not every service takes: letters, digits, '
                "spaces and _ . : / = + - @ can stand in tags"
            )
    return tags


Tags = Annotated[dict[str, str], AfterValidator(_check_tags)]
