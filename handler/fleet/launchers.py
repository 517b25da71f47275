"""Selects the launcher that starts the workers of a plan."""

from __future__ import annotations

from tidemill.batch.fleet import LauncherKind

from ..deployment import Deployment
from .ecs import EcsLauncher
from .kubernetes.launcher import KubernetesLauncher
from .launcher import Launcher
from .processes import ProcessLauncher
from .sagemaker import SageMakerLauncher


def launcher_for(deployment: Deployment, kind: LauncherKind) -> Launcher:
    """Return the launcher of this kind."""
    match kind:
        case "ecs":
            return EcsLauncher()
        case "sagemaker":
            return SageMakerLauncher()
        case "kubernetes":
            return KubernetesLauncher()
        case "processes":
            return ProcessLauncher(deployment.processes)
