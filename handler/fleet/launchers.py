"""Which launcher starts the workers of a plan."""

from __future__ import annotations

from handler.batch.fleet import LauncherKind
from handler.deployment import Deployment
from handler.fleet.ecs import EcsLauncher
from handler.fleet.launcher import Launcher
from handler.fleet.processes import ProcessLauncher
from handler.fleet.sagemaker import SageMakerLauncher


def launcher_of(deployment: Deployment, kind: LauncherKind) -> Launcher:
    """Return the launcher of this kind."""
    match kind:
        case "ecs":
            return EcsLauncher()
        case "sagemaker":
            return SageMakerLauncher()
        case "processes":
            return ProcessLauncher(deployment.processes)
