"""The Lambdas' code: our packages and their dependencies, as pip resolves them, without Docker.

A bundle is built once per state of its sources, and reused from `out/bundles`; so are its
dependencies, which pip installs again only if their versions or the called services change.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from infra.pip_target import BUNDLES, LAMBDA_PYTHON, ROOT, Processor, find_python, install, locked
from infra.tables_layer import build_tables_layer
from tidemill.handler.aws.calls import SERVICES

if TYPE_CHECKING:
    from aws_cdk import aws_lambda as lambda_

# What determines the packages of others.
_RECIPE = (
    ROOT / "constraints.txt",
    ROOT / "pyproject.toml",
    Path(__file__),
    ROOT / "infra" / "pip_target.py",
)
_OWN_PACKAGES = tuple(
    f"tidemill/{name}"
    for name in ("__init__.py", "handler", "dashboard", "batch", "net", "protocol")
)
# Packages that only workers and a cluster's launcher run.
_IGNORED = shutil.ignore_patterns(
    "__pycache__", "worker", "aio.py", "otlp_tracing.py", "api_server.py"
)
# botocore describes every AWS service; Lambdas call only these.
_SERVICES = {*SERVICES, "sts"}
# Powertools' page of an API, time zones of systems without any, and lists of installed files.
_UNREAD = (
    *("aws_lambda_powertools/**/swagger-ui*.min.*", "dateutil/zoneinfo/*.tar.gz"),
    *("*.dist-info/RECORD", "pydantic/mypy.py"),
)
# `multipart` is an alias of another package; nothing that remains imports the others.
_UNUSED = (
    *("bin", "boto3/examples", "multipart", "pydantic/v1", "urllib3/contrib/emscripten"),
    *(
        f"aws_lambda_powertools/utilities/{name}"
        for name in (
            *("auth_alpha", "circuit_breaker", "data_masking", "feature_flags", "idempotency"),
            *("kafka", "metadata", "parameters", "streaming"),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Code for Lambda, its processor and Python, and the layer of the libraries for tables."""

    code: lambda_.Code
    tables: lambda_.Code
    runtime: lambda_.Runtime
    architecture: lambda_.Architecture


def make_bundle(
    processor: Processor, *, python: str = LAMBDA_PYTHON, has_oidc: bool = False
) -> Bundle:
    """Return the bundle for a processor and a version of Python, built if it does not exist.

    The libraries that verify tokens increase it by half, and are included only for `[oidc]`.
    """
    from aws_cdk import aws_lambda as lambda_  # a second, which a bundle alone does not need

    return Bundle(
        lambda_.Code.from_asset(str(build(processor, python=python, has_oidc=has_oidc))),
        lambda_.Code.from_asset(str(build_tables_layer(processor, python))),
        lambda_.Runtime(f"python{python}", lambda_.RuntimeFamily.PYTHON, supports_inline_code=True),
        lambda_.Architecture.ARM_64 if processor == "arm64" else lambda_.Architecture.X86_64,
    )


def host_processor() -> Processor:
    """Return this machine's kind of processor."""
    return "arm64" if platform.machine() in {"arm64", "aarch64"} else "x86_64"


def build(
    processor: Processor,
    bundles: Path = BUNDLES,
    *,
    python: str = LAMBDA_PYTHON,
    has_oidc: bool = False,
) -> Path:
    """Return the folder of the bundle; raises CalledProcessError if pip cannot fill it.

    It contains byte code, because Lambda would otherwise compile every module at each cold start;
    a Python of the bundle's version compiles it, if this machine has one.

    An existing folder is complete: it is built elsewhere and renamed. One process builds at a
    time; a concurrent one waits and reuses the result.
    """
    compiler = find_python(python)
    known = f"{processor} {python} {compiler is not None} {has_oidc} {sorted(_SERVICES)}"
    folder = bundles / f"{processor}-{_digest(known, _sources())}"
    if folder.exists():
        return folder
    # They change less often than our own.
    packages = bundles / f"packages-{processor}-{_digest(known, _RECIPE)}"
    bundles.mkdir(parents=True, exist_ok=True)
    with locked(bundles):
        if not packages.exists():
            with _growing(packages) as growing:
                install(growing, processor, python, requirements(has_oidc=has_oidc))
                _prune(growing)
                _compile(growing, growing, compiler)
        if not folder.exists():
            with _growing(folder) as growing:
                shutil.copytree(packages, growing, copy_function=_link)
                _add_own(growing)
                _compile(growing, growing / "tidemill", compiler)
            if compiler is None:
                sys.stderr.write(
                    f"Python {python} was not found, so the functions have no byte code and start "
                    f"more slowly: install python{python}, then deploy again.\n"
                )
    return folder


@contextmanager
def _growing(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder that is not there yet; it gets its name once it is complete."""
    with TemporaryDirectory(prefix="growing-", dir=folder.parent) as place:
        yield Path(place) / folder.name
        (Path(place) / folder.name).rename(folder)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it on a file system without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _add_own(folder: Path) -> None:
    for name in _OWN_PACKAGES:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_IGNORED)
        else:
            shutil.copy(source, target)


def _compile(root: Path, folder: Path, compiler: str | None) -> None:
    """Compile the modules of a folder; byte code has their paths relative to `root`."""
    if compiler is None:
        return
    compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run(  # noqa: S603 - our own command
        [compiler, *compile_all, "-s", str(root), str(folder)], check=True
    )


def requirements(*, has_oidc: bool = False) -> list[str]:
    """Return the bundle's third-party requirements, as pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras["lambda"] + (extras["oidc"] if has_oidc else [])


def _prune(folder: Path) -> None:
    """Delete the files that no Lambda reads: nine tenths of the folder."""
    for pattern in _UNREAD:
        for path in folder.glob(pattern):
            path.unlink()
    for service in (folder / "botocore" / "data").iterdir():
        if service.is_dir() and service.name not in _SERVICES:
            shutil.rmtree(service)
    for name in _UNUSED:
        shutil.rmtree(folder / name, ignore_errors=True)


def _digest(known: str, sources: Iterable[Path]) -> str:
    digest = sha256(known.encode())
    for path in sorted(sources):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> Iterator[Path]:
    yield from _RECIPE
    for name in _OWN_PACKAGES:
        source = ROOT / name
        yield from _files_of(source) if source.is_dir() else [source]


def _files_of(folder: Path) -> Iterator[Path]:
    return (
        path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
