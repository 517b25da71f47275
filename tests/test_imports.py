"""What each package may import, and what a start may load: the walls that other parts rely on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL_LIBRARIES = {
    "huggingface_hub",
    "llvmlite",
    "numba",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
}
# Beside the standard library. Whoever adds a name here adds a dependency to that package.
MAY_IMPORT = {
    "engine/hosts": {"engine.hosts"},
    "engine/protocol": {"engine.hosts", "engine.protocol", "pydantic", "pydantic_core"},
    "engine/batchfile": {
        "engine.batchfile",
        "engine.contract",
        "engine.errors",
        "engine.protocol",
        "pydantic_core",
    },
    "engine": MODEL_LIBRARIES
    | {
        "PIL",
        "av",
        "engine",
        "jinja2",
        "jsonschema",
        "lark",
        "llguidance",
        "pydantic",
        "pydantic_core",
        "regex",
        "soxr",
    },
    "server": {
        "engine.backpressure",
        "engine.batchfile",
        "engine.contract",
        "engine.errors",
        "engine.hosts",
        "engine.protocol",
        "handler.batch",
        "handler.errors",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "python_multipart",
        "server",
        "starlette",
        "uvicorn",
    },
    "handler": {
        "aiobotocore",
        "aiohttp",
        "annotated_types",
        "aws_lambda_powertools",
        "boto3",
        "botocore",
        "engine.batchfile",
        "engine.contract",
        "engine.hosts",
        "engine.process.frames",
        "engine.process.liveness",
        "engine.protocol",
        "handler",
        "httpx",
        "jinja2",
        "markupsafe",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "python_multipart",
        "s3transfer",
        "typing_extensions",
        "urllib3",
    },
}


def imported_names(path: Path) -> set[str]:
    """Return the dotted names of the modules that the file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.add(str(node.module))
    return found


def is_allowed(name: str, allowed: set[str]) -> bool:
    """Say whether `name` is of the standard library or lies in one of the allowed packages."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or any(
        name == package or name.startswith(f"{package}.") for package in allowed
    )


def modules_loaded_by(statement: str) -> set[str]:
    """Return the top-level names in sys.modules of a fresh interpreter after `statement`."""
    printing = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    process = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{printing}"],
        capture_output=True,
        check=True,
        cwd=ROOT,
        text=True,
    )
    return set(process.stdout.split())


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    """Every import of the package is of the standard library or on the package's list."""
    files = sorted((ROOT / package).rglob("*.py"))
    strays = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imported_names(path))
        if not is_allowed(name, MAY_IMPORT[package])
    ]
    assert files
    assert strays == []


@pytest.mark.parametrize(
    ("room", "needed"),
    [("batchfile", "pydantic_core"), ("process", "pydantic_core"), ("protocol", "pydantic")],
)
def test_the_wire_types_load_no_model_library(room: str, needed: str) -> None:
    """All of the room loads in a process that has no torch, as in a Lambda."""
    names = sorted(path.stem for path in (ROOT / "engine" / room).glob("*.py"))
    modules = [f"engine.{room}.{name}" for name in names if name != "__init__"]
    loaded = modules_loaded_by("\n".join(f"import {module}" for module in modules))
    assert modules
    assert needed in loaded
    assert loaded & MODEL_LIBRARIES == set()


def test_the_command_line_starts_without_a_model_library() -> None:
    """`tidemill --help` answers at once because cli.main alone loads nothing heavy."""
    loaded = modules_loaded_by("import cli.main")
    assert "cli" in loaded
    assert loaded & MODEL_LIBRARIES == set()


def test_the_commands_for_a_deployment_need_no_library_of_the_cloud() -> None:
    """A plain `pip install tidemill` can submit: only drops use AWS's own client."""
    names = (
        "cli.batches.submission",
        "cli.batches.options",
        "cli.batches.rows",
        "cli.batches.table",
    )
    loaded = modules_loaded_by(f"import {', '.join(names)}")
    assert "httpx" in loaded
    assert loaded & (MODEL_LIBRARIES | {"aws_lambda_powertools", "boto3", "botocore"}) == set()
