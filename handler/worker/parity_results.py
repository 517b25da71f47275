"""Parity results in the bucket: what one machine has proved of a model, others need not.

The engine keeps the result of a parity check in a folder of its machine, in a file that is named by
a digest of all that the result depends on: weights, packages, engine, device. So files are copied
as they are, and the engine reads those that are its own.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tidemill.batch.object_keys import parity_prefix

from ..aws.bucket import Bucket
from ..aws.calls import Operation

_NAME: Final = re.compile(r"proof-[0-9a-f]{40}")
_MAX_BYTES: Final = 4096
# Each release, kind of device and dtype has its own; those of before are of no use.
_MAX_RESULTS: Final = 32


@dataclass(frozen=True, slots=True)
class ParityResults:
    """Parity results of a model in a `folder` of this machine, and in the bucket."""

    bucket: Bucket
    model: str
    folder: Path
    shared: set[str] = field(default_factory=set)

    def download(self) -> Operation[None]:
        """Copy the newest results that this machine lacks; raises OSError where it cannot."""
        prefix = parity_prefix(self.model)
        listed, _ = yield from self.bucket.list_page(prefix, "")
        for head in sorted(listed, key=lambda head: -head.modified)[:_MAX_RESULTS]:
            name = head.key.removeprefix(prefix)
            if _NAME.fullmatch(name) is None or head.num_bytes > _MAX_BYTES:
                continue
            self.shared.add(name)
            if not (self.folder / name).exists():
                _write(self.folder / name, (yield from self.bucket.get(head.key)))

    def upload(self) -> Operation[None]:
        """Copy the results that the bucket lacks."""
        for path in self.folder.glob("proof-*"):
            if _NAME.fullmatch(path.name) and path.name not in self.shared:
                yield from self.bucket.put(parity_prefix(self.model) + path.name, path.read_bytes())
                self.shared.add(path.name)


def _write(path: Path, data: bytes) -> None:
    """Write a file that no other user may change, under its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)
