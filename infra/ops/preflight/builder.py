"""The builder of images: Docker or a compatible one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from infra.ops.preflight.account import NotReady

_BUILDER_SECONDS = 30


def check_builder(environment: Mapping[str, str]) -> None:
    """Raise NotReady unless the CDK's image builder is installed and running."""
    command = environment.get("CDK_DOCKER") or "docker"
    path = shutil.which(command, path=environment.get("PATH", ""))
    if path is None:
        raise NotReady(
            f"The workers' image is built here, but `{command}` is not installed: install Docker, "
            "or name a compatible builder (export CDK_DOCKER=finch), or set `image` to one that is "
            "built elsewhere (docs/reference/configuration.md)."
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
        raise NotReady(f"`{command} info` does not respond: {exc}. Is it running?") from exc
    if result.returncode:
        last_line = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        cause = f"`{command} info` failed: {' '.join(last_line)}"
        raise NotReady(cause if cause.endswith("running?") else f"{cause} Is it running?")
