"""Fleet plans of a deployment, read from parameters."""

from __future__ import annotations

import boto3
import pytest
from moto import mock_aws

from tidemill.batch.fleet import FleetPlan
from tidemill.handler.aws.parameters import FleetPlans, plan_text
from tidemill.handler.aws.sync import Aws


@pytest.mark.parametrize("count", [0, 1, 23])
def test_plans_are_read_page_by_page(count: int) -> None:
    """All parameters below the path are read, and no others."""
    plans = [
        FleetPlan(f"m{n}", "ecs", f"r:{n}", n, 60, means={"a": [n]}) for n in range(1, count + 1)
    ]
    with mock_aws():
        ssm = boto3.client("ssm", region_name="us-east-1")
        for plan in plans:
            ssm.put_parameter(
                Name=f"/mill/fleets/{plan.model}", Value=plan_text(plan), Type="String"
            )
        ssm.put_parameter(Name="/mill/other", Value="x", Type="String")
        aws = Aws(lambda service, **options: boto3.client(service, "us-east-1", **options))
        found = aws.run(FleetPlans("/mill/fleets").read())
    assert found == {plan.model: plan for plan in plans}


def test_without_a_path_no_parameter_is_read() -> None:
    """A deployment that starts no workers needs no permission to read parameters."""
    with pytest.raises(StopIteration) as ended:
        next(FleetPlans("").read())
    assert ended.value.value == {}
