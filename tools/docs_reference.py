"""Write docs/reference/commands.md from the argument parsers.

python -m tools.docs_reference            # write the page; `make docs-reference` does the same
python -m tools.docs_reference --print    # print it
"""

# ruff: noqa: SLF001 - argparse has no public way to list arguments

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tidemill.cli.main import make_parser

PAGE: Final = Path(__file__).parents[1] / "docs/reference/commands.md"

_INTRODUCTION: Final = """\
# Commands and flags

`make docs-reference` generates this page from the parsers: it has the text of
`tidemill COMMAND --help`. Flags of several commands are listed once, in
[common flags](#common-flags) and [shared flags](#shared-flags). See also
[exit statuses](exit-statuses.md) and [environment variables](environment.md).

Flag names match vLLM's where vLLM has the same flag. A vLLM flag that changes nothing here is
accepted with a warning, a flag that would change rows is rejected, and an unknown flag's error
suggests the nearest known one.
"""
_UNNAMED: Final = frozenset({"positional arguments", "options", "actions"})
_COMMON: Final = 2
"""Number of commands from which on a row is among the common flags."""


class Row(NamedTuple):
    """One argument: its names with the metavariable, and its help."""

    names: str
    text: str


class Group(NamedTuple):
    """A titled group of arguments."""

    title: str
    rows: tuple[Row, ...]


class Command(NamedTuple):
    """One command or subcommand, and its groups in the order of its help."""

    name: str
    description: str
    groups: tuple[Group, ...]


def page() -> str:
    """Return the text of the page: each group and row that several commands share, once."""
    commands = [command for command in _commands(make_parser(), "") if command.name]
    shared = _shared(commands)
    rows = Counter(
        row
        for command in commands
        for group in command.groups
        if group not in shared
        for row in group.rows
        if row.names.startswith("`-")
    )
    common = [row for row, count in rows.items() if count >= _COMMON]
    companions = _companions(commands, shared)
    lines = [_INTRODUCTION]
    for command in commands:
        lines.append(f"{'###' if ' ' in command.name else '##'} {command.name}\n")
        if command.description:
            lines.append(f"{command.description}\n")
        lines += _parts(command, shared, companions, {*common})
    lines.append(f"## Common flags\n\n{_list(common)}")
    lines.append("## Shared flags\n")
    for group, title in shared.items():
        links = [_link(shared[it]) for it, first in companions.items() if first == group]
        note = f"Commands with these flags also have {' and '.join(links)}.\n\n" if links else ""
        lines.append(f"### {title}\n\n{note}{_list(group.rows)}")
    return "\n".join(lines).rstrip("\n") + "\n"


def _companions(commands: Iterable[Command], shared: Iterable[Group]) -> dict[Group, Group]:
    """Return the shared groups that have the same commands as an earlier one, with that one."""
    firsts: dict[tuple[str, ...], Group] = {}
    companions = {}
    for group in shared:
        users = tuple(it.name for it in commands if group in it.groups)
        if firsts.setdefault(users, group) != group:
            companions[group] = firsts[users]
    return companions


def _shared(commands: Iterable[Command]) -> dict[Group, str]:
    """Return the groups of several commands, each with a heading that no other part has."""
    users: dict[Group, list[str]] = {}
    for command in commands:
        for group in command.groups:
            users.setdefault(group, []).append(command.name)
    shared = {
        group: names
        for group, names in users.items()
        if len(names) > 1 and group.title not in _UNNAMED
    }
    titles = Counter([_title(group).lower() for group in shared])
    titles.update(command.name for command in commands)
    return {
        group: _title(group)
        if titles[_title(group).lower()] == 1
        else f"{_title(group)} of {' and '.join(names)}"
        for group, names in shared.items()
    }


def _parts(
    command: Command,
    shared: Mapping[Group, str],
    companions: Container[Group],
    common: set[Row],
) -> Iterator[str]:
    """Yield the arguments that only this command has, then links to the rest."""
    unnamed: list[Row] = []
    named: list[str] = []
    also: dict[str, list[str]] = {}
    grouped = {row: title for it, title in shared.items() for row in it.rows}
    linked = [each for each in command.groups if each in shared and each not in companions]
    for group in command.groups:
        if group in shared:
            continue
        whole = next((it for it in shared if {*it.rows} <= {*group.rows}), None)
        if whole is not None:
            linked.append(whole)
        elsewhere = {*(whole.rows if whole else ())}
        places = dict(grouped) if group.title in _UNNAMED else {}
        places |= dict.fromkeys(common, "common flags")
        own = [row for row in group.rows if row not in places.keys() | elsewhere]
        for row in group.rows:
            place = places.get(row)
            if place and row not in elsewhere:
                also.setdefault(place, []).append(row.names.split(" ")[0].rstrip("`,") + "`")
        if group.title in _UNNAMED:
            unnamed += own
        elif own:
            named.append(f"**{_title(group)}**\n\n{_list(own)}")
    if unnamed:
        yield _list(unnamed)
    yield from named
    links = [_link(shared[each]) for each in linked]
    links += [f"{_link(place)} {', '.join(names)}" for place, names in also.items()]
    if links:
        yield f"Also: {'; '.join(links)}.\n"


def _link(title: str) -> str:
    return f"[{title}](#{_anchor(title)})"


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
            Row(_names(action, formatter), _text(formatter, action))
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
        names[-1] = f"{names[-1][:-1]} {value}`"
    return ", ".join(names)


def _text(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """Return the help of an argument in one line, with flags in backticks."""
    text = re.sub(r"\s+", " ", formatter._expand_help(action) if action.help else "")
    spans = text.replace("<", "&lt;").split("`")
    spans[::2] = [re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", span) for span in spans[::2]]
    return "`".join(spans)


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


def _list(rows: Iterable[Row]) -> str:
    return "".join(f"- {row.names}{': ' if row.text else ''}{row.text}\n" for row in rows)


def _title(group: Group) -> str:
    title = re.split(r"[:,]", group.title)[0]
    return title[:1].upper() + title[1:]


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


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
