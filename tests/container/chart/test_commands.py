"""The chart matches our programs: flags, settings, routes, metrics and names."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.config import Model
from infra.worker_flags import worker_flags
from tests.container.chart.releases import RELEASES, manifests_of
from tests.container.chart.rendering import (
    CHART,
    Container,
    Manifest,
    containers,
    of_kind,
    pod_template,
)
from tests.container.chart.schemas import complaints
from tests.container.chart.unpack import VERSIONS
from tidemill.cli.commands.worker import options_from
from tidemill.cli.main import make_parser
from tidemill.handler.settings import read_settings
from tidemill.handler.worker.context.config import read_config
from tidemill.protocol.contract import EngineStats
from tidemill.server import info_routes
from tidemill.server.admission import AdmissionControl
from tidemill.server.metrics import ServerMetrics

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(params=RELEASES)
def manifests(request: pytest.FixtureRequest) -> Sequence[Manifest]:
    """Return the manifests of each release in turn."""
    return manifests_of(request.param)


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line; fails where our parser refuses it."""
    return vars(make_parser().parse_args(arguments))


def plans_of(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the launcher's plans."""
    [plans] = of_kind(manifests, "ConfigMap")
    return dict(json.loads(plans["data"]["plans.json"]))


def pod_annotations(container: Container) -> dict[str, str]:
    """Return the annotations of a container's pods."""
    template = pod_template(container.manifest)
    return dict(template["metadata"].get("annotations", {})) if template else {}


def commands() -> set[str]:
    """Return the names of our commands."""
    [action] = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return set(action.choices)


def is_ours(container: Container) -> bool:
    """Say whether this version has the container's command."""
    return container.arguments[0] in commands()


def test_every_command_line_is_one_that_our_parser_takes(manifests: Sequence[Manifest]) -> None:
    """Each flag exists, and its value is of its kind."""
    for container in filter(is_ours, containers(manifests)):
        options = parsed(container.arguments)
        if container.arguments[0] != "launcher":
            assert options["served_model_names"]


def test_keda_workers_have_the_flags_of_ecs_workers() -> None:
    """The CDK app gives a worker of the same model these flags, except KEDA's own."""
    [worker] = containers(of_kind(manifests_of("keda and all else"), "ScaledJob"))
    model = Model(
        name=LLAMA,
        aliases=("llama",),
        weights="s3://my-weights/llama-3.1-8b",
        gpu="a100",
        gpus_per_worker=8,
        tensor_parallel_size=2,
        min_workers=2,
        max_workers=3,
        args=("--max-model-len", "8192", "--reuse"),
    )
    theirs = parsed(["worker", *worker_flags(model)])
    ours = parsed(worker.arguments)
    assert ours.pop("max_shards") == 4 * 8
    assert theirs.pop("max_shards") is None
    assert ours == theirs


def test_workers_find_their_queue_and_deployment_in_their_environment() -> None:
    """Their variables are a worker's settings; KEDA counts messages of the same queue."""
    manifests = manifests_of("keda")
    [job] = of_kind(manifests, "ScaledJob")
    [worker] = containers([job])
    settings = read_settings(worker.environment)
    options = options_from(make_parser().parse_args(worker.arguments))
    queue = settings.work_queues[LLAMA]
    assert queue == job["spec"]["triggers"][0]["metadata"]["queueURL"]
    assert settings.model_aliases == {"llama": LLAMA}
    config = read_config(worker.environment, {**options.given, "queue": queue})
    assert (config.max_shards, config.exit_when_idle_seconds) == (8, 300)
    assert config.grace_seconds < worker.pod["terminationGracePeriodSeconds"]
    assert worker.environment["AWS_REGION"] == "eu-west-1"


def test_the_launchers_plans_say_what_the_values_say() -> None:
    """A plan for each model that has workers, in the launcher's words; its flags are a worker's."""
    plans = plans_of(manifests_of("launcher"))
    assert sorted(plans) == ["BAAI/bge-m3", LLAMA]
    means = plans[LLAMA].pop("means")
    assert plans[LLAMA] == {
        "max_workers": 4,
        "min_workers": 1,
        "min_workers_hours": "Mon-Fri 07:00-18:00",
        "target_seconds": 3600,
        "idle_seconds": 300,
    }
    options = parsed(["worker", *means.pop("args")])
    assert options["model"] == "s3://my-weights/llama-3.1-8b"
    assert (options["tensor_parallel_size"], options["data_parallel_size"]) == (2, "auto")
    assert means == {
        "image": "111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1",
        "gpus": 4,
        "cpu": "12",
        "memory": "100Gi",
        "node_selector": {"node.kubernetes.io/instance-type": "g6.12xlarge"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "service_account": "mill-workers",
        "environment": {},
    }


@pytest.mark.parametrize("release", ["launcher", "launcher and all else"])
def test_the_launcher_takes_its_plans(release: str, tmp_path: Path) -> None:
    """It creates Jobs that are valid in every Kubernetes version that the chart supports."""
    plans = pytest.importorskip("tidemill.handler.fleet.kubernetes.plans")
    job = importlib.import_module("tidemill.handler.fleet.kubernetes.job")
    manifests = manifests_of(release)
    [launcher] = (each for each in containers(manifests) if each.spec["name"] == "launcher")
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(plans_of(manifests)), encoding="utf-8")
    settings = read_settings(launcher.environment)
    read = plans.read_plans(path, settings, "batches", launcher.environment)
    assert len(read) == 2
    for model, plan in read.items():
        config = plans.KubernetesConfig.model_validate(plan.means)
        manifest = job.job_manifest(plan, config, "tidemill-1")
        assert [complaints(manifest, version) for version in VERSIONS] == [[], []]
        [worker] = containers([manifest])
        assert parsed(worker.arguments)["served_model_names"][0] == model
        assert worker.environment["AWS_REGION"] == "eu-west-1"


def test_the_launcher_has_the_verbs_of_its_calls_to_the_cluster() -> None:
    """One for each method of its client, such as `create_job`, and no other."""
    client = pytest.importorskip("tidemill.handler.fleet.kubernetes.api_server").KubernetesClient
    calls = {name for name in vars(client) if not name.startswith("_") and name != "close"}
    [role] = of_kind(manifests_of("launcher"), "Role")
    granted = {
        (verb, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    pairs = (call.split("_") for call in calls)
    assert granted == {(verb, f"{resource.removesuffix('s')}s") for verb, resource in pairs}


def test_a_server_has_the_probed_routes_and_they_need_no_key(manifests: Sequence[Manifest]) -> None:
    """The container, its Service and its annotations name the same port."""
    routes = {route.path for route in info_routes.routes(cast("Any", None))}
    for container in containers(manifests):
        if container.spec["name"] != "serve":
            continue
        [port] = container.spec["ports"]
        annotations = pod_annotations(container)
        assert annotations.get("prometheus.io/port", "8080") == str(port["containerPort"])
        assert annotations.get("prometheus.io/path", "/metrics") in routes
        options = parsed(container.arguments)
        assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])  # noqa: S104
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.spec[name]["httpGet"]
            assert probe["path"] in routes & info_routes.OPEN_PATHS
            assert probe["port"] == port["name"] == "http"
        [folder] = (
            mount["mountPath"]
            for mount in container.spec["volumeMounts"]
            if mount["name"] == "data"
        )
        assert Path(options["data_dir"]).is_relative_to(folder)
    for each in of_kind(manifests, "Service"):
        assert [port["targetPort"] for port in each["spec"]["ports"]] == ["http"]
    for each in of_kind(manifests, "PodMonitor"):
        [end] = each["spec"]["podMetricsEndpoints"]
        assert (end["port"], end["path"]) == ("http", "/metrics")


def test_workers_are_probed_by_the_health_check_of_the_image(manifests: Sequence[Manifest]) -> None:
    """The module is there, and the file that it reads is the one that the process touches."""
    for container in containers(manifests):
        if container.spec["name"] == "serve":
            continue
        for name in ("startupProbe", "livenessProbe"):
            [python, flag, module] = container.spec[name]["exec"]["command"]
            assert (python, flag) == ("python", "-m")
            health = importlib.import_module(f"tidemill.{module.removeprefix('tidemill.')}")
            assert Path(container.environment[health.VARIABLE]).parent == Path("/tmp")  # noqa: S108


def test_what_pods_are_counted_by_are_gauges_of_a_server() -> None:
    """All targets that the schema allows are metrics, and so are the defaults."""

    class Engine:
        def stats(self) -> EngineStats:
            return EngineStats()

    metrics = ServerMetrics(cast("Any", Engine()), AdmissionControl(1, 1)).text().decode()
    gauges = {
        family.name
        for family in text_string_to_metric_families(metrics)
        if family.type == "gauge" and family.name != "tidemill_loop_lag_seconds"
    }
    schema = json.loads((CHART / "values.schema.json").read_bytes())
    serve = schema["definitions"]["modelServe"]["properties"]
    targets = serve["autoscaling"]["properties"]["targets"]
    assert set(targets["propertyNames"]["enum"]) <= gauges
    [autoscaler] = of_kind(manifests_of("serve"), "HorizontalPodAutoscaler")
    used = [each["pods"]["metric"]["name"] for each in autoscaler["spec"]["metrics"]]
    assert used == ["tidemill_requests_inside", "tidemill_waiting_sequences"]
