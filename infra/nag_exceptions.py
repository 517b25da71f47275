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
    """A rule that does not hold for the constructs at some paths, and the reason.

    `path` and `finding` are patterns (`*` stands for anything). `finding` is what the rule has
    found of several things, in brackets behind the rule's name; a `[*]` in it is a real asterisk.
    """

    rule: str
    path: str
    reason: str
    finding: str = ""

    def covers(self, found: str, path: str) -> bool:
        """Return whether this speaks of what was found (`rule` or `rule[finding]`) at a path."""
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
        "Only this deployment's roles come to the bucket, and the table says what they did with "
        "it; a log line for each part would cost more than the parts.",
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
            (f"Compute/Worker-*/{_INLINE}", ("input", "files", "work", "results")),
            ("Data/Policies/Worker-*", ("input", "files", "work", "results")),
        )
        for prefix in prefixes
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Api/*/Role/DefaultPolicy",
        "X-Ray knows no resources for the segments that a function sends.",
        finding="Resource::[*]",
    ),
    Acknowledgement(
        "AwsSolutions-L1",
        "Api/*/Function",
        "Functions run on one version of Python, for which every library of theirs has wheels.",
    ),
    Acknowledgement(
        "AwsSolutions-APIG4",
        "Api/Http/Api/*--health",
        "A health check has no key; the answer says that the API is up and nothing else.",
    ),
    Acknowledgement(
        "AwsSolutions-APIG4",
        "Api/Http/Api/*--openapi.json",
        "What the API can do is the same for everybody, and no secret.",
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
        "The function looks at keys itself, before anything else: the gateway's refusals have a "
        "form that OpenAI's clients do not read.",
    ),
    *(
        Acknowledgement(
            rule,
            "Api/Private/*",
            "A REST API writes logs by one role of the whole account, which is not this "
            "deployment's to set; the function logs every request.",
        )
        for rule in ("AwsSolutions-APIG1", "AwsSolutions-APIG6")
    ),
    *(
        Acknowledgement(
            rule,
            "Api/Private/Method*",
            "The function looks at keys and tokens itself, before anything else; where requests "
            "are signed, only pages are not, which are the same for everybody.",
        )
        for rule in ("AwsSolutions-APIG4", "AwsSolutions-COG4")
    ),
    Acknowledgement(
        "AwsSolutions-APIG2",
        "Api/Private/Api",
        "The function checks what it is sent, and says what is wrong in the form of OpenAI's API.",
    ),
    Acknowledgement(
        "AwsSolutions-APIG3",
        "Api/Private/*",
        "Only what comes through endpoints of the organisation's own VPCs gets to a private API.",
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            policy,
            "Who drops weights under the prefix of a model names the files; no others are read.",
            finding="Resource::arn:*:s3:::*/[*]",
        )
        for policy in ("Compute/Worker-*/Role/DefaultPolicy", "Data/Policies/Worker-*")
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Worker-*/ExecutionRole/DefaultPolicy",
        "ecr:GetAuthorizationToken, which a pull of the image begins with, knows no resources.",
        finding="Resource::[*]",
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Machines/Role/DefaultPolicy",
        "A machine gets its id when it joins the cluster, which is the only one that it may join.",
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
        "What ECS needs to make and end machines is its own affair, and grows with it; this role "
        "is for ECS alone.",
        finding="Policy::*/AmazonECSInfrastructureRolePolicyForManagedInstances",
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            "Compute/Launching/Policy*",
            "Tasks and revisions of their definitions get their names when they come to be: those "
            "of this cluster, and of its models, are reached.",
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
            "What SageMaker does for a job (its image, its log, its interfaces) has names that "
            "come to be with it, or knows no resources.",
            finding=f"Resource::{finding}",
        )
        for finding in ("[*]", "arn:*:logs:*:log-stream:[*]", "arn:*:ec2:*:network-interface/[*]")
    ),
    *(
        Acknowledgement(
            "AwsSolutions-IAM5",
            "Compute/Worker-*/Role/DefaultPolicy",
            "An existing VPC may be another account's, which shares it: its ids say which one.",
            finding=f"Resource::arn:*:ec2:*:[*]:{kind}/*",
        )
        for kind in ("subnet", "security-group")
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Launching/Policy*",
        "A job gets its name when it is started; those of others begin otherwise.",
        finding="Resource::arn:*:sagemaker:*:training-job/tidemill-[*]",
    ),
    Acknowledgement(
        "AwsSolutions-IAM5",
        "Compute/Launching/Policy*",
        "Lists of tasks and of jobs know no resources; a condition on the first names the cluster.",
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
        "Nothing comes in, and what workers reach is AWS, or hosts that lines name: a log of flows "
        "would tell less than the logs of what they reach.",
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
        "The launch template encrypts its disk; the rule does not look where a group of mixed "
        "instances names its template.",
    ),
)


class Checks(AwsSolutionsChecks):
    """The rules of cdk-nag less what a table acknowledges; `used` are the lines that did so."""

    def __init__(self, app: App, acknowledged: Iterable[Acknowledgement]) -> None:
        super().__init__(app)
        self._acknowledged = tuple(acknowledged)
        self.used: set[Acknowledgement] = set()

    def validate(self, context: IPolicyValidationContext) -> PolicyValidationPluginReport:
        """Return the findings that nothing acknowledges."""
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
    """Have synth fail for every finding that the table does not acknowledge."""
    checks = Checks(app, acknowledged)
    Validations.of(app).add_plugins(checks)
    return checks
