"""Checks of input and output paths and URLs, before anything is read."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..arguments.dataset_id import DatasetId, is_dataset
from ..console.errors import Refused
from .s3_object import S3Object, is_s3
from .shard import Shard

STANDARD_STREAM = "-"
CARD_SUFFIX = ".card.json"
SPOOL_SUFFIX = ".spool"

_MAX_NAMED = 3


def is_url(name: str) -> bool:
    """Return whether the name is an http(s) URL; `check_paths` refuses other schemes."""
    return name.lower().startswith(("http://", "https://"))


def is_remote(name: str) -> bool:
    """Return whether the name is an http(s) or s3 URL."""
    return is_url(name) or is_s3(name)


def is_path(name: str) -> bool:
    """Return whether the name is a path in the file system."""
    return name != STANDARD_STREAM and not is_remote(name) and not is_dataset(name)


def display_name(name: str, stream: str = "standard output") -> str:
    """Return a printable name: a URL without user, query and fragment, which may be secret."""
    if name == STANDARD_STREAM:
        return stream
    if not is_url(name):
        return name
    parts = urlsplit(name)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def path_next_to(file: str, kind: str) -> str:
    """Return the path of a file's rows, such as `a/b.output.jsonl` for `a/b.jsonl.gz`.

    For an input outside the file system, it is in the working folder.
    """
    if is_path(file):
        path = Path(file)
        path = path if path.name else path.resolve()  # `.` gets its name from the resolved path
    elif is_dataset(file):
        path = Path(DatasetId.parse(file).name)
    else:
        path = Path(Path(urlsplit(file).path).name or "batch" if is_remote(file) else "batch")
    stem = path.name.removesuffix(".gz")
    for suffix in (".jsonl", ".ndjson", ".json"):
        stem = stem.removesuffix(suffix)
    return str(path.parent / f"{stem}.{kind}.jsonl")


def card_path(output: Path) -> Path:
    """Return the path of the run card of an output.

    The output's suffix is omitted unless another output already has the card of that name.
    """
    stem = output.name
    if output.suffix in {".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".arrow"}:
        other = _output_of_card(output.with_name(output.stem + CARD_SUFFIX))
        stem = output.stem if other in {None, output.name} else output.name
    return output.with_name(stem + CARD_SUFFIX)


def spool_path(output: Path) -> Path:
    """Return the path of an output's spool, which stores rows that wait for earlier ones."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + SPOOL_SUFFIX)


def _output_of_card(card: Path) -> str | None:
    """Return the name of a card's output; None if the card cannot be read."""
    try:
        return Path(json.loads(card.read_bytes())["output"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None


def name_files(
    input_file: str | None, output_file: str | None, files: Sequence[str]
) -> tuple[str, str]:
    """Return input and output of a run; `files` are positional arguments.

    The default output of a file is next to it, that of standard input is standard output.
    Raises Refused without an input, or with several.
    """
    named = [*files] if input_file is None else [input_file, *files]
    if not named:
        raise Refused(
            "no input: pass the file to run before any flags, as in `tidemill run requests.jsonl`"
        )
    if len(named) > 1:
        from ..arguments.unknown_flags import template_hint

        shown = ", ".join(named[:_MAX_NAMED]) + (", …" if len(named) > _MAX_NAMED else "")
        hint = template_hint(named) or (
            "run each of them, or all lines of JSONL files together: "
            "cat FILES | tidemill run - -o rows.jsonl; for tables, pass a folder"
        )
        raise Refused(f"a run takes one file, but {len(named)} were given ({shown}): {hint}")
    name = named[0]
    if not name:
        raise Refused("the input's name is empty: give the path of a file")
    is_folder = is_path(name) and Path(name).is_dir()
    if output_file is None and is_path(name) and not (is_folder or is_regular_or_new(Path(name))):
        _check_input(Path(name))
        raise Refused(f"the input {name} is not a regular file: choose an output with -o")
    if output_file is None:
        output_file = STANDARD_STREAM if name == STANDARD_STREAM else path_next_to(name, "output")
    return name, output_file


def name_shard_files(
    shard: Shard, input_file: str, output_file: str, error_file: str | None
) -> tuple[str, str | None]:
    """Return output and error file of a shard; a stream is returned unchanged.

    Raises Refused for a URL, and for names that `check_paths` refuses for the whole file.
    """
    if is_remote(output_file):
        raise Refused(
            f"--shard requires an output file, for `tidemill join`, but "
            f"{display_name(output_file)} is a URL: pass a path with -o"
        )
    check_paths(input_file, output_file, error_file)
    if is_path(output_file) and is_regular_or_new(Path(output_file)):
        output_file = shard.path(output_file)
    return output_file, None if error_file is None else shard.path(error_file)


def is_regular_or_new(path: Path) -> bool:
    """Return whether the path is a regular file or does not exist; False for pipes and devices."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def check_paths(
    input_file: str | None, output_file: str, error_file: str | None, *, is_table: bool = False
) -> None:
    """Raise Refused for unusable inputs and outputs, before anything is opened.

    A table may be a folder, or a Hugging Face dataset.
    """
    is_hub_table = is_table and is_dataset(input_file or "")
    _check_schemes("" if is_hub_table else input_file or "", output_file, error_file or "")
    for name, stream, what in (
        (input_file, sys.stdin, "input"),
        (output_file, sys.stdout, "output"),
    ):
        if name == STANDARD_STREAM and stream is None:
            raise Refused(f"standard {what} is closed: use a file instead of -")
    named = [("output", output_file)]
    if input_file is not None:
        if is_path(input_file):
            _check_input(Path(input_file), is_table=is_table)
        named.insert(0, ("input", input_file))
    if is_path(output_file):
        _check_output(Path(output_file), "the output")
    if error_file is not None:
        if not is_path(error_file):
            raise Refused("the error file must be a path, not a stream or a URL")
        _check_output(Path(error_file), "the error file")
        if not is_regular_or_new(Path(error_file)):
            raise Refused(f"the error file {error_file} is not a regular file")
        named.append(("error file", error_file))
    _check_distinct([(role, Path(name)) for role, name in named if is_path(name)])
    objects = [S3Object.parse(name) for name in (input_file or "", output_file) if is_s3(name)]
    if len(objects) > len(set(objects)):
        raise Refused(f"the input and the output are the same object: {objects[0]}")


def check_input_path(name: str) -> None:
    """Raise Refused for an unusable input of a command that does not write a file."""
    check_paths(name, STANDARD_STREAM, None)


def check_folder(folder: Path, flag: str) -> None:
    """Raise Refused for a missing folder; `flag` is its flag."""
    if not folder.is_dir():
        raise Refused(f"the folder {folder} of {flag} does not exist")


def check_resumable(output_file: str) -> None:
    """Raise Refused for an output that cannot be resumed."""
    if not (is_path(output_file) and is_regular_or_new(Path(output_file))):
        raise Refused("--resume requires an output that is a regular file")


def _check_schemes(*names: str) -> None:
    for name in names:
        scheme, separator, _ = name.partition("://")
        if separator and not is_remote(name):
            raise Refused(
                f"{scheme}:// is not supported: use a path, -, an http(s) URL or s3://bucket/key"
            )
        if is_s3(name):
            S3Object.parse(name)
        if is_url(name) and not _host_of(name):
            raise Refused(f"{display_name(name)} has no host")


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError as exc:
        raise Refused(f"a URL is not valid: {exc}") from exc


def _check_input(path: Path, *, is_table: bool = False) -> None:
    if not path.exists():
        raise Refused(f"the input {path} does not exist")
    if path.is_dir() and not is_table:
        raise Refused(
            f"the input {path} is a folder: choose one file in it, or pass --prompt if it contains "
            "the files of a table"
        )
    if not os.access(path, os.R_OK):
        raise Refused(f"the input {path} cannot be read: check its permissions")


def _check_output(path: Path, what: str) -> None:
    if path.is_dir():
        raise Refused(f"{what} {path} is a directory: give the path of a file")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise Refused(f"{what} {path} is in a folder that does not exist: {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise Refused(f"{what} {path} cannot be written: check the permissions")


def _check_distinct(paths: list[tuple[str, Path]]) -> None:
    for index, (role, path) in enumerate(paths):
        for other_role, other in paths[index + 1 :]:
            if _are_same(path, other):
                raise Refused(f"the {role} and the {other_role} are the same file: {path}")


def _are_same(path: Path, other: Path) -> bool:
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    return path.exists() and other.exists() and path.samefile(other)
