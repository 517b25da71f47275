"""Import rules: the modules that each package may import, and that a start may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
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
GROUND = {"tidemill.batch", "tidemill.net", "tidemill.protocol"}
# In addition to the standard library and the wing itself. A name here is a dependency.
MAY_IMPORT = {
    # Only if an endpoint for spans is configured, and imported only for that.
    "net": {"opentelemetry"},
    # Jinja is for the template sandbox, pyarrow only for batch/table.
    "protocol": {"jinja2", "pydantic", "pydantic_core", "python_multipart", "tidemill.net"},
    "batch": {
        "annotated_types",
        "jinja2",
        "pyarrow",
        "pydantic",
        "pydantic_core",
        "tidemill.net",
        "tidemill.protocol",
    },
    "engine": GROUND
    | MODEL_LIBRARIES
    | {
        "PIL",
        "av",
        "gguf",
        "jinja2",
        "jsonschema",
        "lark",
        "llguidance",
        "pydantic",
        "pydantic_core",
        "pypdfium2",
        "regex",
        "soxr",
    },
    "server": GROUND
    | {
        "tidemill.dashboard",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "python_multipart",
        "starlette",
        "uvicorn",
    },
    "dashboard": GROUND | {"jinja2", "markupsafe", "pydantic", "pydantic_core"},
    "engine_process": GROUND | {"pydantic", "pydantic_core"},
    "handler": GROUND
    | {
        "tidemill.dashboard",
        "tidemill.engine_process",
        "aiobotocore",
        "aiohttp",
        "annotated_types",
        "aws_lambda_powertools",
        "boto3",
        "botocore",
        "httpx",
        # Only if OIDC tokens are accepted, and imported only for that.
        "jwt",
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
    """Return the dotted names of the modules that a file imports from outside its wing."""
    depth = len(path.relative_to(ROOT).parts) - 1
    found: set[str] = set()
    for node in statements_of(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= depth, f"{path}:{node.lineno}: relative out of its wing"
            if not node.level:
                found.add(str(node.module))
    return found


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a module, at any depth; expressions would take longer."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements_of(child)


def is_allowed(name: str, allowed: set[str]) -> bool:
    """Say whether `name` is in the standard library or in one of the allowed packages."""
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


def test_no_module_is_loaded_under_two_names() -> None:
    """In the repository `import engine` would also work, but the module is tidemill.engine."""
    wings = {path.name for path in (ROOT / "tidemill").iterdir() if path.is_symlink()}
    folders = [*wings, "infra", "localstack", "bench", "tools", "tests", "examples"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    bare = re.compile(rf"^\s*(from|import) ({'|'.join(wings)})\b", re.MULTILINE)
    assert "engine" in wings
    assert [
        str(path.relative_to(ROOT))
        for path in files
        if "node_modules" not in path.parts and bare.search(path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("room", "needed"),
    [
        ("protocol", "pydantic"),
        ("batch", "pydantic_core"),
        ("engine_process", "pydantic_core"),
    ],
)
def test_the_shared_packages_load_no_model_library(room: str, needed: str) -> None:
    """All of it loads in a process without torch, as in a Lambda.

    The exception is batch/table: pyarrow loads numpy.
    """
    paths = [path for path in (ROOT / room).rglob("*.py") if path.stem != "__init__"]
    paths = [path for path in paths if path.parent != ROOT / "batch/table"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths)]
    loaded = modules_loaded_by("\n".join(f"import tidemill.{name}" for name in names))
    assert names
    assert needed in loaded
    assert loaded & MODEL_LIBRARIES == set()


def test_the_command_line_starts_without_a_model_library() -> None:
    """`tidemill --help` is fast because its main module loads nothing heavy."""
    loaded = modules_loaded_by("import tidemill.cli.main")
    assert "tidemill" in loaded
    assert loaded & MODEL_LIBRARIES == set()


def test_a_program_that_runs_a_file_loads_no_command() -> None:
    """`tidemill.run` needs the flags of `tidemill run`, but no other commands."""
    script = (
        "import sys, tidemill; tidemill.run\n"
        "found = [name for name in sys.modules if name.startswith('tidemill.cli')]\n"
        "names = [getattr(tidemill, name).__module__ for name in tidemill.__all__]\n"
        "print(found, set(names), tidemill.Engine.__name__)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, text=True)
    assert done.stdout == "[] {'tidemill'} Engine\n"


def test_a_run_validates_its_files_before_torch_loads() -> None:
    """Errors appear within half a second; torch loads with the model."""
    loaded = modules_loaded_by(
        "import tidemill.offline.run.job, tidemill.engine.model.endpoint_names"
    )
    assert "tidemill" in loaded
    assert loaded & {"torch", "transformers", "triton", "numba"} == set()


def test_the_deployment_commands_need_no_cloud_library() -> None:
    """A plain `pip install tidemill` can submit: only drops need boto3."""
    names = (
        "tidemill.cli.batches.submission",
        "tidemill.cli.batches.batch_flags",
        "tidemill.cli.batches.rows",
        "tidemill.cli.batches.table",
    )
    loaded = modules_loaded_by(f"import {', '.join(names)}")
    assert "httpx" in loaded
    absent = {"aws_lambda_powertools", "boto3", "botocore", "llguidance"}
    assert loaded & (MODEL_LIBRARIES | absent) == set()


def test_constraints_are_checked_without_a_model_library() -> None:
    """The check loads only the constraint compiler."""
    loaded = modules_loaded_by("import tidemill.engine.structured_output.constraint_check")
    assert "llguidance" in loaded
    assert loaded & MODEL_LIBRARIES == set()
