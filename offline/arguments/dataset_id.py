"""Hugging Face dataset IDs on the command line, written as in fsspec, DuckDB and Polars."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote

from ..console.errors import Refused

PREFIX: Final = "hf://datasets/"
_SCHEME = "hf://"
_NAME = re.compile(
    r"(?P<path>[\w.-]+(/[\w.-]+)?)"
    r"(@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+))?"
    r"(/(?P<files>.+))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class DatasetId:
    """A dataset's ID on the hub, and the requested part of it.

    `files` is a file in it, or a pattern of files; `split` may be a slice (`train[:100]`).
    """

    path: str
    revision: str | None = None
    files: str | None = None
    subset: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, name: str, *, subset: str | None = None, split: str | None = None) -> Self:
        """Return the dataset of a URL, `hf://datasets/ORG/NAME@REVISION/FILES`; raises Refused."""
        match = _NAME.fullmatch(name[len(PREFIX) :].rstrip("/"))
        if not is_dataset(name) or match is None:
            raise Refused(f"{name} is not a dataset: use {PREFIX}ORG/NAME")
        revision = match["revision"]
        revision = None if revision is None else unquote(revision)
        return cls(match["path"], revision, match["files"], subset, split)

    @property
    def name(self) -> str:
        """Return the name without its owner."""
        return self.path.rpartition("/")[2]


def is_dataset(name: str) -> bool:
    """Return whether a name is the URL of a dataset."""
    return name.lower().startswith(PREFIX)


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of datasets."""
    group = parser.add_argument_group(f"Hugging Face datasets: {PREFIX}ORG/NAME")
    group.add_argument(
        "--split",
        metavar="NAME",
        help="use this split or slice, such as 'train[:100]' (default: the only one)",
    )
    group.add_argument("--subset", metavar="NAME", help="use this subset (default: the only one)")


def dataset_of(arguments: argparse.Namespace, file: str) -> DatasetId | None:
    """Return the dataset of a file name and the flags; raises Refused for invalid flags."""
    split, subset = arguments.split, arguments.subset
    if file.lower().startswith(_SCHEME):
        return DatasetId.parse(file, subset=subset, split=split)
    if split is None and subset is None:
        return None
    flag = "--split" if subset is None else "--subset"
    raise Refused(f"{flag} requires a dataset ({PREFIX}ORG/NAME); {file} is not a dataset")
