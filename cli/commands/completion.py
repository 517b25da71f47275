"""`tidemill completion`: what a shell loads so that Tab completes commands, flags and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from cli.terminal import put

_DESCRIPTION = """\
Prints a script that lets a shell complete tidemill's commands and flags:
  bash   source <(tidemill completion bash)          in ~/.bashrc
  zsh    source <(tidemill completion zsh)           in ~/.zshrc, after compinit
  fish   tidemill completion fish | source           in ~/.config/fish/config.fish
"""
Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it


@dataclass(frozen=True, slots=True)
class _Place:
    """What may be typed after some commands: `path` is `keys create`, and empty before any."""

    path: str
    commands: Mapping[str, str]
    flags: tuple[argparse.Action, ...]
    values: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Return all of it that stands for itself."""
        flags = [name for flag in self.flags for name in flag.option_strings]
        return [*self.commands, *self.values, *flags]


def add_command(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `completion` to the command line; it tells of all commands that are there by then."""
    parser = commands.add_parser(
        "completion",
        help="completion for bash, zsh and fish",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    parser.set_defaults(command=partial(command, commands))


def command(commands: Commands[argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    """Print the script."""
    names = _names(commands)
    top = _Place("", names, (), ("--help", "--version"))
    places = [top, *(place for name in names for place in _places(name, commands))]
    put("\n".join(_SCRIPTS[arguments.shell](places)))
    return 0


def _names(commands: Commands[argparse.ArgumentParser]) -> dict[str, str]:
    return {choice.dest: choice.help or "" for choice in commands._choices_actions}  # noqa: SLF001


def _places(
    name: str, commands: Commands[argparse.ArgumentParser], path: str = ""
) -> Iterator[_Place]:
    here = f"{path} {name}".strip()
    actions = commands.choices[name]._actions  # noqa: SLF001 - nor a way to ask for those
    below = [action for action in actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    flags = tuple(
        action for action in actions if action.option_strings and action.help != argparse.SUPPRESS
    )
    values = [str(value) for action in actions for value in _values_of(action)]
    inner = _names(below[0]) if below else {}
    yield _Place(here, inner, flags, tuple(values))
    for each in inner:
        yield from _places(each, below[0], here)


def _values_of(action: argparse.Action) -> tuple[str, ...]:
    """Return what may stand in a position."""
    if action.option_strings or isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
        return ()
    return ("@last",) if action.dest == "id" else tuple(action.choices or ())


def _bash(places: list[_Place]) -> Iterator[str]:
    yield from (
        "_tidemill() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local place="" word',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
    )
    yield from _walk(places, "$word")
    yield "  done"
    yield from _choose(places, "$before", 'COMPREPLY=($(compgen -W "{}" -- "$cur")); return')
    yield '  case "$place" in'
    for place in places:
        yield f'    "{place.path}") word="{" ".join(place.words)}" ;;'
    # No words, and the shell's own completion of files follows.
    only = "|".join(f'"{place.path}"' for place in places if place.commands or place.values)
    yield from (
        "  esac",
        f'  case "$place" in {only}) ;; *) [[ $cur == -* ]] || return ;; esac',
        '  COMPREPLY=($(compgen -W "$word" -- "$cur"))',
        "}",
        "complete -o default -F _tidemill tidemill",
    )


def _zsh(places: list[_Place]) -> Iterator[str]:
    yield from (
        "_tidemill() {",
        '  local place="" i',
        "  for (( i = 2; i < CURRENT; i++ )); do",
    )
    yield from _walk(places, "$words[i]")
    yield "  done"
    yield from _choose(places, "$words[CURRENT-1]", "compadd -- {}; return")
    yield '  case "$place" in'
    for place in places:
        always = bool(place.commands or place.values)
        guard = "" if always else "[[ $PREFIX == -* ]] && "
        yield f'    "{place.path}") {guard}compadd -- {" ".join(place.words)} && return ;;'
    yield from ("  esac", "  _files", "}", "compdef _tidemill tidemill")


def _walk(places: list[_Place], word: str) -> Iterator[str]:
    """Yield what follows the commands that were typed."""
    known = "|".join(f'" {place.path}"' for place in places if " " not in place.path and place.path)
    inner = "|".join(f'"{place.path}"' for place in places if " " in place.path)
    yield f'    case "$place {word}" in {known}|{inner}) place="${{place:+$place }}{word}" ;; esac'


def _choose(places: list[_Place], before: str, action: str) -> Iterator[str]:
    """Yield what offers the values of a flag that has them."""
    yield f'  case "$place|{before}" in'
    for place in places:
        for flag in place.flags:
            if flag.choices:
                names = "|".join(f'"{place.path}|{name}"' for name in flag.option_strings)
                yield f"    {names}) {action.format(' '.join(map(str, flag.choices)))} ;;"
    yield "  esac"


def _fish(places: list[_Place]) -> Iterator[str]:
    for place in places:
        words = place.path.split()
        seen = [f"__fish_seen_subcommand_from {word}" for word in words]
        not_yet = [f"not __fish_seen_subcommand_from {' '.join(place.commands)}"]
        here = "; and ".join([*seen, *(not_yet if place.commands else [])])
        start = f"complete -c tidemill -n '{here}'"
        for name, told in place.commands.items():
            yield f"{start} -f -a {name} -d {_quoted(told)}"
        for value in place.values:
            yield f"{start} -f -a {_quoted(value)}"
        for flag in place.flags:
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
    """Return a word for fish, which knows two escapes between single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS: dict[str, Callable[[list[_Place]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
