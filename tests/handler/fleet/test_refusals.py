"""Refusals of AWS, in the words and codes of its documents."""

from __future__ import annotations

import pytest

from tidemill.batch.fleet import Worker, WorkerStatus
from tidemill.handler.fleet.launcher import NoCapacity, NotStarted, StartRefused
from tidemill.handler.fleet.refusals import classify_refusal, exceeds_machines

DENIED = "User is not authorized to perform: iam:PassRole"


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        ("", "RESOURCE:GPU", NoCapacity),
        ("", "NO ACTIVE INSTANCES", NoCapacity),
        ("", "AGENT", NoCapacity),
        ("ClientException", "Capacity is unavailable at this time.", NoCapacity),
        ("ClientException", "You've reached the limit on the number of vCPUs", NoCapacity),
        ("ThrottlingException", "Rate exceeded", NotStarted),
        ("RequestLimitExceeded", "Request limit exceeded", NotStarted),
        ("ResourceLimitExceeded", "ml.g6.xlarge for training job usage is 0", NoCapacity),
        ("", "EMPTY CAPACITY PROVIDER", StartRefused),
        ("", "ATTRIBUTE", StartRefused),
        ("AccessDeniedException", DENIED, StartRefused),
        ("ClientException", "The specified capacity provider was not found.", StartRefused),
        ("InvalidParameterException", "TaskDefinition is inactive", StartRefused),
        ("InvalidParameterException", "capacity-provider/gpus is not ACTIVE", StartRefused),
        ("AccessDeniedException", "assumed-role/capacity-quota is not authorized", StartRefused),
        ("ValidationException", "Could not assume role", StartRefused),
        ("BlockedException", "Your account is blocked", StartRefused),
        ("ServerException", "Service Unavailable", type(None)),
        ("", "SOMETHING NEW", type(None)),
    ],
)
def test_a_refusal_is_known_by_its_code_and_words(
    code: str, words: str, kind: type[NotStarted | None]
) -> None:
    """A shortage first: it may come under the code of a mistake."""
    assert type(classify_refusal(f"ECS started no task: {words}", code)) is kind


@pytest.mark.parametrize(
    ("words", "statuses", "is_too_large"),
    [
        ("TaskFailedToStart: RESOURCE:MEMORY", [], True),
        ("ECS started no task: RESOURCE:GPU", [WorkerStatus.STARTING], True),
        ("ECS started no task: RESOURCE:GPU", [WorkerStatus.RUNNING], False),
        ("ECS started no task: RESOURCE:GPU", [WorkerStatus.STOPPING], False),
        ("ECS started no task: AGENT", [], False),
    ],
)
def test_a_worker_is_too_large_if_an_empty_machine_has_no_room(
    words: str,
    statuses: list[WorkerStatus],
    is_too_large: bool,  # noqa: FBT001
) -> None:
    """AWS's document explains `RESOURCE:` by a task larger than the instances of the provider."""
    workers = [Worker(f"w{n}", "r1", status) for n, status in enumerate(statuses)]
    assert exceeds_machines(words, workers) is is_too_large
