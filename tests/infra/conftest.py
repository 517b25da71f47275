"""The stacks as CloudFormation would get them, made once for each configuration.

`aws_cdk` takes seconds to import and starts a process of Node: tests import it when they run, so
that only the processes that run them have it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import pytest

from infra.bundle import Bundle
from infra.config import DEFAULT_PATH, make_config
from tests.infra.compute.kinds import ADJUSTED, REVISED, Compute
from tests.infra.reading import Template
from tests.warm_start import COLD_VARIABLE

if TYPE_CHECKING:
    from aws_cdk import App, Environment

    from infra.nag_exceptions import Acknowledgement

# CDK's own rules, seconds of each synthesis, are for a long test in test_modes.py.
os.environ.setdefault("CDK_VALIDATION", "false")

# `make test-all` also has cdk-nag check each configuration, and jsii the types of each argument,
# which mypy has checked: together a third of a synthesis.
IS_CHECKED: Final = COLD_VARIABLE in os.environ


class Synth(Protocol):
    """Returns the templates of a configuration by stack."""

    def __call__(
        self, overrides: dict[str, Any], *, is_checked: bool = IS_CHECKED
    ) -> dict[str, Template]:
        """Synthesise it unless that is done; if `is_checked`, it passes cdk-nag."""


@pytest.fixture(scope="session")
def default_config() -> dict[str, Any]:
    """Return the parsed infra/config.toml."""
    return tomllib.loads(DEFAULT_PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def stub_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bundle]:
    """Return a function that gives a bundle with nothing in it, one for each app: no pip runs."""
    from aws_cdk import aws_lambda as lambda_

    folder = tmp_path_factory.mktemp("bundle")
    (folder / "empty.py").touch()

    def make() -> Bundle:
        return Bundle(
            lambda_.Code.from_asset(str(folder)),
            lambda_.Code.from_asset(str(folder)),
            lambda_.Runtime.PYTHON_3_13,
            lambda_.Architecture.ARM_64,
        )

    return make


@pytest.fixture(scope="session")
def make_app(
    default_config: dict[str, Any],
    stub_bundle: Callable[[], Bundle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., App]:
    """Return a function that gives an app with all stacks, not yet synthesised.

    Its arguments are the keys in which the configuration differs from infra/config.toml, and the
    account and region, which are not set by default.
    """
    from aws_cdk import App

    from infra.app import add_stacks
    from infra.image import DOCKERFILE

    if not IS_CHECKED:
        _skip_type_checks()
    # An image that is built at deployment, as the real one: its repository is CDK's own.
    image = tmp_path_factory.mktemp("image")
    (image / DOCKERFILE).parent.mkdir()
    (image / DOCKERFILE).write_text("FROM scratch\n", encoding="utf-8")

    def make(overrides: dict[str, Any], env: Environment | None = None) -> App:
        app = App(outdir=str(tmp_path_factory.mktemp("cdk")))
        config = make_config(default_config | overrides, "test")
        add_stacks(app, config, stub_bundle(), image, env)
        return app

    return make


def _skip_type_checks() -> None:
    """Let jsii accept arguments of any type; its own process still refuses most wrong ones."""
    with suppress(ImportError):  # another version may not have it
        from jsii import _type_checking

        _type_checking._resolved_check = lambda **_: None


def templates_of(app: App) -> dict[str, Template]:
    """Synthesise an app; return the templates of its stacks by their IDs."""
    from aws_cdk import Stack
    from aws_cdk.assertions import Template as Synthesised

    stacks = [child for child in app.node.children if isinstance(child, Stack)]
    return {stack.node.id: dict(Synthesised.from_stack(stack).to_json()) for stack in stacks}


def key_of(overrides: dict[str, Any]) -> str:
    """Return what `synth` knows a configuration by."""
    return json.dumps(overrides, sort_keys=True)


@pytest.fixture(scope="session")
def acknowledged() -> dict[str, set[Acknowledgement]]:
    """Return the acknowledged findings of cdk-nag by the configuration that `synth` met them in."""
    return {}


@pytest.fixture(scope="session")
def synth(make_app: Callable[..., App], acknowledged: dict[str, set[Acknowledgement]]) -> Synth:
    """Return a function that gives the templates by stack (`Data`, `Api`, …); keep them as is."""
    from infra.nag_exceptions import add_checks

    made: dict[str, dict[str, Template]] = {}

    def templates(
        overrides: dict[str, Any], *, is_checked: bool = IS_CHECKED
    ) -> dict[str, Template]:
        key = key_of(overrides)
        # The configuration as it is is a mode, which tests check.
        is_checked = is_checked or not overrides
        if key not in made or (is_checked and key not in acknowledged):
            app = make_app(overrides)
            checks = add_checks(app) if is_checked else None
            made[key] = templates_of(app)
            if checks:
                acknowledged[key] = checks.used
        return made[key]

    return templates


@pytest.fixture(scope="session")
def templates(synth: Synth) -> dict[str, Template]:
    """Return the templates of infra/config.toml as it is."""
    return synth({})


@pytest.fixture(scope="session")
def adjusted(synth: Synth) -> Compute:
    """Return a deployment whose configuration differs in many keys."""
    return Compute(synth(ADJUSTED))


@pytest.fixture(scope="session")
def revised(synth: Synth) -> Compute:
    """Return a deployment whose configuration differs in many other keys."""
    return Compute(synth(REVISED))
