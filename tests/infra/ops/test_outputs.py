"""Outputs of a deployment, also of one that is half created or half deleted."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.ops.outputs import NotDeployed, read_outputs

DATA = {
    "BucketName": "b",
    "TableName": "t",
    "ControlQueueUrl": "c",
    "IntakeQueueUrl": "i",
    "DropsQueueUrl": "d",
    "FleetsPath": "/f",
    "WorkQueueUrls": "{}",
    "EventBusName": "e",
}


class Stacks:
    """CloudFormation with these outputs of each stack."""

    def __init__(self, **outputs: dict[str, str]) -> None:
        self.outputs = outputs

    def describe_stacks(self, StackName: str) -> dict[str, Any]:  # noqa: N803 - AWS's name
        """Return a stack, or refuse as AWS does."""
        if (found := self.outputs.get(StackName.removeprefix("mill-"))) is None:
            error = {"Error": {"Code": "ValidationError", "Message": "does not exist"}}
            raise ClientError(error, "DescribeStacks")
        outputs = [{"OutputKey": key, "OutputValue": value} for key, value in found.items()]
        status = "UPDATE_COMPLETE" if outputs else "ROLLBACK_COMPLETE"
        return {"Stacks": [{"StackStatus": status, "Outputs": outputs}]}


@pytest.mark.parametrize(
    "stacks", [Stacks(data=DATA), Stacks(data=DATA, api={})], ids=["none", "rolled back"]
)
def test_what_is_half_there_can_be_taken_down(stacks: Stacks) -> None:
    """Its API is the first to go and the last to come; callers get the error that it is missing."""
    outputs = read_outputs(stacks, "mill", needs_api=False)
    assert (outputs.fleets, outputs.api_url) == ("/f", "")
    with pytest.raises(NotDeployed, match="stack mill-api"):
        read_outputs(stacks, "mill")


def test_an_older_deployment_can_be_taken_down() -> None:
    """It has one queue for uploads and all else."""
    older = {key: value for key, value in DATA.items() if key != "DropsQueueUrl"}
    assert read_outputs(Stacks(data=older), "mill", needs_api=False).drops_queue == "c"


def test_a_stack_that_was_rolled_back_is_named() -> None:
    """It exists without outputs: the error is one sentence."""
    with pytest.raises(
        NotDeployed, match=r"mill-data \(ROLLBACK_COMPLETE\) has no output FleetsPath"
    ):
        read_outputs(Stacks(data={}), "mill", needs_api=False)


def test_a_deployment_without_an_api_is_reported() -> None:
    """Commands that need one fail; the others continue."""
    stacks = Stacks(data=DATA, api={"NoApi": 'api = "none"'})
    with pytest.raises(NotDeployed, match='mill-api has no API, which is required: api = "none"'):
        read_outputs(stacks, "mill")
    assert read_outputs(stacks, "mill", needs_api=False).api_url == ""
