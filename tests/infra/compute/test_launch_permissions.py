"""Rights to start workers of many models: as AWS has room for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.infra.compute.kinds import Compute
from tests.infra.conftest import Synth

# A dozen, as docs/reference/configuration.md says of one deployment.
MODELS = [
    {"name": f"org/Model-{n}-8B", "gpu": "l4", "weights": f"s3://weights/{n}"} for n in range(12)
]
MAX_ATTACHED, MAX_OF_POLICY, MAX_OWN = 10, 6144, 10_240
# What CloudFormation puts in the place of a reference, at its longest.
ARN = "arn:aws:iam::111122223333:role/" + "-" * 64


@pytest.mark.parametrize("compute", ["managed-instances", "sagemaker"])
def test_policies_of_a_dozen_models_are_taken(synth: Synth, compute: str) -> None:
    """AWS counts the characters: those of each that is attached, and those of a role's own."""
    made = Compute(synth({"models": MODELS, "compute": compute}))
    launching = raw(made, "Compute", "AWS::IAM::ManagedPolicy")
    assert 1 < len(launching) <= MAX_ATTACHED
    for policy in launching:
        assert length(policy["PolicyDocument"]) <= MAX_OF_POLICY
    for role in ("ControlRole", "IntakeRole", "ReaperRole"):
        policies = [
            *raw(made, "Api", "AWS::IAM::Policy"),
            *raw(made, "Compute", "AWS::IAM::Policy"),
        ]
        own = [policy for policy in policies if role in json.dumps(policy["Roles"])]
        assert own
        assert sum(length(policy["PolicyDocument"]) for policy in own) <= MAX_OWN
    passed = {
        grant.resource for grant in made.grants("ControlRole") if grant.action == "iam:PassRole"
    }
    assert len(passed) == len(MODELS) * (2 if compute == "managed-instances" else 1)


def raw(made: Compute, stack: str, kind: str) -> list[dict[str, Any]]:
    """Return the policies of a kind in a stack, with references as they are."""
    return [
        resource["Properties"]
        for resource in made.templates[stack]["Resources"].values()
        if resource["Type"] == kind
    ]


def length(document: Any) -> int:
    """Return how long a policy is once its references are resolved."""
    return len(json.dumps(resolved(document), separators=(",", ":")))


def resolved(value: Any) -> Any:
    """Return a value with something long for each reference."""
    match value:
        case {"Ref": str(name)} if name.startswith("AWS::"):
            return "ap-southeast-2"
        case {"Ref": _} | {"Fn::GetAtt": _} | {"Fn::ImportValue": _}:
            return ARN
        case {"Fn::Join": [separator, parts]}:
            return separator.join(resolved(part) for part in parts)
        case dict():
            return {key: resolved(inner) for key, inner in value.items()}
        case list():
            return [resolved(inner) for inner in value]
    return value
