"""Words of transformers' code by model type: the table of config fields that it may read.

    python -m bench.transformers_fields [--write]

Write the table again after adding a family or moving the pin of transformers.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name

from tidemill.engine.model.config.transformers_fields import FILE
from tidemill.engine.model.encoders.families import FAMILIES as ENCODERS
from tidemill.engine.model.families.registry import FAMILIES

ROOT = Path(transformers.__file__).parent
# Code that every class runs: it reads fields by `getattr`, too.
SHARED_MODULES = (
    *("activations.py", "cache_utils.py", "configuration_utils.py", "core_model_loading.py"),
    *("masking_utils.py", "modeling_attn_mask_utils.py", "modeling_flash_attention_utils.py"),
    *("modeling_layers.py", "modeling_rope_utils.py", "modeling_utils.py", "pytorch_utils.py"),
    *("utils/generic.py", "utils/output_capturing.py"),
    # Not code for training, other weight formats, or quantisation.
    *("integrations/*attention*.py", "integrations/*paged*.py", "integrations/accelerate.py"),
    *("integrations/deepgemm.py", "integrations/heterogeneity/*.py", "integrations/hub_kernels.py"),
    *("integrations/moe.py", "integrations/mxfp4.py", "integrations/sonicmoe.py"),
    "integrations/tensor_parallel.py",
)
# Types whose classes belong to another type.
SAME_CLASSES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
DEFAULTS = ("max_position_embeddings", "num_key_value_heads", "rms_norm_eps")
# A docstring or another long string; a comment; a string; a word.
_TOKEN = re.compile(
    r'(?P<text>"""[\s\S]*?"""|' + r"'''[\s\S]*?''')"
    r"|(?P<comment>\#.*)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*')"
    r"|(?P<word>[A-Za-z_]\w*)"
)
# Names of classes and constants are left out: no field begins with a capital.
_WORD = re.compile(r"\b[a-z_]\w*")
_IMPORT = re.compile(r"^from \.+models\.(\w+)|^from \.\.(\w+)\.", re.MULTILINE)


def table() -> dict[str, Any]:
    """Return the words of all classes, and each type's own words and its class's defaults."""
    shared = set[str]().union(*map(_words, _files(ROOT, SHARED_MODULES)))
    words: dict[str, str] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for kind in sorted({*FAMILIES, *ENCODERS}):
        own = SAME_CLASSES.get(kind, kind)
        words[kind] = " ".join(sorted(_words_of_type(own) - shared))
        if kind in FAMILIES and (found := _defaults(own, FAMILIES[kind].renamed)):
            defaults[kind] = found
    return {
        "transformers": transformers.__version__,
        "defaults": defaults,
        "shared": " ".join(sorted(shared)),
        "words": words,
    }


def as_text(content: Mapping[str, Any]) -> str:
    """Return the table as it is stored."""
    return json.dumps(content, indent=1) + "\n"


def _defaults(kind: str, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults of a config class, by the names that most families have for fields."""
    names = {key: renamed.get(key, key) for key in (*DEFAULTS, *renamed)}
    found = {
        names[field]: default
        for field, default in _class_fields(kind)
        if names.get(field) in DEFAULTS and default is not None
    }
    return dict(sorted(found.items()))


def _class_fields(kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a type's config class that have a constant default, with that."""
    folder = ROOT / "models" / model_type_to_module_name(kind)
    for path in _files(folder, ("configuration_*.py",)):
        for node in ast.parse(_source(path)).body:
            body = node.body if isinstance(node, ast.ClassDef) else []
            values = [(target, value) for one in body for target, value in _assigned(one)]
            if ("model_type", kind) in values:
                yield from values


def _assigned(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, _constant(getattr(node, "value", None))


def _constant(node: ast.AST | None) -> Any:
    """Return a constant or a product of constants; None for any other expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _constant(node.left) * _constant(node.right)
    return node.value if isinstance(node, ast.Constant) else None


def _words_of_type(kind: str) -> set[str]:
    """Return the words of a type's modules, and of other types' modules that these import."""
    return set[str]().union(*map(_words, _modules(model_type_to_module_name(kind))))


def _modules(folder: str) -> Iterator[Path]:
    pending, seen = [folder], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name == "auto":
            continue
        seen.add(name)
        for path in _files(ROOT / "models" / name, ("configuration_*.py", "modeling_*.py")):
            yield path
            pending += [one or other for one, other in _IMPORT.findall(_source(path))]


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    files = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    assert files, folder
    return files


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _words(path: Path) -> frozenset[str]:
    """Return the words of a module's code and one-line strings."""
    words = set[str]()
    for token in _TOKEN.finditer(_source(path)):
        if token.lastgroup in ("string", "word"):
            words.update(_WORD.findall(token[0].replace("\\n", " ")))
    return frozenset(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog="python -m bench.transformers_fields")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    if parser.parse_args(arguments).write:
        FILE.write_text(as_text(table()), encoding="utf-8")
    else:
        sys.stdout.write(as_text(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
