"""`tidemill completion`: shell completion scripts for bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from tidemill.offline.console.terminal import print_output

_DESCRIPTION = """\
Print a script for shell completion of tidemill's commands and flags:
  bash   source <(tidemill completion bash)          in ~/.bashrc
  zsh    source <(tidemill completion zsh)           in ~/.zshrc, after compinit
  fish   tidemill completion fish | source           in ~/.config/fish/config.fish
"""
Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it


@dataclass(frozen=True, slots=True)
class _Position:
    """Completions after the commands in `path`, such as `keys create`; empty at the start."""

    path: str
    commands: Mapping[str, str]
    flags: tuple[argparse.Action, ...]
    values: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Return all fixed words: commands, values and flags."""
        flags = [name for flag in self.flags for name in flag.option_strings]
        return [*self.commands, *self.values, *flags]


def add_command(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `completion` to the command line; its script covers all commands in `commands`."""
    parser = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    parser.set_defaults(command=partial(command, commands))


def command(commands: Commands[argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    """Print the script."""
    names = _names(commands)
    top = _Position("", names, (), ("--help", "--version"))
    positions = [top, *(position for name in names for position in _positions(name, commands))]
    print_output("\n".join(_SCRIPTS[arguments.shell](positions)))
    return 0


def _names(commands: Commands[argparse.ArgumentParser]) -> dict[str, str]:
    return {choice.dest: choice.help or "" for choice in commands._choices_actions}  # noqa: SLF001


def _positions(
    name: str, commands: Commands[argparse.ArgumentParser], path: str = ""
) -> Iterator[_Position]:
    here = f"{path} {name}".strip()
    actions = commands.choices[name]._actions  # noqa: SLF001 - nor a public way to list those
    below = [action for action in actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    flags = tuple(
        action for action in actions if action.option_strings and action.help != argparse.SUPPRESS
    )
    # A destructive command gets no suggestions.
    is_destructive = getattr(commands.choices[name], "is_destructive", False)
    values = [str(each) for action in actions if not is_destructive for each in _values_of(action)]
    inner = _names(below[0]) if below else {}
    yield _Position(here, inner, flags, tuple(values))
    for each in inner:
        yield from _positions(each, below[0], here)


def _values_of(action: argparse.Action) -> tuple[str, ...]:
    """Return the values of a positional argument."""
    if action.option_strings or isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
        return ()
    return ("@last",) if action.dest == "id" else tuple(action.choices or ())


def _bash(positions: list[_Position]) -> Iterator[str]:
    yield from (
        "_tidemill() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local place="" word',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
    )
    yield from _walk(positions, "$word")
    yield "  done"
    yield from _choose(positions, "$before", 'COMPREPLY=($(compgen -W "{}" -- "$cur")); return')
    yield '  case "$place" in'
    for position in positions:
        yield f'    "{position.path}") word="{" ".join(position.words)}" ;;'
    # Without words the shell completes files.
    only = "|".join(
        f'"{position.path}"' for position in positions if position.commands or position.values
    )
    yield from (
        "  esac",
        f'  case "$place" in {only}) ;; *) [[ $cur == -* ]] || return ;; esac',
        '  COMPREPLY=($(compgen -W "$word" -- "$cur"))',
        "}",
        "complete -o default -F _tidemill tidemill",
    )


def _zsh(positions: list[_Position]) -> Iterator[str]:
    yield from (
        "_tidemill() {",
        '  local place="" i',
        "  for (( i = 2; i < CURRENT; i++ )); do",
    )
    yield from _walk(positions, "$words[i]")
    yield "  done"
    yield from _choose(positions, "$words[CURRENT-1]", "compadd -- {}; return")
    yield '  case "$place" in'
    for position in positions:
        always = bool(position.commands or position.values)
        guard = "" if always else "[[ $PREFIX == -* ]] && "
        yield f'    "{position.path}") {guard}compadd -- {" ".join(position.words)} && return ;;'
    yield from ("  esac", "  _files", "}", "compdef _tidemill tidemill")


def _walk(positions: list[_Position], word: str) -> Iterator[str]:
    """Yield the code that finds the typed commands."""
    known = "|".join(
        f'" {position.path}"'
        for position in positions
        if " " not in position.path and position.path
    )
    inner = "|".join(f'"{position.path}"' for position in positions if " " in position.path)
    yield f'    case "$place {word}" in {known}|{inner}) place="${{place:+$place }}{word}" ;; esac'


def _choose(positions: list[_Position], before: str, action: str) -> Iterator[str]:
    """Yield the code that completes the choices of a flag."""
    yield f'  case "$place|{before}" in'
    for position in positions:
        for flag in position.flags:
            if flag.choices:
                names = "|".join(f'"{position.path}|{name}"' for name in flag.option_strings)
                yield f"    {names}) {action.format(' '.join(map(str, flag.choices)))} ;;"
    yield "  esac"


def _fish(positions: list[_Position]) -> Iterator[str]:
    for position in positions:
        words = position.path.split()
        seen = [f"__fish_seen_subcommand_from {word}" for word in words]
        not_yet = [f"not __fish_seen_subcommand_from {' '.join(position.commands)}"]
        here = "; and ".join([*seen, *(not_yet if position.commands else [])])
        start = f"complete -c tidemill -n '{here}'"
        for name, help_text in position.commands.items():
            yield f"{start} -f -a {name} -d {_quoted(help_text)}"
        for value in position.values:
            yield f"{start} -f -a {_quoted(value)}"
        for flag in position.flags:
            yield f"{start} {_fish_flag(flag)}"


def _fish_flag(flag: argparse.Action) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
        for name in flag.option_strings
    )
    takes = "" if flag.nargs == 0 else " -r"
    if flag.choices:
        takes = f" -x -a {_quoted(' '.join(map(str, flag.choices)))}"
    return f"{names}{takes} -d {_quoted((flag.help or '').replace('%%', '%'))}"


def _quoted(text: str) -> str:
    """Quote a word for fish, which knows two escapes in single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS: dict[str, Callable[[list[_Position]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
