"""The chart's values: wrong ones are refused by name, and all that there are have a default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.container.chart.releases import EVERYTHING
from tests.container.chart.rendering import (
    CHART,
    EXAMPLES,
    containers,
    helm,
    laid_over,
    of_kind,
    refusal,
    render,
)

SCHEMA = json.loads((CHART / "values.schema.json").read_bytes())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
MODEL = {"name": "m"}


def mistakes(values: Mapping[str, Any]) -> list[str]:
    """Return the places that the schema finds wrong in values laid over the defaults."""

    def leaves(error: Any) -> Iterator[str]:
        if error.validator == "allOf":
            for each in error.context:
                yield from leaves(each)
        yield f"{error.json_path}: {error.message}"

    errors = Draft7Validator(SCHEMA).iter_errors(laid_over(DEFAULTS, values))
    return [words for error in errors for words in leaves(error)]


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return values with one at a path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def test_the_schema_is_one_and_takes_defaults_and_examples() -> None:
    """Everything else that the chart is tested with is valid too."""
    Draft7Validator.check_schema(SCHEMA)
    examples = [yaml.safe_load(path.read_bytes()) for path in EXAMPLES.glob("*.yaml")]
    assert len(examples) == 4
    assert [mistakes(each) for each in ({}, *examples, EVERYTHING)][:-1] == [[]] * 5
    assert mistakes(laid_over(examples[0], EVERYTHING | {"models": {}})) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("scaling", "karpenter"),
        ("scalling", "keda"),
        ("image.tag", 1),
        ("image.tag", "a b"),
        ("image.repository", "tidemill:1"),
        ("image.digest", "sha256:12"),
        ("image.pullPolicy", "Sometimes"),
        ("image.pullSecrets", ["A Secret"]),
        ("deployment.region", "Ireland"),
        ("deployment.environment.AWS_SECRET_ACCESS_KEY", "x"),
        ("deployment.environment.TIDEMILL_WORK_QUEUES", {"m": "https://queue"}),
        ("environment.HF_TOKEN", "x"),
        ("environment.OTEL_EXPORTER_OTLP_HEADERS", "x"),
        ("existingSecret", "Keys!"),
        ("workers.serviceAccount.annotations", {"a": 1}),
        ("workers.serviceAccount.anotations", {}),
        ("workers.keda.pollingInterval", 0),
        ("workers.keda.shardsPerEngine", 1),
        ("workers.keda.cache.volume", {"emptyDir": {}, "hostPath": {}}),
        ("launcher.memory", "512"),
        ("launcher.tolerations", [{"effect": "NoScheduling"}]),
        ("modelDefaults.name", "m"),
        ("modelDefaults.gpus", "1"),
        ("models.Llama", MODEL),
        ("models.a-name-that-is-longer-than-it-may", MODEL),
        ("models.m", {"gpus": 1}),
        ("models.m.name", "two words"),
        ("models.m.gpu", 1),
        ("models.m.gpus", -1),
        ("models.m.gpus", 1.5),
        ("models.m.cpu", "three"),
        ("models.m.memory", "13 GB"),
        ("models.m.weights", "s3://bucket/a b"),
        ("models.m.args", "--max-model-len 8192"),
        ("models.m.args", ["--max-model-len", 8192]),
        ("models.m.args", ["--device=cpu"]),
        ("models.m.args", ["--tensor-parallel-size", "2"]),
        ("models.m.nodeSelector", ["gpu"]),
        ("models.m.workers.enabled", "yes"),
        ("models.m.workers.max", 0),
        ("models.m.workers.args", ["--exit-when-idle"]),
        ("models.m.serve.args", ["--port", "80"]),
        ("models.m.serve.args", ["--api-key", "x"]),
        ("models.m.serve.apiKeys.keys", "x y"),
        ("models.m.serve.service.type", "Ingress"),
        ("models.m.serve.service.port", 0),
        ("models.m.serve.autoscaling.targets", {"cpu": 80}),
        ("models.m.serve.autoscaling.targets.tidemill_requests_inside", "many"),
        ("models.m.serve.disruptionBudget.maxUnavailable", "one"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(path: str, value: object) -> None:
    """The error names its place, or that of the object without such a key."""
    values = nested(path, value)
    if path.startswith("models.m."):
        values = laid_over({"models": {"m": MODEL}}, values)
    key = path.rpartition(".")[2]
    errors = mistakes(values)
    assert errors
    assert any(key in words for words in errors), errors


def test_helm_itself_refuses_wrong_values_by_their_names() -> None:
    """All are reported at once, before anything is rendered."""
    wrong = {
        "scaling": "karpenter",
        "models": {"llama": {"gpu": 1}, "bge": {"cpu": "three"}},
    }
    words = refusal("launcher", wrong)
    for place in ("'/scaling'", "'gpu'", "'/models/bge/cpu'"):
        assert place in words


@pytest.mark.parametrize(
    ("base", "values", "words"),
    [
        ("launcher", {"image": {"repository": ""}}, "image.repository is empty"),
        (
            "launcher",
            {"deployment": {"environment": {"TIDEMILL_TABLE": ""}}},
            "deployment.environment has no TIDEMILL_TABLE",
        ),
        # `--set-json deployment.environment=`, from a stack that starts its workers itself.
        (
            "launcher",
            {"deployment": {"environment": None}},
            'WorkerEnvironment, which exists only with compute = "none"',
        ),
        (
            "launcher",
            {"deployment": {"environment": {"TIDEMILL_WORK_QUEUES": "https://queue"}}},
            "deployment.environment.TIDEMILL_WORK_QUEUES is not a JSON object: https://queue",
        ),
        (
            "launcher",
            {"models": {"bge": {"name": "bge"}}},
            (
                "models.bge.name is bge, which has no queue in TIDEMILL_WORK_QUEUES (BAAI/bge-m3, "
                "meta-llama/Llama-3.1-8B-Instruct): add it to `models` of the deployment's "
                "configuration and deploy, or set workers.enabled: false"
            ),
        ),
        (
            "launcher",
            {"models": {"bge": {"name": "meta-llama/Llama-3.1-8B-Instruct"}}},
            "models.bge and models.llama have the same name",
        ),
        (
            "launcher",
            {"models": {"bge": {"workers": {"enabled": False}}}},
            "models.bge has neither workers.enabled nor serve.enabled",
        ),
        (
            "launcher",
            {"models": {"bge": {"workers": {"min": 2}}}},
            "models.bge.workers.min is above workers.max, 1",
        ),
        (
            "launcher",
            {"models": {"llama": {"tensorParallelSize": 3}}},
            "models.llama.tensorParallelSize does not divide gpus, 4",
        ),
        (
            "keda",
            {"models": {"llama": {"workers": {"minHours": "Mon-Fri 07:00-18:00"}}}},
            "models.llama.workers.minHours requires scaling: launcher",
        ),
        (
            "serve",
            {"models": {"llama": {"serve": {"data": {"volume": {"hostPath": {}}}}}}},
            "models.llama.serve.data.volume belongs to one server",
        ),
        (
            "serve",
            {"models": {"llama": {"serve": {"metrics": {"existingSecret": ""}}}}},
            "models.llama.serve.metrics.existingSecret is empty",
        ),
        (
            "serve",
            {"models": {"llama": {"serve": {"autoscaling": {"minReplicas": 7}}}}},
            "models.llama.serve.autoscaling.minReplicas is above maxReplicas, 6",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_a_sentence(
    base: str, values: Mapping[str, Any], words: str
) -> None:
    """It names the value, and says what is wrong with it."""
    assert words in refusal(base, values)


def test_workers_need_a_region_and_servers_get_none_unless_there_is_one() -> None:
    """A stack's output has one; an empty variable would be a region of no name to AWS's clients."""
    environment = json.loads((EXAMPLES / "environment.json").read_bytes())
    del environment["AWS_REGION"]
    values = {"deployment": {"environment": environment}}
    file = f"--values={EXAMPLES / 'launcher.yaml'}"
    status, words = helm("template", "mill", str(CHART), file, values=values)
    assert status == 1
    assert "deployment.region is empty, and deployment.environment has no AWS_REGION" in words
    [server] = containers(render("demo"))
    assert server.environment == {"TIDEMILL_HEALTH_FILE": "/tmp/tidemill-health"}  # noqa: S108


@pytest.mark.parametrize(
    "path", ["deployment.region", "workers.keda", "modelDefaults.serve", "modelDefaults.gpus"]
)
def test_a_default_that_null_takes_away_is_missed_by_its_name(path: str) -> None:
    """`--set-json deployment.region=` does so with the output of a failed command."""
    name = path.rpartition(".")[2]
    assert f"missing property '{name}'" in refusal("demo", nested(path, None))


def test_a_target_of_0_is_left_out_and_one_is_needed() -> None:
    """Else the autoscaler would go by the CPU."""
    zero = {"tidemill_waiting_sequences": 0}
    values = nested("models.llama.serve.autoscaling.targets", zero)
    [autoscaler] = of_kind(render("serve", values=json.dumps(values)), "HorizontalPodAutoscaler")
    [metric] = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "tidemill_requests_inside"
    zero["tidemill_requests_inside"] = 0
    assert "models.llama.serve.autoscaling.targets are all 0" in refusal("serve", values)


def test_a_model_takes_what_the_defaults_say_unless_it_says_otherwise() -> None:
    """0, false and an empty list override, too; null removes a model of another file."""
    values = {
        "modelDefaults": {"gpus": 2, "nodeSelector": {"pool": "gpu"}},
        "models": {"llama": None, "bge": {"gpus": 0, "tolerations": []}},
    }
    [plans] = of_kind(render("launcher", values=json.dumps(values)), "ConfigMap")
    [(model, plan)] = json.loads(plans["data"]["plans.json"]).items()
    means = plan["means"]
    assert (model, means["gpus"], means["tolerations"]) == ("BAAI/bge-m3", 0, [])
    assert means["node_selector"] == {"pool": "gpu"}


def test_every_value_has_a_default_that_says_what_it_is() -> None:
    """Every property of the schema is in values.yaml, except `name`, which each model sets."""

    def keys(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        if reference := schema.get("$ref"):
            yield from keys(SCHEMA["definitions"][reference.rpartition("/")[2]], prefix)
        for each in schema.get("allOf", ()):
            yield from keys(each, prefix)
        for key, below in schema.get("properties", {}).items():
            yield f"{prefix}{key}"
            if isinstance(below, dict):
                yield from keys(below, f"{prefix}{key}.")

    def defaults(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from defaults(value, f"{prefix}{key}.")

    known = set(keys(SCHEMA)) - {"global", "modelDefaults.name"}
    free = ("modelDefaults.serve.autoscaling.targets.",)
    given = {key for key in defaults(DEFAULTS) if not key.startswith(free)}
    assert given == known
