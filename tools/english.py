"""Find English that a native engineer would not write: in strings, comments, docs and names.

    python -m tools.english                   # all tracked files; exit status 1 where one is found
    python -m tools.english engine docs       # some of them
    python -m tools.english --count           # how many of each pattern

An exception is a line of `tools/english_allowed.txt`: a path, a tab, and a part of the line.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_ALLOWED: Final = Path(__file__).with_name("english_allowed.txt")
_SELF: Final = "tools/english"

# Each pattern, with its replacement; in text, and in the names of tests, read as sentences.
PATTERNS: Final[dict[str, str]] = {
    r"(?<!there )\b(is|are|was|were) no (?!(longer|more|less|better|worse|fewer)\b)\w": "is not a",
    r"\banew\b": "again, from scratch",
    r"\bbeside\b": "next to, in addition to, compared with",
    r"\b(told|tells|said|says so|asked|asks)\b": "the fact itself: reports, contains, requested",
    r"\bso (long|many)\b(?! as\b| that\b)": "the number or the time itself",
    r"\bbut for\b": "except",
    r"\b(whoever|nobody|somebody)\b": "the noun: a client, a caller, no process",
    r"\b(stands|lies|lay|lie)\b(?! (for|in for|between)\b)": "is, contains, is stored",
    r"(?:^|[.!?:] +|\"\"\")Of (?:a|an|the|each|its|those|these|which|one|two|what)\b": (
        "subject, verb, object"
    ),
    r"\bof (its|their) own\b": "its own, a separate",
    r"\bbrakes?\b": "circuit breaker",
    r"\bmeanwhile\.": "in the meantime",
    r"\b(that|those) which\b": "the noun",
}
_TEXT: Final = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in PATTERNS.items()}
# A docstring is a sentence: it starts with its subject or its verb.
_FRAGMENT: Final = re.compile(
    r"(What|Who|Whose|Whether|That|Those|Also|And|As|But|Nor|Or|Not|Of|Where)\b[^?]*?[.:;]",
    re.DOTALL,
)
_NAMES: Final = frozenset(
    {"said", "asked", "told", "heard", "anew", "beside", "nobody", "somebody"}
)
_PROSE: Final = frozenset({".md", ".html", ".js", ".mjs", ".css", ".toml", ".yaml", ".tpl", ".sh"})
_FENCE: Final = re.compile(r"^\s*```")


class Finding(NamedTuple):
    """One place: a tracked file, the number of its line, the text found, and the advice."""

    path: str
    line: int
    text: str
    advice: str


def find(path: str) -> Iterator[Finding]:
    """Yield the findings of one file, in the order of its lines for each kind of check."""
    text = Path(path).read_text()
    if path.endswith(".py"):
        yield from _in_python(path, text)
    else:
        is_code = False
        for number, line in enumerate(text.splitlines(), 1):
            if path.endswith(".md") and _FENCE.match(line):
                is_code = not is_code
            elif not is_code:
                yield from _in_text(path, number, line)


def _in_text(path: str, number: int, line: str) -> Iterator[Finding]:
    for pattern, advice in _TEXT.items():
        for match in pattern.finditer(line):
            yield Finding(path, number, match[0].strip(), advice)


def _in_python(path: str, text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING}:
            for offset, line in enumerate(token.string.splitlines()):
                yield from _in_text(path, token.start[0] + offset, line)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_docstring(path, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _in_name(path, node.lineno, node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from _in_name(path, node.lineno, node.id)
        elif isinstance(node, ast.arg):
            yield from _in_name(path, node.lineno, node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _in_name(path, node.lineno, node.attr)


def _in_docstring(
    path: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Finding]:
    docstring = ast.get_docstring(node)
    if docstring and (match := _FRAGMENT.match(docstring)):
        line = node.body[0].lineno
        yield Finding(path, line, match[1], "a sentence: its subject first, or its verb")


def _in_name(path: str, number: int, name: str) -> Iterator[Finding]:
    words = name.lower().strip("_").split("_")
    if name.startswith("test_"):
        yield from _in_text(path, number, " ".join(words[1:]))
    elif unwanted := _NAMES.intersection(words):
        yield Finding(path, number, name, f"the noun that it holds, not {', '.join(unwanted)}")


def tracked(folders: list[str]) -> list[str]:
    """Return the tracked files that people read, except this one."""
    listed = subprocess.run(  # noqa: S603
        ["git", "ls-files", "-z", "--", *folders],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    )
    return [
        path
        for path in listed.stdout.split("\0")
        if (Path(path).suffix in _PROSE | {".py"} or Path(path).name == "Makefile")
        and not path.startswith(_SELF)
        and Path(path).is_file()
    ]


def main() -> int:
    """Print the findings, or their counts; return 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="look at these only (default: everything)")
    parser.add_argument("--count", action="store_true", help="print counts instead of places")
    arguments = parser.parse_args()
    allowed = [line.split("\t") for line in _ALLOWED.read_text().splitlines() if "\t" in line]
    findings = []
    for path in tracked(arguments.folders):
        lines = Path(path).read_text().splitlines()
        texts = [text for allowed_path, text in allowed if allowed_path == path]
        findings += [
            finding
            for finding in find(path)
            if not any(text in lines[finding.line - 1] for text in texts)
        ]
    if arguments.count:
        for advice, count in Counter(
            finding.advice.partition(", not ")[0] for finding in findings
        ).most_common():
            print(f"{count:6} {advice}")
    else:
        for finding in findings:
            print(f"{finding.path}:{finding.line}: {finding.text!r}: {finding.advice}")
    print(f"{len(findings)} found.", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
