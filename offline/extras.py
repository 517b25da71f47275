"""Optional dependencies (extras): checked before a command, with the command to install them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from .console.errors import CliError

# Modules of the extras in pyproject.toml.
MODULES = MappingProxyType(
    {
        "engine": (
            *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy"),
            *("numba", "llguidance", "lark", "jsonschema", "jinja2", "regex", "av", "soxr", "PIL"),
            "gguf",
        ),
        "tables": ("jinja2", "pyarrow"),
        "datasets": ("datasets",),
        "delta": ("deltalake",),
        "iceberg": ("pyiceberg",),
        "daft": ("daft",),
        "spark": ("pandas", "pyspark"),
        "ray": ("ray",),
        "pdf": ("pypdfium2",),
        "serve": ("starlette", "uvicorn", "uvloop", "httptools", "python_multipart"),
        "cloud": ("boto3", "aiobotocore", "aws_lambda_powertools", "python_multipart"),
    }
)

_CHECKOUT = Path(__file__).parents[2]
_MAX_NAMED = 3


def require_extras(what: str, *extras: str) -> None:
    """Raise CliError if a module of these extras is missing; nothing is imported."""
    modules = dict.fromkeys(module for extra in extras for module in MODULES[extra])
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise not_installed(what, missing, *extras)


def not_installed(what: str, modules: Sequence[str], *extras: str) -> CliError:
    """Return the error with the missing modules and the command to install them."""
    named = ", ".join(modules[:_MAX_NAMED])
    more = len(modules) - _MAX_NAMED
    are = "is" if len(modules) == 1 else "are"
    return CliError(
        f"{what} needs {named}{f' and {more} more' if more > 0 else ''}, which {are} not "
        f"installed: {_install_command(extras)}"
    )


def _install_command(extras: Sequence[str]) -> str:
    """Return the command that installs extras here; no package index has Tidemill."""
    has_pip = find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip", "install"]
    command = pip if has_pip else ["uv", "pip", "install", "--python", sys.executable]
    names = f"[{','.join(extras)}]"
    if (_CHECKOUT / "pyproject.toml").is_file():
        constraints = ["-c", str(_CHECKOUT / "constraints.txt")]
        return shlex.join([*command, *constraints, "-e", f"{_CHECKOUT}{names}"])
    if (source := _installed_from()) is not None:
        return shlex.join([*command, f"tidemill{names} @ {source}"])
    return f"in a checkout of Tidemill, {shlex.join([*command, '-e', f'.{names}'])}"


def _installed_from() -> str | None:
    """Return the URL that the package was installed from; None if unknown or gone."""
    try:
        recorded = metadata.distribution("tidemill").read_text("direct_url.json")
        source = json.loads(recorded or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = source.get("url")
    if url is None:
        return None
    if "vcs_info" in source:
        return f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    return None if url.startswith("file://") and not _path_of(url).exists() else url


def _path_of(url: str) -> Path:
    from urllib.parse import unquote, urlsplit

    return Path(unquote(urlsplit(url).path))
