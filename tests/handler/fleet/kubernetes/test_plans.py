"""A file of plans becomes fleet plans, or sentences that name each key that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.handler.fleet.kubernetes.rig import plan_of
from tidemill.batch.fleet import FleetPlan
from tidemill.handler.fleet.kubernetes.plans import PlansRefused, read_plans
from tidemill.handler.settings import read_settings

PAGE = Path(__file__).parents[4] / "docs/integrations/kubernetes.md"
ENVIRONMENT = {
    "TIDEMILL_TABLE": "batches",
    "TIDEMILL_BUCKET": "drops",
    "TIDEMILL_CONTROL_QUEUE": "https://sqs/control",
    "TIDEMILL_WORK_QUEUES": '{"org/Big": "https://sqs/big", "small": "https://sqs/small"}',
    "TIDEMILL_MODEL_ALIASES": '{"gpt-4o": "org/Big", "*": "small"}',
    "TIDEMILL_REUSE": "1",
    "AWS_REGION": "eu-west-1",
    "AWS_ENDPOINT_URL_SQS": "https://vpce-1",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "TIDEMILL_FLEETS": "/not/read",
    "TIDEMILL_HEALTH_FILE": "/run/of-the-launcher",
    "PATH": "/bin",
}


def read(folder: Path, found: Any, **variables: str) -> dict[str, FleetPlan]:
    """Return the plans of a file that has this in it."""
    path = folder / "plans.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    environment = ENVIRONMENT | variables
    return read_plans(path, read_settings(environment), "llm", environment)


def test_a_plan_has_its_defaults(tmp_path: Path) -> None:
    """An image is enough."""
    [plan] = read(tmp_path, {"small": {"means": {"image": "tidemill:1"}}}).values()
    assert (plan.launcher, plan.max_workers, plan.min_workers) == ("kubernetes", 1, 0)
    assert (plan.target_seconds, plan.start_seconds) == (3600, 300)
    assert plan.means["gpus"] == 1


def test_workers_get_the_command_that_serves_their_model(tmp_path: Path) -> None:
    """They serve all its names, end when idle unless reserved, and use a GPU or none at all."""
    big = plan_of(
        min_workers=2, min_workers_hours="Mon 07:00-18:00", idle_seconds=60, args=["--model", "m"]
    )
    plans = read(tmp_path, {"org/Big": big, "small": plan_of(gpus=0)})
    assert plans["org/Big"].means["args"] == [
        *("worker", "--served-model-name", "org/Big", "gpt-4o", "--exit-when-idle", "60"),
        *("--min-workers", "2", "--min-workers-hours", "Mon 07:00-18:00", "--device", "cuda"),
        *("--model", "m"),
    ]
    assert "--device" not in plans["small"].means["args"]


def test_workers_get_what_names_the_deployment_and_nothing_else(tmp_path: Path) -> None:
    """No key, nothing of another model, nothing of the launcher's own; a plan's word wins."""
    plan = plan_of(environment={"HF_HUB_OFFLINE": "1", "TIDEMILL_BUCKET": "other"})
    [made] = read(tmp_path, {"small": plan}).values()
    assert made.means["environment"] == {
        "TIDEMILL_TABLE": "batches",
        "TIDEMILL_BUCKET": "other",
        "TIDEMILL_CONTROL_QUEUE": "https://sqs/control",
        "TIDEMILL_WORK_QUEUES": '{"small": "https://sqs/small"}',
        "TIDEMILL_MODEL_ALIASES": '{"*": "small"}',
        "TIDEMILL_MODEL_ADAPTERS": "{}",
        "TIDEMILL_GPU_HOUR_PRICES": "{}",
        "TIDEMILL_REUSE": "1",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL_SQS": "https://vpce-1",
        "HF_HUB_OFFLINE": "1",
    }


def test_a_release_is_what_a_pod_is_made_of(tmp_path: Path) -> None:
    """Another image or argument is one; another count of workers, or another model, is none."""

    def release(found: dict[str, Any], **variables: str) -> str:
        return read(tmp_path, found, **variables)["small"].release

    first = release({"small": plan_of()})
    assert release({"small": plan_of(max_workers=9), "org/Big": plan_of()}) == first
    more = '{"small": "https://sqs/small", "new": "https://sqs/new"}'
    assert release({"small": plan_of()}, TIDEMILL_WORK_QUEUES=more) == first
    for changes in ({"image": "tidemill:2"}, {"args": ["--x"]}, {"gpus": 2}, {"idle_seconds": 9}):
        assert release({"small": plan_of(**changes)}) != first


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ("{", "plans.json: is not JSON: "),
        ([], "plans.json: is []: Input should be an object"),
        ({"small": {}}, "plans.json: small.means is required"),
        ({"small": plan_of(max_workers="2")}, "plans.json: small.max_workers is '2': "),
        ({"small": plan_of(max_workers=0)}, "plans.json: small.max_workers is 0: "),
        ({"small": plan_of(min_workers=9)}, "small has min_workers above max_workers = 3"),
        ({"small": plan_of(min_workers_hours="Fun")}, "plans.json: small.min_workers_hours "),
        ({"small": plan_of(gpu=1)}, "plans.json: small.means.gpu is not a known key of a plan"),
        ({"small": plan_of(memory="60 GB")}, "plans.json: small.means.memory is '60 GB': "),
        ({"small": plan_of(environment={"A": 1})}, "small.means.environment.A is 1: "),
        (
            {"small": plan_of(tolerations=[{"ky": 1}])},
            "small.means.tolerations[1].ky is not a known key",
        ),
        ({"small": plan_of(namespace="x")}, "small.means.namespace is not a known key of a plan"),
        (
            {"smal": plan_of()},
            "model smal is not in this deployment; TIDEMILL_WORK_QUEUES has: org",
        ),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_wrong_plan_is_a_sentence_with_its_key(tmp_path: Path, found: Any, sentence: str) -> None:
    """The sentence contains the error and its place in the file."""
    with pytest.raises(PlansRefused) as caught:
        read(tmp_path, found)
    assert sentence in str(caught.value)


def test_the_plans_of_the_page_are_taken(tmp_path: Path) -> None:
    """They are the examples in docs/integrations/kubernetes.md."""
    [shown] = re.findall(r"```json\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    queues = json.dumps({"qwen3-8b": "https://sqs/qwen"})
    [plan] = read(tmp_path, shown, TIDEMILL_WORK_QUEUES=queues).values()
    assert plan.max_workers == 4


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A ConfigMap may not be mounted."""
    with pytest.raises(PlansRefused, match=r"plans\.json cannot be read: No such file"):
        read_plans(tmp_path / "plans.json", read_settings(ENVIRONMENT), "llm", ENVIRONMENT)
