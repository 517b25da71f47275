"""Every mode of a deployment passes cdk-nag and cfn-lint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.infra.conftest import Synth, key_of
from tests.infra.modes import KEYS, few_modes, modes
from tests.infra.reading import lint

if TYPE_CHECKING:
    from infra.nag_exceptions import Acknowledgement

# W3005 (dependency already enforced): CDK has each function wait for all of its role, which does no
# harm. W3010 (hard-coded zone): a configuration names zones.
LEFT_UNHEEDED = {"W3005", "W3010"}


# `make test` has each value in some template, `make test-all` each pair of values.
CHOSEN = [
    pytest.param(name, marks=() if name in few_modes() else pytest.mark.long) for name in modes()
]


@pytest.mark.parametrize("mode", CHOSEN)
def test_templates_of_a_mode_pass_the_checks(synth: Synth, mode: str) -> None:
    """A finding of cdk-nag raises an error; cfn-lint's are listed."""
    findings = {
        stack: sentences
        for stack, template in synth(modes()[mode], is_checked=True).items()
        if (sentences := linted(json.dumps(template, sort_keys=True)))
    }
    assert findings == {}


@pytest.mark.long
def test_templates_pass_the_rules_of_the_cdk() -> None:
    """A separate process has the rules enabled, as a deployment does."""
    wanted = f"{test_templates_of_a_mode_pass_the_checks.__name__}[as it is]"
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", f"{__file__}::{wanted}"]
    environment = {**os.environ, "CDK_VALIDATION": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_no_acknowledgement_is_idle(
    synth: Synth, acknowledged: dict[str, set[Acknowledgement]]
) -> None:
    """Every line of the table is needed in some mode."""
    from infra.nag_exceptions import ACKNOWLEDGED

    used = set()
    for overrides in modes().values():
        synth(overrides, is_checked=True)
        used |= acknowledged[key_of(overrides)]
    assert [line for line in ACKNOWLEDGED if line not in used] == []


def test_every_value_is_in_some_mode() -> None:
    """A value that no configuration can have would be checked by nothing."""
    covered = set(", ".join(modes()).split(", "))
    first = {next(iter(values)) for values in KEYS.values()}
    assert {value for values in KEYS.values() for value in values} <= covered | first
    assert len(modes()) < sum(map(len, KEYS.values()))


@cache
def linted(template: str) -> tuple[str, ...]:
    """Return what cfn-lint says of a template; most modes share some."""
    return tuple(
        f"{match.rule.id} {match.message} {match.path}"
        for match in lint(template, "us-east-1")
        if match.rule.id not in LEFT_UNHEEDED
    )


def test_cfn_lint_finds_a_fault() -> None:
    """A template with a queue of an impossible kind is not clean."""
    queue = {"Type": "AWS::SQS::Queue", "Properties": {"VisibilityTimeout": "soon"}}
    matches = lint(json.dumps({"Resources": {"Queue": queue}}), "us-east-1")
    assert [match.rule.id for match in matches] == ["E3012"]
