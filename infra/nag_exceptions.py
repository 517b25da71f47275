"""cdk-nag rules, and the findings that this project acknowledges, with reasons.

A finding that no line of the table acknowledges fails synth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from aws_cdk import (
    App,
    IPolicyValidationContext,
    PolicyValidationPluginReport,
    PolicyViolatingResource,
    PolicyViolation,
    Validations,
)
from cdk_nag import AwsSolutionsChecks


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A rule that does not apply to the constructs at some paths, and the reason.

    `path` and `finding` are patterns (`*` matches anything). `finding` is the suffix in brackets
    after the rule's name, if the rule has several findings; a `[*]` in it is a literal asterisk.
    """

    rule: str
    path: str
    reason: str
    finding: str = ""

    def covers(self, found: str, path: str) -> bool:
        """Return whether this acknowledges a finding (`rule` or `rule[finding]`) at a path."""
        rule, _, finding = found.removesuffix("]").partition("[")
        return (
            rule == self.rule
            and fnmatchcase(finding, self.finding)
            and fnmatchcase(path.removesuffix("/Resource"), self.path)
        )


_INLINE: Final = "Role/DefaultPolicy"
ACKNOWLEDGED: Final = (
    Acknowledgement(
        "AwsSolutions-S1",
        "Data/Drops/Bucket",
        "Only this deployment's roles access the bucket, and the table records their work; "
        "a log line per part would cost more than the parts.",
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            role,
            "Objects get their names while a batch runs: a role reaches those under its own "
            "prefixes.",
            finding=f"Resource::*DropsBucket*/{prefix}/[*]",
        )
        for role, prefixes in (
            (f"Api/Control/{_INLINE}", ("input", "files", "work", "output", "results")),
            (f"Api/Intake/{_INLINE}", ("input", "files", "work", "output")),
            (f"Api/Reaper/{_INLINE}", ("files", "output")),
            (f"Api/DeadLetters/{_INLINE}", ("files", "output")),
            (f"Api/Api/{_INLINE}", ("input", "files", "work", "work/uploads", "output")),
            (f"Compute/Worker-*/{_INLINE}", ("input", "files", "media", "work", "results")),
            ("Data/Policies/Worker-*", ("input", "files", "media", "work", "results")),
        )
        for prefix in prefixes
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Api/*/Role/DefaultPolicy",
        "X-Ray does not support resources for the segments that a function sends.",
        finding="Resource::[*]",
    ),
    Acknowledgement(
        "AwsSolutions-L1",
        "Api/*/Function",
        "Functions run on the one version of Python for which all their libraries have wheels.",
    ),
    Acknowledgement(
        "AwsSolutions-APIG4",
        "Api/Http/Api/*--health",
        "A health check has no key; the reply says only that the API is up.",
    ),
    Acknowledgement(
        "AwsSolutions-APIG4",
        "Api/Http/Api/*--openapi.json",
        "The API's capabilities are the same for every caller, and not secret.",
    ),
    *(
        Acknowledgement(
            "AwsSolutions-APIG4",
            f"Api/Http/Api/{method}--{route}",
            "The dashboard's page and its files are the same for every caller; it requests a "
            "tenant's data with a key.",
        )
        for route in ("", "dashboard", "dashboard--assets--{proxy+}")
        for method in ("GET", "HEAD")
    ),
    Acknowledgement(
        "AwsSolutions-APIG4",
        "Api/Http/Api/ANY--{proxy+}",
        "The function itself checks keys, before anything else: the gateway's error responses "
        "do not have OpenAI's format.",
    ),
    *(
        Acknowledgement(
            rule,
            "Api/Private/*",
            "A REST API writes logs with one role of the whole account, which this deployment must "
            "not set; the function logs every request.",
        )
        for rule in ("AwsSolutions-APIG1", "AwsSolutions-APIG6")
    ),
    *(
        Acknowledgement(
            rule,
            "Api/Private/Method*",
            "The function itself checks keys and tokens, before anything else; if requests are "
            "signed, only pages are not, which are the same for every caller.",
        )
        for rule in ("AwsSolutions-APIG4", "AwsSolutions-COG4")
    ),
    Acknowledgement(
        "AwsSolutions-APIG2",
        "Api/Private/Api",
        "The function validates requests, and reports errors in the format of OpenAI's API.",
    ),
    Acknowledgement(
        "AwsSolutions-APIG3",
        "Api/Private/*",
        "Only requests through endpoints of the organisation's own VPCs reach a private API.",
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            policy,
            "The owner of a model's weights chooses the file names; no other objects are read.",
            finding="Resource::arn:*:s3:::*/[*]",
        )
        for policy in ("Compute/Worker-*/Role/DefaultPolicy", "Data/Policies/Worker-*")
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Worker-*/ExecutionRole/DefaultPolicy",
        "ecr:GetAuthorizationToken, which starts a pull of the image, does not support resources.",
        finding="Resource::[*]",
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Machines/Role/DefaultPolicy",
        "A machine gets its ID when it joins the cluster, the only one that it may join.",
        finding="Resource::arn:*:ecs:*:container-instance/*/[*]",
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Machines/Role/DefaultPolicy",
        "ecs:DiscoverPollEndpoint, which requests an address, does not support resources.",
        finding="Resource::[*]",
    ),
    Acknowledgement(
        "AwsSolutions-IAM4",
        "Compute/Machines/Starter",
        "AWS maintains the permissions that ECS needs to start and end machines; this role "
        "is for ECS only.",
        finding="Policy::*/AmazonECSInfrastructureRolePolicyForManagedInstances",
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            "Compute/Launching/Policy*",
            "Tasks and revisions of their definitions get their names at run time: only those "
            "of this cluster, and of its models, are included.",
            finding=f"Resource::arn:*:{finding}",
        )
        for finding in (
            "ecs:*:task-definition/*:[*]",
            "ecs:*:task/*/[*]",
            "logs:*:log-group:*:log-stream:[*]",
        )
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            "Compute/Worker-*/Role/DefaultPolicy",
            "SageMaker's resources for a job (its image, its log, its interfaces) have names that "
            "are created with it, or do not support resources.",
            finding=f"Resource::{finding}",
        )
        for finding in ("[*]", "arn:*:logs:*:log-stream:[*]", "arn:*:ec2:*:network-interface/[*]")
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            "Compute/Worker-*/Role/DefaultPolicy",
            "An existing VPC may belong to another account, which shares it: its IDs identify it.",
            finding=f"Resource::arn:*:ec2:*:[*]:{kind}/*",
        )
        for kind in ("subnet", "security-group")
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Launching/Policy*",
        "A job gets its name when it is started; other jobs have other prefixes.",
        finding="Resource::arn:*:sagemaker:*:training-job/tidemill-[*]",
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Launching/Policy*",
        "Lists of tasks and jobs do not support resources; a condition names the cluster.",
        finding="Resource::[*]",
    ),
    Acknowledgement(
        "AwsSolutions-ECS4",
        "Compute/Cluster",
        "Container Insights charges per metric and reports nothing while no task runs; workers "
        "and the reaper emit the metrics that are needed.",
    ),
    Acknowledgement(
        "AwsSolutions-VPC7",
        "Compute/Network/Vpc",
        "There is no ingress, and workers reach AWS, or hosts in requests' URLs: a flow log would "
        "contain less than the logs of those services.",
    ),
    Acknowledgement(
        "AwsSolutions-ECS2",
        "Compute/Worker-*/Task",
        "The variables are names of resources and limits; a worker has no secret.",
    ),
    Acknowledgement(
        "AwsSolutions-AS3",
        "Compute/Worker-*/Group/ASG",
        "Machines come and go with every batch; an alarm reports a model that has work but no "
        "worker.",
    ),
    Acknowledgement(
        "AwsSolutions-EC26",
        "Compute/Worker-*/Group/ASG",
        "The launch template encrypts its disk; the rule does not check the template of a group "
        "with mixed instances.",
    ),
)


class Checks(AwsSolutionsChecks):
    """The rules of cdk-nag, less the acknowledged findings; `used` are the lines that matched."""

    def __init__(self, app: App, acknowledged: Iterable[Acknowledgement]) -> None:
        super().__init__(app)
        self._acknowledged = tuple(acknowledged)
        self.used: set[Acknowledgement] = set()

    def validate(self, context: IPolicyValidationContext) -> PolicyValidationPluginReport:
        """Return the findings that are not acknowledged."""
        left = list(self._left(super().validate(context).violations))
        return PolicyValidationPluginReport(success=not left, violations=left)

    def _left(self, violations: Iterable[PolicyViolation]) -> Iterator[PolicyViolation]:
        for violation in violations:
            places = [
                place
                for place in violation.violating_resources
                if not self._is_acknowledged(violation.rule_name, place)
            ]
            if places:
                yield PolicyViolation(
                    rule_name=violation.rule_name,
                    description=violation.description,
                    severity=violation.severity,
                    violating_resources=places,
                )

    def _is_acknowledged(self, found: str, place: PolicyViolatingResource) -> bool:
        lines = {
            line for line in self._acknowledged if line.covers(found, place.construct_path or "")
        }
        self.used |= lines
        return bool(lines)


def add_checks(app: App, acknowledged: Iterable[Acknowledgement] = ACKNOWLEDGED) -> Checks:
    """Make synth fail for every finding that the table does not acknowledge."""
    checks = Checks(app, acknowledged)
    Validations.of(app).add_plugins(checks)
    return checks
