"""Properties of the image from container/Dockerfile, and of its build context."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.container.dockerfile import (
    INSTRUCTIONS,
    PATH,
    ROOT,
    copied_from_context,
    copied_sources,
    of_stage,
    only,
    read_dockerfile,
    volumes,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COPIED = copied_sources("build")


def test_hadolint_finds_nothing() -> None:
    """Rules that are not followed are named in the file, each where it is broken."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=path)
    assert hadolint is not None, "pip install -e '.[dev]'"
    done = subprocess.run([hadolint, PATH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_instructions_are_read_as_docker_reads_them() -> None:
    """The other tests stand on that."""
    text = "# a\nFROM x AS one\nRUN a \\\n# b\n && c\n\nFROM scratch\nCOPY --from=one /a /b\n"
    found = [(it.stage, it.name, it.words) for it in read_dockerfile(text)]
    assert found == [
        ("one", "FROM", "x AS one"),
        ("one", "RUN", "a && c"),
        ("", "FROM", "scratch"),
        ("", "COPY", "--from=one /a /b"),
    ]


def test_every_stage_begins_with_one_base_by_its_digest() -> None:
    """The Python that constraints.txt was resolved for; the last stage begins with nothing."""
    [base] = [it.words for it in INSTRUCTIONS if it.name == "ARG"]
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert "with Python 3.11." in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    bases = [it.words.split()[0] for it in INSTRUCTIONS if it.name == "FROM"]
    assert bases == ["${BASE}", "compiler", "build", "${BASE}", "build", "scratch", "scratch"]


def test_the_last_stage_runs_nothing_and_takes_nothing_of_the_context() -> None:
    """It has no shell to run anything with, and only what the stages before have made."""
    assert of_stage("", "RUN", "SHELL", "ADD") == []
    assert copied_from_context("") == []
    assert {it.flags["from"] for it in of_stage("", "COPY")} == {"build", "layers", "system"}


def test_nothing_is_fetched_by_its_address() -> None:
    """There is no ADD and no download tool; pip installs exact versions."""
    assert [it for it in INSTRUCTIONS if it.name == "ADD"] == []
    commands = [it.words for it in INSTRUCTIONS if it.name == "RUN"]
    assert [words for words in commands if re.search(r"://|\bcurl\b|\bwget\b|\bgit\b", words)] == []
    installs = [
        words
        for command in commands
        for words in command.split("&&")
        if re.search(r"\bpip .*\binstall\b", words) and "uninstall" not in words
    ]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in it or "--no-deps" in it for it in installs)


def test_no_secret_is_set() -> None:
    """There is none in the environment, nor in an argument, which the image's history keeps."""
    named = [it.words for it in INSTRUCTIONS if it.name in {"ARG", "ENV", "LABEL"}]
    assert named
    assert [it for it in named if re.search(r"(?i)token|secret|passw|credential|key", it)] == []


def test_it_runs_as_a_user_that_is_a_number() -> None:
    """The user is not root, which an orchestrator can verify, and owns its home folder."""
    user = only("", "USER").words
    uid, gid = map(int, user.split(":"))
    assert uid == gid >= 10_000
    [system] = of_stage("system", "RUN")
    assert f"useradd --uid {uid} --gid {gid} " in system.words
    assert f"install --directory --owner={uid} --group={gid}" in system.words


def test_no_shell_stands_between() -> None:
    """Signals reach the worker, and neither start nor check needs a shell."""
    assert only("", "ENTRYPOINT").listed == ["tidemill"]
    assert only("", "CMD").listed == ["worker"]
    assert only("", "STOPSIGNAL").words == "SIGTERM"
    health_check = only("", "HEALTHCHECK")
    assert health_check.words.endswith('CMD ["python", "-m", "tidemill.cli.health"]')
    assert all(it.is_exec_form for it in of_stage("", "ENTRYPOINT", "CMD", "VOLUME"))


def test_all_that_is_written_goes_to_the_volumes() -> None:
    """So the root may be read-only; weights may outlive a container, its pulse may not."""
    settings = only("", "ENV").pairs
    shared, own = "/var/cache/tidemill", "/tmp"  # noqa: S108 - of the image
    assert volumes() == [own, shared]
    assert settings["PYTHONDONTWRITEBYTECODE"] == "1"
    for name in ("HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TIDEMILL_WEIGHTS_CACHE"):
        assert settings[name].startswith(shared)
    assert settings["TIDEMILL_HEALTH_FILE"].startswith(f"{own}/")
    assert "TMPDIR" not in settings


def test_kernels_are_compiled_when_it_is_built() -> None:
    """The build compiles them after our code is copied, into a folder of the last stage."""
    settings = only("", "ENV").pairs
    copied = [it.words.split()[1:] for it in of_stage("", "COPY")]
    folder = settings["TIDEMILL_KERNELS"]
    assert [folder, folder] in copied
    *_, last = of_stage("build", "RUN", "COPY")
    of_cpu, of_gpu = (command.split() for command in last.words.split(" && ")[-2:])
    code = f"PYTHONPATH={settings['PYTHONPATH']}"
    assert {f"NUMBA_CACHE_DIR={folder}", code} < {*of_cpu}
    assert of_cpu[-2:] == ["-m", "tidemill.engine.kernels.cpu.compile_all"]
    assert {f"TRITON_CACHE_DIR={folder}/triton", code} < {*of_gpu}
    assert of_gpu[-6:] == ["-m", "tidemill.engine.model.compile_kernels", "80", "86", "89", "90"]
    assert not any(folder.startswith(volume) for volume in volumes())


def test_libraries_are_in_layers_that_change_separately(tmp_path: Path) -> None:
    """The file's own commands are run: each library is in one layer, and none is lost."""
    site = only("layers", "WORKDIR").words
    names = ["nvidia", "torch", "triton", "numba", "transformers", "boto3", "boto3.dist-info"]
    for name in names:
        path = tmp_path / site.removeprefix("/") / name / "x.py"
        path.parent.mkdir(parents=True)
        path.touch()
    command = only("layers", "RUN").words.replace("/opt/layers", f"{tmp_path}/layers")
    command = command.replace("${PWD}", site)
    subprocess.run(["/bin/sh", "-ec", command], cwd=tmp_path / site.removeprefix("/"), check=True)
    copies = [it.words.split()[1:] for it in of_stage("", "COPY") if it.flags["from"] == "layers"]
    assert copies[-1] == ["/opt/libraries", "/opt/libraries"]
    layers = []
    for source, to in copies:
        place = source.replace("/opt/layers", "layers").removeprefix("/")
        found = {
            str(Path(to) / path.parent.relative_to(tmp_path / place))
            for path in (tmp_path / place).rglob("*.py")
        }
        layers.append(sorted(name.removeprefix(f"{site}/") for name in found))
    expected = [["nvidia"], ["torch"], ["numba", "triton"], ["transformers"]]
    assert layers == [*expected, ["boto3", "boto3.dist-info"]]


def test_byte_code_of_libraries_holds_no_time() -> None:
    """Else a layer of the same libraries would be another one each time that it is made."""
    libraries, _ = of_stage("build", "RUN")
    assert " --no-compile " in libraries.words
    assert "compileall -qq --invalidation-mode unchecked-hash" in libraries.words


def test_tools_are_removed_from_the_system(tmp_path: Path) -> None:
    """No shell, no installer, nothing that changes the user: by the very commands of the file."""
    kept = {"/usr/local/bin/python3.11", "/usr/sbin/ldconfig", "/usr/lib/libc.so.6"}
    tools = ("bin/sh", "bin/apt-get", "bin/su", "bin/perl", "sbin/chroot", "local/bin/pip3")
    for name in (*kept, *(f"/usr/{tool}" for tool in tools)):
        path = tmp_path / name.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    [system] = of_stage("system", "RUN")
    for command in system.words.split("&&"):
        if command.split()[0] == "find":
            here = re.sub(r"(?<=\s)/usr/", f"{tmp_path}/usr/", command)
            subprocess.run(["/bin/sh", "-c", here], check=True)
    left = {f"/{path.relative_to(tmp_path)}" for path in tmp_path.rglob("*") if path.is_file()}
    assert left == kept


def test_what_is_copied_is_what_is_packaged() -> None:
    """The package, each folder that its links lead to, and what its making reads."""
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["tidemill"]
    linked = {str(path.readlink()) for path in (ROOT / "tidemill").iterdir() if path.is_symlink()}
    folders = {name.removeprefix("../") for name in linked}
    files = {"constraints.txt", "pyproject.toml", PROJECT["project"]["readme"]}
    assert {*packages, *folders, *files, *PROJECT["project"]["license-files"]} == COPIED


def test_a_server_listens_where_others_reach_it() -> None:
    """It listens on every address, and on SageMaker's port, which the image exposes."""
    environment = only("", "ENV").pairs
    assert environment["TIDEMILL_SERVER_HOST"] == "0.0.0.0"  # noqa: S104 - in its container
    assert environment["TIDEMILL_SERVER_PORT"] == only("", "EXPOSE").words == "8080"
