"""Deployments in AWS's other partitions, GovCloud's and China's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.compute.kinds import TWO
from tests.infra.conftest import templates_of
from tests.infra.reading import lint
from tests.long_parameters import with_long

if TYPE_CHECKING:
    from aws_cdk import App

REGIONS = {
    "us-gov-west-1": ("aws-us-gov", "amazonaws.com"),
    "cn-north-1": ("aws-cn", "amazonaws.com.cn"),
}
MODES: dict[str, dict[str, Any]] = {
    "managed": TWO,
    "groups, isolated": TWO
    | {"compute": "asg", "network": {"kind": "isolated", "internet": True}, "spot": True},
    "jobs, isolated": TWO | {"compute": "sagemaker", "network": "isolated"},
}
# Services sign in by one name everywhere.
PRINCIPAL = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)?\.amazonaws\.com")
HOST = re.compile(r"amazonaws\.com(?:\.cn)?")


@pytest.mark.parametrize("region", with_long([*REGIONS][:1], [*REGIONS][1:]))
@pytest.mark.parametrize("mode", MODES)
def test_a_deployment_names_nothing_of_another_partition(
    make_app: Callable[..., App], mode: str, region: str
) -> None:
    """There is no foreign ARN or host, and no resource that the region lacks."""
    from aws_cdk import Environment

    partition, suffix = REGIONS[region]
    env = Environment(account="111122223333", region=region)
    templates = templates_of(make_app(MODES[mode], env))
    assert set(templates) == {"Data", "Api", "Compute"}
    for name, template in templates.items():
        strings = texts(template, {"AWS::Partition": partition, "AWS::URLSuffix": suffix})
        foreign = [
            text
            for text in strings
            if set(re.findall(r"\barn:([a-z-]*)", text)) - {partition}
            or (set(HOST.findall(text)) - {suffix} and not PRINCIPAL.fullmatch(text))
        ]
        assert foreign == [], name
    # Of what is made the same in all modes tests/infra/test_modes.py lints enough.
    found = lint(json.dumps(templates["Compute"]), region)
    assert [match.message for match in found if match.rule.id == "E3006"] == []


def texts(value: Any, pseudo: Mapping[str, str]) -> Iterator[str]:
    """Yield every text of a template; parts that are joined are one."""
    match value:
        case {"Fn::Join": [str(separator), [*parts]]}:
            words = (
                pseudo.get(part.get("Ref"), "…") if isinstance(part, dict) else part
                for part in parts
            )
            yield separator.join(words)
            yield from texts([part for part in parts if isinstance(part, dict)], pseudo)
        case str():
            yield value
        case dict():
            for key, inner in value.items():
                yield from (key, *texts(inner, pseudo))
        case list():
            for inner in value:
                yield from texts(inner, pseudo)
