"""Refusals of AWS, sorted by what helps: time, a change of ours, or nobody knows. No I/O."""

from __future__ import annotations

import re
from typing import Final

from handler.fleet.launcher import NoCapacity, NotStarted, StartRefused

_SHORTAGE = re.compile(
    r"RESOURCE:|AGENT\b|NO ACTIVE INSTANCES|capacity(?![ -]?provider)|InsufficientInstance|"
    r"MaxWaitTime|VcpuLimit|MaxSpotInstance|reached the limit|quota|"
    r"network interface (provision|attach|creat)|limit for network interfaces",
    re.IGNORECASE,
)
# A quota that is used up, or too much asked for at once.
_SHORTAGE_CODES: Final = frozenset(
    {"LimitExceededException", "ResourceLimitExceeded", "ThrottlingException", "Throttling"}
)
# What a right, a parameter or an account is the cause of; AWS answers the same until it is mended.
_OUR_CODES: Final = frozenset(
    {
        "ClientException",
        "ClusterNotFoundException",
        "InvalidParameterException",
        "ParamValidationError",
        "ResourceNotFound",
        "UnsupportedFeatureException",
        "ValidationException",
    }
)
# The same, whatever names their words hold.
_RIGHTS_CODES: Final = frozenset({"AccessDenied", "AccessDeniedException", "BlockedException"})
# The first: no instance type of the provider is large enough for the task.
_OUR_WORDS = re.compile(r"\b(EMPTY CAPACITY PROVIDER|ATTRIBUTE|INACTIVE|MISSING)\b")


def is_shortage(words: str) -> bool:
    """Say whether an answer or an end is told in the words of a shortage, which time helps."""
    return bool(_SHORTAGE.search(words))


def refusal_of(words: str, code: str = "") -> NotStarted | None:
    """Return what an answer of AWS to a start means; None where nobody knows."""
    if code in _SHORTAGE_CODES or (is_shortage(words) and code not in _RIGHTS_CODES):
        return NoCapacity(words)
    if code in _OUR_CODES | _RIGHTS_CODES or _OUR_WORDS.search(words):
        return StartRefused(words)
    return None
