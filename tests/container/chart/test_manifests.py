"""The chart's manifests: valid, held together by names that are there, and with few rights."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from tests.container.chart.releases import RELEASES, manifests_of
from tests.container.chart.rendering import (
    CHART,
    EXAMPLES,
    ROOT,
    Manifest,
    containers,
    helm,
    helm_template,
    of_kind,
    pod_template,
    render,
)
from tests.container.chart.schemas import complaints
from tests.container.chart.unpack import VERSIONS

MINUTE = 60


@pytest.fixture(params=RELEASES)
def manifests(request: pytest.FixtureRequest) -> Sequence[Manifest]:
    """Return the manifests of each release in turn."""
    return manifests_of(request.param)


def test_every_manifest_is_valid_in_the_oldest_and_the_newest_kubernetes(
    manifests: Sequence[Manifest],
) -> None:
    """The strict schemas are used, in which unknown fields are errors."""
    assert f'">={VERSIONS[0]}.0-0"' in (CHART / "Chart.yaml").read_text(encoding="utf-8")
    errors = [
        f"{version} {each['kind']} {words}"
        for version in VERSIONS
        for each in manifests
        for words in complaints(each, version)
    ]
    assert errors == []


@pytest.mark.parametrize(
    ("release", "kinds"),
    [
        ("launcher", "ConfigMap Deployment Role RoleBinding ServiceAccount ServiceAccount"),
        ("keda", "ScaledJob ServiceAccount TriggerAuthentication"),
        ("demo", "Deployment PodDisruptionBudget Service ServiceAccount"),
        ("serve", "Deployment HPA PodDisruptionBudget PodMonitor Service ServiceAccount"),
    ],
)
def test_a_release_has_what_it_needs_and_nothing_else(release: str, kinds: str) -> None:
    """No Secret is ever among them."""
    found = sorted(each["kind"] for each in manifests_of(release))
    assert found == kinds.replace("HPA", "HorizontalPodAutoscaler").split()


def test_an_image_without_a_tag_is_that_of_this_version() -> None:
    """A chart and the image of the same checkout belong together."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_bytes())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
    [server] = containers(render("demo", values='{"image": {"tag": ""}}'))
    assert server.spec["image"] == f"tidemill:{project['version']}"


def test_nothing_is_rendered_without_a_model() -> None:
    """The defaults are values that helm takes."""
    assert render(None) == []


@pytest.mark.parametrize("release", ["1mill", "mill.v2"])
def test_a_release_whose_name_no_service_takes_is_refused(release: str) -> None:
    """Helm itself would take it."""
    status, words = helm_template("demo", {}, release)
    assert status == 1
    assert f"the release is named {release}" in words


def test_keda_gets_nothing_where_no_model_has_workers() -> None:
    """A server alone needs none of its resources."""
    kinds = {each["kind"] for each in render("demo", values='{"scaling": "keda"}')}
    assert kinds == {each["kind"] for each in manifests_of("demo")}


def test_names_are_short_and_come_once(manifests: Sequence[Manifest]) -> None:
    """A Job of KEDA's and its pods get eleven characters more, and 63 is what a label takes."""
    names = Counter((each["kind"], each["metadata"]["name"]) for each in manifests)
    assert set(names.values()) == {1}
    assert max(len(name) for _, name in names) <= 63 - 11


def test_every_container_has_limits_probes_and_no_rights(manifests: Sequence[Manifest]) -> None:
    """It is the image's own user, and writes to its volumes alone."""
    found = list(containers(manifests))
    assert found
    for each in found:
        limits = each.spec["resources"]["limits"]
        assert limits == each.spec["resources"]["requests"]
        assert {"cpu", "memory"} <= limits.keys()
        assert {"startupProbe", "livenessProbe"} <= each.spec.keys()
        assert all(each.environment.values())
        assert each.spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each.pod["securityContext"]["runAsNonRoot"] is True
        assert each.pod["securityContext"]["runAsUser"] == 10001
        assert (each.pod["enableServiceLinks"], each.pod["shareProcessNamespace"]) == (False, True)
        grace = each.pod.get("terminationGracePeriodSeconds", 30)
        assert grace >= (30 if each.spec["name"] == "launcher" else MINUTE)


def test_what_the_image_writes_to_is_a_volume(manifests: Sequence[Manifest]) -> None:
    """Every mount has its volume, and every volume is mounted."""
    dockerfile = (ROOT / "container/Dockerfile").read_text(encoding="utf-8")
    [volumes] = re.findall(r'^VOLUME \["(.*)", "(.*)"\]$', dockerfile, re.MULTILINE)
    for each in containers(manifests):
        mounts = {mount["name"]: mount["mountPath"] for mount in each.spec["volumeMounts"]}
        assert sorted(mounts) == sorted(volume["name"] for volume in each.pod["volumes"])
        if each.spec["name"] != "launcher":
            assert set(volumes) <= set(mounts.values())


def test_a_model_on_gpus_requests_them_and_several_share_memory(
    manifests: Sequence[Manifest],
) -> None:
    """A model on the CPU requests none, and its engine has the CPU as device."""
    for each in containers(manifests):
        if each.spec["name"] == "launcher":
            continue
        gpus = int(each.spec["resources"]["limits"].get("nvidia.com/gpu", "0"))
        device = each.arguments[each.arguments.index("--device") + 1]
        assert device == ("cuda" if gpus else "cpu")
        paths = [mount["mountPath"] for mount in each.spec["volumeMounts"]]
        assert ("/dev/shm" in paths) == (gpus > 1)  # noqa: S108 - a volume of the pod's own


def test_selectors_match_the_pods_of_their_model(manifests: Sequence[Manifest]) -> None:
    """A Service, a budget and a monitor each select the pods of one Deployment."""
    labels = {
        each["metadata"]["name"]: template["metadata"]["labels"]
        for each in of_kind(manifests, "Deployment")
        if (template := pod_template(each))
    }
    for each in manifests:
        selector: dict[str, Any] = each.get("spec", {}).get("selector", {})
        selector = selector.get("matchLabels", selector)
        if selector:
            chosen = [name for name, has in labels.items() if selector.items() <= has.items()]
            assert chosen == [each["metadata"]["name"]]
    for each in of_kind(manifests, "HorizontalPodAutoscaler"):
        assert each["spec"]["scaleTargetRef"]["name"] in labels


def test_service_accounts_are_there_unless_they_are_others(manifests: Sequence[Manifest]) -> None:
    """Accounts that the chart creates hold no token; only the launcher's pod gets one."""
    made = {each["metadata"]["name"] for each in of_kind(manifests, "ServiceAccount")}
    assert not any(
        each["automountServiceAccountToken"] for each in of_kind(manifests, "ServiceAccount")
    )
    for each in containers(manifests):
        assert each.pod["serviceAccountName"] in made | {"workers-of-ours", "default"}
        assert each.pod["automountServiceAccountToken"] is (each.spec["name"] == "launcher")


def test_the_launcher_may_do_what_it_does_with_jobs_and_nothing_else() -> None:
    """No verb on Secrets, none on pods but to list them, and no right outside its namespace."""
    manifests = manifests_of("launcher")
    [role], [binding] = of_kind(manifests, "Role"), of_kind(manifests, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["batch"],
            "resources": ["jobs"],
            "verbs": ["create", "delete", "list", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    [launcher] = of_kind(manifests, "Deployment")
    template = pod_template(launcher)
    assert template is not None
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": template["spec"]["serviceAccountName"],
            "namespace": "batches",
        }
    ]
    assert [each["kind"] for each in manifests if each["kind"].startswith("Cluster")] == []


def test_a_release_never_runs_two_launchers_at_once() -> None:
    """The old one ends before the new one starts."""
    [launcher] = of_kind(manifests_of("launcher"), "Deployment")
    assert launcher["spec"]["replicas"] == 1
    assert launcher["spec"]["strategy"] == {"type": "Recreate"}


def test_keda_counts_what_a_worker_holds_and_waits_longer_after_each_failure() -> None:
    """A node that goes counts for no failure, and refused settings are not tried again."""
    [job] = of_kind(manifests_of("keda"), "ScaledJob")
    spec = job["spec"]
    [worker] = containers([job])
    held = worker.arguments[worker.arguments.index("--max-shards") + 1]
    assert spec["triggers"][0]["metadata"]["queueLength"] == held == "8"
    assert spec["triggers"][0]["metadata"]["scaleOnInFlight"] == "true"
    assert spec["jobTargetRef"]["template"]["spec"]["restartPolicy"] == "Never"
    rules = spec["jobTargetRef"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["onExitCodes"]["values"] == [2]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


def test_a_server_stops_after_its_requests_and_starts_as_long_as_it_may() -> None:
    """Its grace is longer than the time of requests, after the Service has let go of it."""
    [server] = containers(manifests_of("serve"))
    drain = int(server.arguments[server.arguments.index("--drain-timeout") + 1])
    sleep = server.spec["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert server.pod["terminationGracePeriodSeconds"] >= drain + sleep + 20
    startup = server.spec["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800


def test_a_server_that_keeps_files_is_replaced_and_not_doubled() -> None:
    """Its folder belongs to one server; others have a new pod before the old one goes."""
    [kept, other] = (
        each
        for each in of_kind(manifests_of("keda and all else"), "Deployment")
        if "serve" in each["metadata"]["labels"]["app.kubernetes.io/component"]
    )
    strategies = {each["spec"]["strategy"]["type"] for each in (kept, other)}
    assert strategies == {"Recreate", "RollingUpdate"}


def test_helm_finds_nothing_to_say_and_the_notes_name_what_runs() -> None:
    """The output is that of `helm install`."""
    status, words = helm("lint", "--strict", str(CHART))
    assert status == 0, words
    status, words = helm(
        "install", "mill", str(CHART), "--dry-run=client", "--namespace=batches",
        f"--values={EXAMPLES / 'serve.yaml'}",
    )  # fmt: skip
    assert status == 0, words
    assert "http://mill-llama-serve.batches:8000/v1" in words.partition("NOTES:")[2]
