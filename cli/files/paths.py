"""What can be told about paths and URLs before anything is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from cli.commands.run import RunOptions
from cli.errors import Refused

STANDARD_STREAM = "-"


def is_url(name: str) -> bool:
    """Say whether the name is an http(s) URL; other schemes are refused by `check_paths`."""
    return name.lower().startswith(("http://", "https://"))


def is_path(name: str) -> bool:
    """Say whether the name is one in the file system."""
    return name != STANDARD_STREAM and not is_url(name)


def display_name(name: str, stream: str = "standard output") -> str:
    """Return the name as it may be shown: without a URL's user, query and fragment."""
    if name == STANDARD_STREAM:
        return stream
    if not is_url(name):
        return name
    parts = urlsplit(name)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_regular_or_new(path: Path) -> bool:
    """Say whether the path is an ordinary file or free for one; not a pipe or a device."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def check_paths(options: RunOptions) -> None:
    """Raise Refused for inputs and outputs that cannot work, before anything is opened."""
    _check_schemes(options)
    if is_path(options.input_file):
        _check_input(Path(options.input_file))
    if is_path(options.output_file):
        _check_output(Path(options.output_file), "the output")
    if options.error_file is not None:
        if not is_path(options.error_file):
            raise Refused("the error file must be a path, not a stream or a URL")
        _check_output(Path(options.error_file), "the error file")
        if not is_regular_or_new(Path(options.error_file)):
            raise Refused(f"the error file {options.error_file} is no ordinary file")
    _check_distinct(options)
    if options.output_tmp_dir is not None and not options.output_tmp_dir.is_dir():
        raise Refused(f"the folder {options.output_tmp_dir} of --output-tmp-dir does not exist")
    if options.resume and not (
        is_path(options.output_file) and is_regular_or_new(Path(options.output_file))
    ):
        raise Refused("--resume needs an output that is an ordinary file")


def _check_schemes(options: RunOptions) -> None:
    for name in (options.input_file, options.output_file, options.error_file or ""):
        scheme, separator, _ = name.partition("://")
        if separator and not is_url(name):
            raise Refused(f"{scheme}:// is not supported: give a path, - or an http(s) URL")
        if is_url(name) and not urlsplit(name).hostname:
            raise Refused(f"{display_name(name)} names no host")


def _check_input(path: Path) -> None:
    if not path.exists():
        raise Refused(f"the input {path} does not exist")
    if path.is_dir():
        raise Refused(f"the input {path} is a directory")
    if not os.access(path, os.R_OK):
        raise Refused(f"the input {path} may not be read")


def _check_output(path: Path, what: str) -> None:
    if path.is_dir():
        raise Refused(f"{what} {path} is a directory")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise Refused(f"{what} {path} is in a folder that does not exist: {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise Refused(f"{what} {path} may not be written")


def _check_distinct(options: RunOptions) -> None:
    named = [("input", options.input_file), ("output", options.output_file)]
    if options.error_file is not None:
        named.append(("error file", options.error_file))
    paths = [(role, Path(name)) for role, name in named if is_path(name)]
    for index, (role, path) in enumerate(paths):
        for other_role, other in paths[index + 1 :]:
            if _are_same(path, other):
                raise Refused(f"the {role} and the {other_role} are the same file: {path}")


def _are_same(path: Path, other: Path) -> bool:
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    return path.exists() and other.exists() and path.samefile(other)
