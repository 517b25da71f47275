"""Unknown arguments: positional files, vLLM flags, and misspelt flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from ..console.errors import Refused
from ..console.terminal import log

_TAKE_FILES = ("tidemill run", "tidemill estimate")
_TAKE_VLLM_FLAGS = (*_TAKE_FILES, "tidemill serve")
_LIKENESS = 0.7


def parse_known(parser: argparse.ArgumentParser, typed: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments, with positional files in `files`; raises Refused."""
    parsed, unknown = parser.parse_known_args(typed)
    parsed.files = _sort_unknown(parser, typed, unknown)
    parsed.typed = typed
    return parsed


def _sort_unknown(
    parser: argparse.ArgumentParser, typed: Sequence[str], unknown: Sequence[str]
) -> list[str]:
    """Return the files among the unknown arguments, and warn about ignored flags.

    Raises Refused for an unknown flag, and for files that a command does not take.
    """
    if not unknown:
        return []
    command = _command_of(parser, typed)
    files, ignored = [], []
    for flag, value in _pairs(unknown):
        if not _is_flag(flag):
            if command.prog not in _TAKE_FILES:
                hint = template_hint([flag]) or f"see `{command.prog} --help`"
                raise Refused(f"unexpected argument {flag!r}: {hint}")
            files.append(flag)
            continue
        if command.prog not in _TAKE_VLLM_FLAGS:
            raise Refused(_nearest(flag, command))
        from .vllm_flags import is_ignored, replacement_for

        if is_ignored(flag, value):
            ignored.append(flag)
        elif words := replacement_for(flag):
            raise Refused(f"vLLM's {flag} is not supported: {words}")
        else:
            raise Refused(_nearest(flag, command))
    if ignored:
        log(f"warning: vLLM flags without effect here: {', '.join(ignored)}")
    return files


def template_hint(words: Sequence[str]) -> str:
    """Return how to quote a template in the shell, if a word is a part of one; otherwise empty."""
    if not any("{{" in word or "}}" in word for word in words):
        return ""
    return (
        "put single quotes around a template and double quotes inside it, as in "
        """--prompt '{{ row["Review text"] }}'"""
    )


def expand_positional_model(typed: Sequence[str]) -> Sequence[str]:
    """Expand `serve MODEL`, as in vLLM, and `models MODEL` to `--model MODEL`."""
    match typed:
        case ["serve" | "models" as command, model, *rest] if (
            not model.startswith("-") and "--model" not in rest
        ):
            return [command, "--model", model, *rest]
    return typed


def _pairs(unknown: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag with its value, if it has one, and each other word with None."""
    from .vllm_flags import is_switch

    tokens = [token for token in unknown if token != "--"]
    while tokens:
        token = tokens.pop(0)
        flag, separator, value = token.partition("=")
        if not _is_flag(token):
            yield token, None
        elif separator:
            yield flag, value
        elif is_switch(flag) or not tokens or tokens[0].startswith("-"):
            yield flag, None
        else:
            yield flag, tokens.pop(0)


def _is_flag(token: str) -> bool:
    return token.startswith("-") and token != "-"


def _nearest(flag: str, command: argparse.ArgumentParser) -> str:
    flags = [name for action in command._actions for name in action.option_strings]  # noqa: SLF001
    message = f"`{command.prog}` has no {flag}"
    near = get_close_matches(flag.replace("_", "-"), flags, n=1, cutoff=_LIKENESS)
    if near:
        return f"{message}: did you mean {near[0]}?"
    return f"{message}: see `{command.prog} --help`"


def _command_of(parser: argparse.ArgumentParser, typed: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the typed command, or of its action."""
    for word in typed:
        for action in parser._actions:  # noqa: SLF001 - there is no public API
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:  # noqa: SLF001
                parser = action.choices[word]
                break
    return parser
