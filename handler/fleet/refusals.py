"""Classifies refusals of AWS: a shortage, a configuration error, or unknown. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from tidemill.batch.fleet import Worker, WorkerStatus

from .launcher import NoCapacity, NotStarted, StartRefused

_SHORTAGE = re.compile(
    r"RESOURCE:|AGENT\b|NO ACTIVE INSTANCES|capacity(?![ -]?provider)|InsufficientInstance|"
    r"MaxWaitTime|VcpuLimit|MaxSpotInstance|reached the limit|quota|"
    r"network interface (provision|attach|creat)|limit for network interfaces",
    re.IGNORECASE,
)
# A used-up quota.
_SHORTAGE_CODES: Final = frozenset({"LimitExceededException", "ResourceLimitExceeded"})
# Throttling: nothing was started, and it does not indicate a shortage.
_THROTTLED_CODES: Final = frozenset(
    {"ThrottlingException", "Throttling", "RequestLimitExceeded", "TooManyRequestsException"}
)
# Caused by a permission, a parameter or the account; permanent until that is fixed.
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
# The same, even if the message mentions capacity.
_RIGHTS_CODES: Final = frozenset({"AccessDenied", "AccessDeniedException", "BlockedException"})
# The provider's machines have no CPU, MEMORY or GPU left.
_RESOURCE: Final = "RESOURCE:"
_ON_MACHINE: Final = frozenset({WorkerStatus.RUNNING, WorkerStatus.HUNG, WorkerStatus.STOPPING})
# EMPTY CAPACITY PROVIDER: no instance type of the provider is large enough for the task.
_OUR_WORDS = re.compile(r"\b(EMPTY CAPACITY PROVIDER|ATTRIBUTE|INACTIVE|MISSING)\b")


def is_shortage(words: str) -> bool:
    """Return whether a message reports a shortage, which passes with time."""
    return bool(_SHORTAGE.search(words))


def exceeds_machines(words: str, workers: Iterable[Worker]) -> bool:
    """Return whether a start failed because a worker is larger than a machine of its provider.

    ECS reports `RESOURCE:…` if a machine has no room. If no other worker of the fleet uses one, the
    machine is empty, and another machine of its type has no more.
    """
    return _RESOURCE in words and not any(worker.status in _ON_MACHINE for worker in workers)


def classify_refusal(words: str, code: str = "") -> NotStarted | None:
    """Return the error that AWS's response to a start means; None if unknown."""
    if code in _THROTTLED_CODES:
        return NotStarted(words)
    if code in _SHORTAGE_CODES or (is_shortage(words) and code not in _RIGHTS_CODES):
        return NoCapacity(words)
    if code in _OUR_CODES | _RIGHTS_CODES or _OUR_WORDS.search(words):
        return StartRefused(words)
    return None
