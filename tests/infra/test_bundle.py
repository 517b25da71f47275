"""The Lambdas' bundle: small, whole, quick to import, and the same whenever it is built."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread

import pytest

from infra import bundle as bundles
from infra import pip_target
from infra.bundle import build, host_processor, requirements
from infra.pip_target import LAMBDA_PYTHON, ROOT, Processor, find_python, python_version
from infra.tables_layer import build_tables_layer

# Lambda takes 250 MB; each of them is read and checked at a cold start.
MAX_UNZIPPED_BYTES, MAX_ZIPPED_BYTES = 28_500_000, 11_200_000
# Byte code of Python 3.11 is larger than that of the functions' Python.
BYTE_CODE_SHARE = 1.04
# Of the layer: 105. Both together may have 250.
MAX_LAYER_BYTES = 125_000_000
# Calls of Python functions; 260,000 of them took 0.3 s.
MAX_IMPORT_CALLS = 280_000
HANDLERS = sorted(
    path.stem
    for path in (ROOT / "handler/lambdas").glob("*.py")
    if "\ndef handler(" in path.read_text(encoding="utf-8")
)
# Adding a name here adds it to every cold start.
PACKAGES = {
    "annotated_types",
    "aws_lambda_powertools",
    "boto3",
    "botocore",
    "dateutil",
    "jinja2",
    "jmespath",
    "markupsafe",
    "prometheus_client",
    "pydantic",
    "pydantic_core",
    "python_multipart",
    "s3transfer",
    "six",
    "tidemill",
    "typing_extensions",
    "typing_inspection",
    "urllib3",
}
# "Lambda runtimes" in AWS's developer guide: Amazon Linux 2 has glibc 2.26, Amazon Linux 2023 2.34.
GLIBC_OF_RUNTIMES = {"3.11": (2, 26), "3.12": (2, 34), "3.13": (2, 34), "3.14": (2, 34)}
MACHINES: dict[Processor, int] = {"arm64": 183, "x86_64": 62}  # as ELF numbers them

# What a run of the bundle's own Python needs of this machine: its path and nothing else.
LOADED = "import sys; sys.path.insert(0, sys.argv[1])\n"
COUNTED = f"""{LOADED}calls = 0
def count(_frame, event, _argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
__import__(sys.argv[2])
sys.setprofile(None)
print(callable(sys.modules[sys.argv[2]].handler), calls)
"""


# The same code fills a bundle for another processor or Python, with more to fetch.
@pytest.fixture(
    scope="session",
    params=[
        pytest.param((host_processor(), python_version()), id="native"),
        *(
            pytest.param((name, LAMBDA_PYTHON), id=name, marks=pytest.mark.long)
            for name in MACHINES
        ),
    ],
)
def target(request: pytest.FixtureRequest) -> tuple[Processor, str]:
    """Return the processor and the Python of each bundle in turn."""
    found: tuple[Processor, str] = request.param
    return found


@pytest.fixture(scope="session")
def folder(target: tuple[Processor, str]) -> Path:
    """Return the bundle for a kind of processor and a version of Python."""
    machine, python = target
    return build(machine, python=python)


@pytest.fixture(scope="session")
def native() -> Path:
    """Return the bundle that this machine can run."""
    return build(host_processor(), python=python_version())


@pytest.fixture(scope="session")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the content of the layer of tables that this machine can run."""
    unpacked = tmp_path_factory.mktemp("layer")
    with zipfile.ZipFile(build_tables_layer(host_processor(), python_version())) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.fixture
def few_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pip install one package, at once, and this Python compile it."""

    def install(folder: Path, *_: object) -> None:
        for name in ("botocore/data/s3", "botocore/data/ec2", "bin"):
            (folder / name).mkdir(parents=True)
        (folder / "botocore/__init__.py").write_text("number = 1\n", encoding="utf-8")

    monkeypatch.setattr(bundles, "install", install)
    monkeypatch.setattr(bundles, "find_python", lambda _: sys.executable)


@pytest.fixture
def uncompiled(few_packages: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Compile nothing, for tests of the place and the name of a bundle."""
    monkeypatch.setattr(bundles, "_compile", lambda *_: None)


def files(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder, in their order."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a folder by its path there."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in files(folder)
    }


def run(code: str, folder: Path, *arguments: str) -> str:
    """Return what code prints that runs on the standard library and the bundle alone."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", code, str(folder), *arguments],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What is in it


def test_the_bundle_is_small(folder: Path, target: tuple[Processor, str]) -> None:
    """It stays far under what Lambda takes, unzipped and as it is uploaded."""
    share = 1 if target[1] == LAMBDA_PYTHON else BYTE_CODE_SHARE
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files(folder):
            archive.write(path, path.relative_to(folder))
    assert sum(path.stat().st_size for path in files(folder)) <= share * MAX_UNZIPPED_BYTES
    assert len(buffer.getvalue()) <= share * MAX_ZIPPED_BYTES


def test_the_bundle_holds_what_lambdas_need(folder: Path) -> None:
    """These packages and no others: no model library and nothing of the worker."""
    found = {
        path.name.removesuffix(".py")
        for path in folder.iterdir()
        if path.suffix != ".dist-info" and path.name != "__pycache__"
    }
    assert found == PACKAGES
    assert {path.name for path in (folder / "tidemill").iterdir()} == {
        "__init__.py",
        "__pycache__",
        "batch",
        "handler",
        "dashboard",
        "net",
        "protocol",
    }
    assert not (folder / "tidemill/handler/worker").exists()
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    assert {path.name for path in (folder / "botocore/data").iterdir() if path.is_dir()} == {
        "dynamodb",
        "s3",
        "sqs",
        "events",
        "ecs",
        "logs",
        "sagemaker",
        "ssm",
        "sts",
    }


def test_the_bundle_has_our_sources_as_they_are(folder: Path) -> None:
    """Every module of ours in it is the one of this checkout."""
    paths = list((folder / "tidemill").rglob("*.py"))
    assert len(paths) > 40
    for path in paths:
        assert path.read_bytes() == (ROOT / path.relative_to(folder)).read_bytes(), path


def test_the_bundle_has_all_that_the_dashboard_loads(folder: Path) -> None:
    """Templates and files are those of this checkout."""
    ours, theirs = ROOT / "dashboard", folder / "tidemill/dashboard"
    for path in (path for name in ("static", "templates") for path in (ours / name).iterdir()):
        assert (theirs / path.relative_to(ours)).read_bytes() == path.read_bytes(), path
    read = f"{LOADED}from tidemill.dashboard.assets import assets; print(*assets())"
    assert {"app.js", "tidemill.css"} < set(run(read, folder).split())


def test_every_module_is_compiled(native: Path) -> None:
    """Lambda's disk is read-only: each module has unchecked byte code."""
    sources = [path for path in files(native) if path.suffix == ".py"]
    assert len(sources) > 500
    for source in sources:
        code = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        _, flags = struct.unpack("<4sI", code.read_bytes()[:8])
        assert flags == 1, source  # by the source's hash, which is not looked at


def test_byte_code_names_no_folder_of_this_machine(native: Path) -> None:
    """The build folder's path is not in it, so that it is reproducible."""
    compiled = [path for path in files(native) if path.suffix == ".pyc"]
    here = str(ROOT / "out").encode()
    assert [path for path in compiled if here in path.read_bytes()] == []


def test_libraries_are_for_the_processor(folder: Path, target: tuple[Processor, str]) -> None:
    """Compiled code is for the processor of the functions."""
    libraries = list(folder.rglob("*.so"))
    assert libraries
    for library in libraries:
        (number,) = struct.unpack("<H", library.read_bytes()[18:20])
        assert number == MACHINES[target[0]], library


def test_wheels_run_on_the_glibc_of_the_runtime(native: Path, layer: Path) -> None:
    """No wheel of a function needs a newer glibc than AWS's runtime has."""
    wheels = [*native.glob("*.dist-info/WHEEL"), *layer.glob("python/*.dist-info/WHEEL")]
    tags = re.findall(r"manylinux_(\d+)_(\d+)_", "".join(path.read_text() for path in wheels))
    assert tags
    newest = max((int(major), int(minor)) for major, minor in tags)
    assert newest <= GLIBC_OF_RUNTIMES[LAMBDA_PYTHON]


# How it runs


@cache
def imported(native: Path, name: str) -> list[str]:
    """Import a handler once; return whether it can be called, and the number of calls."""
    return run(COUNTED, native, f"tidemill.handler.lambdas.{name}").split()


@pytest.mark.parametrize("name", HANDLERS)
def test_a_handler_imports_from_the_bundle_alone(native: Path, name: str) -> None:
    """A handler needs the standard library, the bundle and no variable to be imported."""
    assert imported(native, name)[0] == "True"


def test_every_module_of_ours_can_be_imported(native: Path, layer: Path) -> None:
    """The bundle has only modules that work there; those of tables have a layer."""
    modules = [
        ".".join(path.relative_to(native).with_suffix("").parts).removesuffix(".__init__")
        for path in (native / "tidemill").rglob("*.py")
    ]
    assert len(modules) > 40
    code = f"{LOADED}sys.path.append(sys.argv[2])\nfor name in sys.argv[3:]: __import__(name)"
    run(code, native, str(layer / "python"), *modules)
    assert sum(path.stat().st_size for path in files(layer)) < MAX_LAYER_BYTES


@pytest.mark.parametrize("name", HANDLERS)
def test_a_cold_import_does_little(native: Path, name: str) -> None:
    """It is measured in calls, whose number is the same on every machine."""
    assert int(imported(native, name)[1]) <= MAX_IMPORT_CALLS


# How it is built


@pytest.mark.long  # has pip make all of it once more
def test_a_bundle_is_the_same_whenever_it_is_built(native: Path, tmp_path: Path) -> None:
    """A deployment without a change uploads nothing and changes no function."""
    again = build(host_processor(), tmp_path, python=python_version())
    assert again.name == native.name
    assert contents(again) == contents(native)


@pytest.mark.usefixtures("uncompiled")
def test_a_bundle_that_is_there_is_not_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second call for the same sources finds what the first one made."""
    first = build("arm64", tmp_path)
    monkeypatch.setattr(bundles, "_add_own", pytest.fail)
    assert build("arm64", tmp_path) == first


@pytest.mark.usefixtures("uncompiled")
def test_a_change_of_ours_installs_no_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The new bundle has the packages of the earlier one."""
    first = build("arm64", tmp_path)
    sources = list(bundles._sources())
    monkeypatch.setattr(bundles, "_sources", lambda: sources[:-1])
    monkeypatch.setattr(bundles, "install", pytest.fail)
    second = build("arm64", tmp_path)
    assert second != first
    assert contents(second) == contents(first)


@pytest.mark.usefixtures("uncompiled")
def test_a_service_that_is_called_from_now_on_is_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The packages of earlier bundles lack its description in botocore."""
    assert not (build("arm64", tmp_path) / "botocore/data/ec2").exists()
    monkeypatch.setattr(bundles, "_SERVICES", {"s3", "ec2"})
    assert (build("arm64", tmp_path) / "botocore/data/ec2").exists()


@pytest.mark.usefixtures("uncompiled")
def test_another_source_processor_or_python_makes_another_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name of a bundle depends on everything that goes into it."""
    folders = {build("arm64", tmp_path), build("x86_64", tmp_path)}
    folders.add(build("arm64", tmp_path, has_oidc=True))
    folders.add(build("arm64", tmp_path, python="3.12"))
    monkeypatch.setattr(bundles, "find_python", lambda _: None)
    folders.add(build("arm64", tmp_path))
    changed = tmp_path / "changed.py"
    changed.touch()
    sources = list(bundles._sources())
    monkeypatch.setattr(bundles, "ROOT", Path("/"))
    folders.add(tmp_path / bundles._digest("arm64", [*sources, changed]))
    changed.write_text("number = 2\n", encoding="utf-8")
    folders.add(tmp_path / bundles._digest("arm64", [*sources, changed]))
    assert len(folders) == 7


def test_tokens_bring_what_verifies_them() -> None:
    """Only deployments that accept tokens have it: cryptography is half as large as the rest."""
    more = set(requirements(has_oidc=True)) - set(requirements())
    assert {name.partition(">")[0] for name in more} == {"cryptography", "pyjwt"}


@pytest.mark.usefixtures("uncompiled")
def test_what_was_left_half_done_does_no_harm(tmp_path: Path) -> None:
    """A build that was killed leaves a folder that no other build takes for its own."""
    left = tmp_path / "growing-left"
    name = build("arm64", tmp_path / "another").name
    (left / name / "tidemill/handler").mkdir(parents=True)
    made = build("arm64", tmp_path)
    assert (made.name, (made / "tidemill/handler/__init__.py").exists()) == (name, True)
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {
        *("another", "arm64", "growing", "packages")
    }
    assert [*tmp_path.glob("growing-*")] == [left]


@pytest.mark.usefixtures("few_packages")
def test_without_the_functions_python_a_build_has_no_byte_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte code of another Python would be useless; a note names the version to install."""
    monkeypatch.setattr(bundles, "find_python", lambda _: None)
    made = build("arm64", tmp_path)
    assert (made / "tidemill/handler/__init__.py").exists()
    assert not list(made.rglob("__pycache__"))
    assert "install python3.13, then deploy again" in capsys.readouterr().err


@pytest.mark.parametrize("reported", ["3.13", "3.12", None])
def test_a_python_is_found_by_the_version_that_it_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reported: str | None
) -> None:
    """A python3.13 on the PATH counts only if it starts and reports 3.13."""
    shim = tmp_path / "python3.13"
    shim.write_text(f"#!/bin/sh\n{f'echo {reported}' if reported else 'exit 127'}\n")
    shim.chmod(0o755)
    monkeypatch.setattr(pip_target, "python_version", lambda: "3.11")
    monkeypatch.setattr("shutil.which", {"python3.13": str(shim)}.get)
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    assert find_python("3.13") == (str(shim) if reported == "3.13" else None)
    assert find_python("3.11") == sys.executable


def test_a_build_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When pip cannot install, the error is reported and the next build starts from scratch."""

    def fail(folder: Path, *_: object) -> None:
        folder.mkdir()
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(bundles, "install", fail)
    with pytest.raises(subprocess.CalledProcessError):
        build("arm64", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_packages")
def test_who_comes_while_a_bundle_is_built_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both get the same whole folder, which was filled once, and nothing else is left."""
    is_filling, may_go_on, fill = Event(), Event(), bundles._add_own
    made: list[Path] = []
    filled: list[Path] = []

    def fill_slowly(folder: Path) -> None:
        filled.append(folder)
        is_filling.set()
        assert may_go_on.wait(60)
        fill(folder)

    monkeypatch.setattr(bundles, "_add_own", fill_slowly)
    threads = [Thread(target=lambda: made.append(build("arm64", tmp_path))) for _ in range(2)]
    threads[0].start()
    assert is_filling.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    assert len(made) == 2
    assert len(set(made)) == 1
    assert set(tmp_path.iterdir()) == {made[0], *tmp_path.glob("packages-*")}
    assert (made[0] / "botocore/__pycache__").is_dir()


def test_a_file_system_without_links_gets_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared folder of a virtual machine may have none."""
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_text("code")

    def link(*_: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    bundles._link(str(source), str(target))
    assert target.read_text() == "code"
