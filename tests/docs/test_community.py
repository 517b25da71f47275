"""The workflow runs what CI runs, and the forms of issues are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tools.docs_report import ROOT

GITHUB = ROOT / ".github"


def test_the_workflow_calls_the_script_of_ci() -> None:
    """Its steps install Python and Node.js; the script does everything else."""
    workflow = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text(encoding="utf-8"))
    [job] = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci/run").exists()


@pytest.mark.parametrize(
    "form", sorted(GITHUB.glob("ISSUE_TEMPLATE/[!c]*.yml")), ids=lambda form: form.stem
)
def test_a_form_has_a_name_and_fields_with_labels(form: Path) -> None:
    """GitHub shows no form that lacks one of these."""
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert content["name"]
    assert content["description"]
    ids = [field["id"] for field in content["body"]]
    assert len(ids) == len(set(ids)) >= 3
    assert all(field["attributes"]["label"] for field in content["body"])
