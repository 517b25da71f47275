"""The builder of images: Docker, or another of its kind."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from infra.ops.preflight.account import NotReady

_BUILDER_SECONDS = 30


def check_builder(environment: Mapping[str, str]) -> None:
    """Raise NotReady unless what the CDK builds images with is here and answers."""
    command = environment.get("CDK_DOCKER") or "docker"
    path = shutil.which(command, path=environment.get("PATH", ""))
    if path is None:
        raise NotReady(
            f"The workers' image is built here, and there is no `{command}`: install Docker, or "
            "another builder of its kind and name it (export CDK_DOCKER=finch), or give an `image` "
            "that is built elsewhere (docs/guides/deploy.md)."
        )
    try:
        result = subprocess.run(  # noqa: S603 - what the CDK is about to run
            [path, "info"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILDER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotReady(f"`{command} info` does not answer: {exc}. Is it started?") from exc
    if result.returncode:
        last_line = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise NotReady(f"`{command} info` fails: {' '.join(last_line)} Is it started?")
