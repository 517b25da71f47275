"""Records AWS's actual responses during a deployment's smoke test, as test fixtures.

A separate queue with separate rules receives worker events; both are deleted again. Everything
is redacted before it is written.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError

from infra.gpus import GPUS
from infra.ops.preflight.quotas import EC2_CODES

# Placeholders as in AWS's own documents.
ACCOUNT: Final = "111122223333"
_REDACTED: Final = "REDACTED"
_PATTERNS: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Account IDs of others, such as the owner of a machine image.
        (r"(arn:aws[a-z-]*:[^:\s]*:[^:\s]*:)[0-9]{12}(?=:)", rf"\g<1>{ACCOUNT}"),
        (r"\b[0-9]{12}(?=\.dkr\.ecr\.)", ACCOUNT),
        # Access keys, API keys, and signatures of presigned URLs.
        (r"\b(AKIA|ASIA)[A-Z0-9]{16}\b", _REDACTED),
        (r"\btm_[A-Za-z0-9_-]{8,}", _REDACTED),
        (r"(X-Amz-(?:Credential|Signature|Security-Token)=)[^&\s\"]+", rf"\g<1>{_REDACTED}"),
        (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "somebody@example.com"),
        # Addresses: IPv4, and IPv6 or those of interfaces.
        (r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.])", "192.0.2.1"),
        (r"(?<![\w:])(?:[0-9a-f]{1,4}:+){4,7}[0-9a-f]{1,4}(?![\w:])", "2001:db8::1"),
    )
)
# Names of strings that are secrets, whatever they look like.
_SECRET_NAMES: Final = re.compile(r"secret|password|authorization|session_?token", re.IGNORECASE)


def redact(value: Any, account: str) -> Any:
    """Return a JSON value without account IDs and credentials."""
    match value:
        case Mapping():
            return {
                redact(name, account): _REDACTED
                if isinstance(held, str) and _SECRET_NAMES.search(name)
                else redact(held, account)
                for name, held in value.items()
            }
        case list() | tuple():
            return [redact(each, account) for each in value]
        case datetime():
            return value.isoformat()
        case str():
            text = value.replace(account, ACCOUNT)
            for pattern, replacement in _PATTERNS:
                text = pattern.sub(replacement, text)
            return text
        case _:
            return value


# Keys by which a rule narrows its events; a recording also has those of a worker's start.
_STATES: Final = frozenset({"lastStatus", "TrainingJobStatus", "status"})
# A worker's last event arrives a little after its end.
_DRAIN_SECONDS: Final = 60.0

# A worker's log line with the durations of its start, and the log group of SageMaker jobs.
_COLD_START: Final = '{ $.message = "cold start" }'
_JOBS_LOG: Final = "/aws/sagemaker/TrainingJobs"

Client = Callable[[str], Any]


class Record:
    """Writes recorded values, one JSON file each; `account` is redacted in all of them."""

    def __init__(self, folder: Path, account: str) -> None:
        self._folder, self._account = folder, account
        self._started = time.monotonic()
        self._timings: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def note(self, sentence: str) -> None:
        """Note when an event was reported, in seconds since the start."""
        seconds = round(time.monotonic() - self._started, 1)
        self._timings.append({"seconds": seconds, "said": sentence})
        self.write("timings", self._timings)

    def write(self, name: str, value: Any) -> None:
        """Write a value as `name.json`."""
        text = json.dumps(redact(value, self._account), indent=2)
        (self._folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")

    def write_events(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Write events in order, by their kind and state."""
        numbers: Counter[str] = Counter()
        for event in sorted(found, key=lambda each: str(each.get("time"))):
            name = _name(event)
            numbers[name] += 1
            self.write(f"{name}_{numbers[name]}", event)


@contextmanager
def recording(
    folder: Path, deployment: str, client: Client, *, drain_seconds: float = _DRAIN_SECONDS
) -> Iterator[Record]:
    """Record responses within the block, even if it fails; `client` creates boto3's clients."""
    identity = client("sts").get_caller_identity()
    record = Record(folder, identity["Account"])
    record.write("quotas", account_answers(client))
    started, found = int(time.time() * 1000), list[dict[str, Any]]()
    try:
        with _worker_events(deployment, client, found, drain_seconds):
            try:
                yield record
            except Exception as exc:
                record.note(f"failed: {exc}")
                raise
    finally:
        record.write_events(found)
        record.write("cold_starts", _answer(partial(cold_starts, deployment, client, started)))


def account_answers(client: Client) -> dict[str, Any]:
    """Return an account's quotas and zones; a refusal is recorded, too."""
    quotas, ec2 = client("service-quotas"), client("ec2")
    types = [name for gpu in GPUS.values() for names in gpu.instances.values() for name in names]
    wanted: dict[str, Callable[[], Any]] = {
        code: partial(quotas.get_service_quota, ServiceCode="ec2", QuotaCode=code)
        for codes in EC2_CODES.values()
        for code in codes
    } | {
        "lambda": client("lambda").get_account_settings,
        "offerings": partial(
            ec2.describe_instance_type_offerings,
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": types}],
        ),
    }
    return {name: _answer(ask) for name, ask in wanted.items()}


def cold_starts(deployment: str, client: Client, since: int) -> dict[str, Any]:
    """Return the start events that workers logged since a time (ms), by log group."""
    logs, stack = client("logs"), f"{deployment}-compute"
    pages = client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=stack)
    groups = [
        resource["PhysicalResourceId"]
        for page in pages
        for resource in page["StackResourceSummaries"]
        if resource["ResourceType"] == "AWS::Logs::LogGroup"
    ]
    found: dict[str, Any] = {}
    for group in groups or [_JOBS_LOG]:
        pages = logs.get_paginator("filter_log_events").paginate(
            logGroupName=group, startTime=since, filterPattern=_COLD_START
        )
        lines = [json.loads(event["message"]) for page in pages for event in page["events"]]
        # Emulators know fewer patterns.
        found[group] = [line for line in lines if line.get("message") == "cold start"]
    return found


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        response = ask()
    except ClientError as exc:
        return exc.response.get("Error")
    except BotoCoreError as exc:
        return str(exc)
    return {name: held for name, held in response.items() if name != "ResponseMetadata"}


@contextmanager
def _worker_events(
    deployment: str, client: Client, found: list[dict[str, Any]], drain_seconds: float
) -> Iterator[None]:
    """Add the events of workers to a list when the block is left."""
    events, sqs = client("events"), client("sqs")
    name = f"{deployment}-record-{uuid4().hex[:8]}"
    patterns = list(_patterns(deployment, events))
    rules = [f"{name}-{number}" for number in range(1, len(patterns) + 1)]
    url = sqs.create_queue(QueueName=name)["QueueUrl"]
    try:
        attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        arn = attributes["Attributes"]["QueueArn"]
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": _policy(arn)})
        for rule, pattern in zip(rules, patterns, strict=True):
            events.put_rule(Name=rule, EventPattern=json.dumps(pattern))
            events.put_targets(Rule=rule, Targets=[{"Id": "record", "Arn": arn}])
        try:
            yield
        finally:
            found += _drain(sqs, url, drain_seconds)
    finally:
        for rule in rules:
            _answer(partial(events.remove_targets, Rule=rule, Ids=["record"]))
            _answer(partial(events.delete_rule, Name=rule))
        sqs.delete_queue(QueueUrl=url)


def _patterns(deployment: str, events: Any) -> Iterator[dict[str, Any]]:
    """Yield the patterns of the deployment's own rules, for workers in every state."""
    for rule in events.list_rules(NamePrefix=f"{deployment}-ends-")["Rules"]:
        pattern = json.loads(rule["EventPattern"])
        detail = {key: held for key, held in pattern["detail"].items() if key not in _STATES}
        yield pattern | {"detail": detail}


def _policy(queue: str) -> str:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": queue,
        "Condition": {"StringEquals": {"aws:SourceAccount": queue.split(":")[4]}},
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _drain(sqs: Any, url: str, seconds: float) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        request = {"QueueUrl": url, "MaxNumberOfMessages": 10, "WaitTimeSeconds": 1}
        for message in sqs.receive_message(**request).get("Messages", ()):
            yield json.loads(message["Body"])
            sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])


def _name(event: Mapping[str, Any]) -> str:
    """Return the name of a fixture: `ecs_task_stopped` for a task's state change."""
    detail = event.get("detail", {})
    kind = str(event.get("detail-type", "event")).removesuffix(" State Change")
    state = detail.get("lastStatus") or detail.get("TrainingJobStatus") or detail.get("status", "")
    return re.sub(r"[^a-z0-9]+", "_", f"{kind} {state}".lower()).strip("_")
