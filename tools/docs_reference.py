"""Write docs/reference/commands.md from the argument parsers.

    python -m tools.docs_reference            # write the page; `make docs-reference` does the same
    python -m tools.docs_reference --print    # print it
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tidemill.cli.main import make_parser

PAGE: Final = Path(__file__).parents[1] / "docs/reference/commands.md"

_INTRODUCTION: Final = """\
# Commands and flags

`make docs-reference` generates this page from the parsers, so it lists every command and flag.
`tidemill COMMAND --help` prints the same text. Groups of flags that several commands share are in
[shared flags](#shared-flags). [Exit statuses](exit-statuses.md) and
[environment variables](environment.md) have their own pages.

Flag names match vLLM's where vLLM has the same flag. A vLLM flag that changes nothing here is accepted
with a warning, a flag that would change rows is rejected, and an unknown flag's error suggests the
nearest known one. Flags can be written `--flag value` or `--flag=value`.
"""
_UNNAMED: Final = frozenset({"positional arguments", "options", "actions"})


class Group(NamedTuple):
    """A titled group of arguments: the rows of its table."""

    title: str
    rows: tuple[tuple[str, str], ...]


class Command(NamedTuple):
    """One command or subcommand, and its groups in the order of its help."""

    name: str
    description: str
    groups: tuple[Group, ...]


def page() -> str:
    """Return the text of the page."""
    commands = [command for command in _commands(make_parser(), "") if command.name]
    counts = Counter(group for command in commands for group in command.groups)
    shared = {group: _anchor(group) for group, count in counts.items() if _is_shared(group, count)}
    lines = [_INTRODUCTION]
    for command in commands:
        level = "###" if " " in command.name else "##"
        lines.append(f"{level} {command.name}\n")
        if command.description:
            lines.append(f"{command.description}\n")
        lines += [_table(group) for group in command.groups if group not in shared]
        if links := [f"[{_title(each)}](#{shared[each]})" for each in command.groups if each in shared]:
            lines.append(f"Shared flags: {', '.join(links)}.\n")
    lines.append("## Shared flags\n")
    lines += [f"### {_title(group)}\n\n{_rows(group)}" for group in shared]
    return "\n".join(lines).rstrip("\n") + "\n"


def _is_shared(group: Group, count: int) -> bool:
    return count > 1 and group.title not in _UNNAMED


def _commands(parser: argparse.ArgumentParser, name: str, text: str = "") -> Iterator[Command]:
    actions = [it for it in parser._actions if isinstance(it, argparse._SubParsersAction)]
    description = _description(parser.description or text)
    yield Command(name, description, tuple(_groups(parser)))
    for action in actions:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for each, subparser in action.choices.items():
            yield from _commands(subparser, f"{name} {each}".strip(), helps.get(each, ""))


def _groups(parser: argparse.ArgumentParser) -> Iterator[Group]:
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = tuple(
            (_names(action, formatter), _cell(formatter, action))
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
            and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        )
        if rows:
            yield Group(group.title or "options", rows)


def _names(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    names = [f"`{name}`" for name in action.option_strings]
    if action.nargs != 0:
        default = formatter._get_default_metavar_for_optional(action)
        value = formatter._format_args(action, default)
        names[-1] = f"{names[-1][:-1]} {value}`".replace("|", r"\|")
    return ", ".join(names)


def _cell(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    text = formatter._expand_help(action) if action.help else ""
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;")


def _description(text: str) -> str:
    """Return a description whose indented lines are a code block."""
    lines: list[str] = []
    is_code = False
    for line in text.strip().splitlines():
        if line.startswith("  ") != is_code:
            lines.append("```text" if not is_code else "```\n")
            is_code = not is_code
        lines.append(line)
    return "\n".join([*lines, "```"] if is_code else lines)


def _table(group: Group) -> str:
    heading = "" if group.title in _UNNAMED else f"**{_title(group)}**\n\n"
    return heading + _rows(group)


def _rows(group: Group) -> str:
    lines = [f"| {names} | {text} |" for names, text in group.rows]
    return "\n".join(["| argument | meaning |", "|---|---|", *lines]) + "\n"


def _title(group: Group) -> str:
    return group.title[:1].upper() + group.title[1:]


def _anchor(group: Group) -> str:
    return re.sub(r"[^\w -]", "", group.title.lower()).replace(" ", "-")


def main() -> int:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the page instead")
    if parser.parse_args().print:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
