"""ECS and SageMaker as launchers use them: they remember tokens and names, as AWS does.

Each call is first validated by botocore's own description of the services: names, types, and,
stricter than botocore itself, lengths, patterns and enums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from botocore.loaders import Loader
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator

from tidemill.handler.aws.calls import Call, Operation, T
from tidemill.handler.errors import AwsError

_PAGE = 100


@cache
def _model(service: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(service, "service-2"))


def check(call: Call) -> None:
    """Raise what is wrong with a request."""
    name = "".join(word.capitalize() for word in call.method.split("_"))
    shape = _model(call.service).operation_model(name).input_shape
    assert shape is not None
    report = ParamValidator().validate(call.arguments, shape)
    assert not report.has_errors(), report.generate_report()
    _check_limits(call.arguments, shape, name)


def _check_limits(value: Any, shape: Shape, where: str) -> None:
    limits = shape.metadata
    if isinstance(shape, StructureShape):
        for name, inner in value.items():
            _check_limits(inner, shape.members[name], f"{where}.{name}")
    elif isinstance(shape, ListShape | MapShape):
        each = shape.member if isinstance(shape, ListShape) else shape.value
        for inner in value if isinstance(shape, ListShape) else value.values():
            _check_limits(inner, each, where)
    if isinstance(shape, StringShape):
        assert value in (limits.get("enum") or [value]), where
        pattern = limits.get("pattern", ".*").replace(r"\p{L}\p{Z}\p{N}", r"\w\s")
        assert re.fullmatch(pattern, value, re.DOTALL), (where, value)
    size = value if isinstance(value, int) else len(value)
    assert size <= limits.get("max", size), (where, value)


@dataclass
class Services:
    """Both services. ECS has `machines`, SageMaker a quota of each instance type (else none)."""

    machines: int = 1000
    quotas: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    failure: str = ""

    def answer(self, call: Call) -> dict[str, Any]:
        """Perform a call; raises AwsError as AWS would."""
        check(call)
        self.calls.append(call)
        if self.failure:
            raise AwsError(f"{call.method}: {self.failure}", aws_code=self.failure)
        made: dict[str, Any] = getattr(self, call.method)(**call.arguments)
        return made

    def run(self, operation: Operation[T]) -> T:
        """Run an operation that calls no other service."""
        try:
            call = next(operation)
            while True:
                try:
                    made = self.answer(call)
                except AwsError as exc:
                    call = operation.throw(exc)
                else:
                    call = operation.send(made)
        except StopIteration as stopped:
            result: T = stopped.value
            return result

    # ECS

    def run_task(self, **request: Any) -> dict[str, Any]:
        """Run a task, or return the one that this token has run."""
        token = request["clientToken"]
        assert re.fullmatch(r"[\x21-\x7e]{1,64}", token)
        assert re.fullmatch(r"[A-Za-z0-9/_-]{1,128}", request["startedBy"])
        if token in self.tokens:
            known, arn = self.tokens[token]
            if known != request:
                raise AwsError("another request", aws_code="ConflictException")
            return {"tasks": [self.tasks[arn]], "failures": []}
        running = [each for each in self.tasks.values() if each["lastStatus"] != "STOPPED"]
        if len(running) >= self.machines:
            return {"tasks": [], "failures": [{"reason": "RESOURCE:GPU"}, {"arn": "i-1"}]}
        arn = f"arn:aws:ecs:eu-west-1:1:task/{request['cluster']}/{len(self.tasks):032x}"
        self.tokens[token] = request, arn
        self.tasks[arn] = {
            "taskArn": arn,
            "taskDefinitionArn": request["taskDefinition"],
            "startedBy": request["startedBy"],
            "lastStatus": "PROVISIONING",
            "desiredStatus": "RUNNING",
            "createdAt": datetime.fromtimestamp(1000, UTC),
        }
        return {"tasks": [self.tasks[arn]], "failures": []}

    def list_tasks(self, **request: Any) -> dict[str, Any]:
        """Return the names of tasks, by the one filter that goes with no other, or by family."""
        if "startedBy" in request:
            assert not {"family", "desiredStatus"} & set(request)
        found = [
            arn
            for arn, task in self.tasks.items()
            if task["desiredStatus"] == request.get("desiredStatus", "RUNNING")
            and task["startedBy"] == request.get("startedBy", task["startedBy"])
            and f"/{request.get('family', '')}" in task["taskDefinitionArn"]
            and request.get("containerInstance") in {None, task.get("containerInstanceArn")}
        ]
        return _paged("taskArns", found, request.get("nextToken"), "nextToken")

    def describe_tasks(self, **request: Any) -> dict[str, Any]:
        """Return tasks, a hundred at most; ECS forgets those that have ended."""
        assert len(request["tasks"]) <= _PAGE
        return {"tasks": [self.tasks[arn] for arn in request["tasks"] if arn in self.tasks]}

    def stop_task(self, **request: Any) -> dict[str, Any]:
        """Let a task stop."""
        self.tasks[request["task"]]["desiredStatus"] = "STOPPED"
        return {}

    # SageMaker

    def create_training_job(self, **request: Any) -> dict[str, Any]:
        """Create a job, whose name has never been used."""
        name, kind = request["TrainingJobName"], request["ResourceConfig"]["InstanceType"]
        if name in self.jobs:
            raise AwsError("Training job names must be unique", aws_code="ResourceInUse")
        of_kind = [each for each in self.jobs.values() if each["kind"] == kind]
        if len(of_kind) >= self.quotas.get(kind, 0):
            raise AwsError(f"The limit for {kind} is 0", aws_code="ResourceLimitExceeded")
        created = datetime.fromtimestamp(1000, UTC)
        self.jobs[name] = {
            "TrainingJobName": name,
            "TrainingJobStatus": "InProgress",
            "CreationTime": created,
            "kind": kind,
        }
        return {"TrainingJobArn": f"arn:{name}"}

    def list_training_jobs(self, **request: Any) -> dict[str, Any]:
        """Return jobs by a part of their name and their status."""
        found = [
            job
            for name, job in self.jobs.items()
            if request["NameContains"] in name
            and job["TrainingJobStatus"] == request["StatusEquals"]
        ]
        return _paged("TrainingJobSummaries", found, request.get("NextToken"), "NextToken")

    def stop_training_job(self, **request: Any) -> dict[str, Any]:
        """Let a job stop that runs."""
        job = self.jobs[request["TrainingJobName"]]
        if job["TrainingJobStatus"] != "InProgress":
            raise AwsError("The request was rejected", aws_code="ValidationException")
        job["TrainingJobStatus"] = "Stopping"
        return {}


def _paged(name: str, found: list[Any], token: str | None, more: str) -> dict[str, Any]:
    first = int(token or 0)
    rest = {more: str(first + _PAGE)} if len(found) > first + _PAGE else {}
    return {name: found[first : first + _PAGE], **rest}
