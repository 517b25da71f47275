"""The chart as `helm template` renders it."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "container/chart"
EXAMPLES = ROOT / "docs/examples/kubernetes"
TOOLS = ROOT / ".venv-chart"

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Container:
    """A container, and the pod and the manifest that it is in."""

    manifest: Manifest
    pod: Manifest
    spec: Manifest

    @property
    def arguments(self) -> list[str]:
        """Return what follows `tidemill` on its command line."""
        return list(self.spec["args"])

    @property
    def environment(self) -> dict[str, str]:
        """Return its variables with their values, except those from Secrets."""
        return {each["name"]: each["value"] for each in self.spec["env"] if "value" in each}


def tool(name: str) -> Path:
    """Return the path of a program or schema; fails without it, skips where there is none."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("helm comes for Linux on x86_64 alone")
    assert (TOOLS / name).exists(), f"{TOOLS.name}/{name} is missing: `make test` installs it"
    return TOOLS / name


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """Return helm's exit status, and what it printed: its errors unless that is 0."""
    more = ["--values", "-"] if values is not None else []
    done = subprocess.run(
        [tool("helm/helm"), *arguments, *more],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as helm lays some over others."""
    values = dict(below)
    for key, value in above.items():
        old = values.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        values[key] = laid_over(old, value) if both else value
    return values


def helm_template(
    example: str | None, values: Mapping[str, Any], release: str = "mill"
) -> tuple[int, str]:
    """Return what `helm template` says to an example with values laid over it.

    An example with workers gets the deployment that they need.
    """
    below: dict[str, Any] = {}
    if example in {"launcher", "keda"}:
        environment = json.loads((EXAMPLES / "environment.json").read_bytes())
        below = {"deployment": {"environment": environment}}
    files = [f"--values={EXAMPLES / f'{example}.yaml'}"] if example else []
    return helm(
        "template",
        release,
        str(CHART),
        "--namespace=batches",
        *files,
        values=laid_over(below, values),
    )


def refusal(example: str, values: Mapping[str, Any]) -> str:
    """Return why helm refuses an example with these values."""
    status, words = helm_template(example, values)
    assert status == 1
    return words


@cache
def render(example: str | None, values: str = "{}", release: str = "mill") -> Sequence[Manifest]:
    """Return the manifests of an example, or of the defaults, with values in JSON laid over it."""
    status, text = helm_template(example, json.loads(values), release)
    assert status == 0, text
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Return the manifests of one kind."""
    return [each for each in manifests if each["kind"] == kind]


def pod_template(manifest: Manifest) -> Manifest | None:
    """Return the template of a manifest's pods, if it has any."""
    spec = manifest.get("spec", {})
    template = spec.get("jobTargetRef", spec).get("template")
    return dict(template) if template else None


def containers(manifests: Sequence[Manifest]) -> Iterator[Container]:
    """Yield every container."""
    for manifest in manifests:
        template = pod_template(manifest)
        for each in template["spec"]["containers"] if template else ():
            yield Container(manifest, template["spec"] if template else {}, each)
