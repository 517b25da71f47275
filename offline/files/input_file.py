"""Input file: the request lines of a source in any supported format, readable in any order."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self

from tidemill.batch.file.formats import (
    BinaryFile,
    FileFormat,
    detect_file,
    open_lines,
)
from tidemill.batch.file.lines import FormatError, RawLine, read_lines, read_placed_lines

from ..console.errors import BadInput
from ..console.terminal import log
from .shard import Shard, ShardLines, find_shard_lines
from .source import Source, temporary_file

if TYPE_CHECKING:
    from ..plan.line_index import LineIndex
    from .table_input import TableInput

_COPIED_BYTES = 2**20
_BLOCK_BYTES = 2**18


class PlacedLine(NamedTuple):
    """A line and its 0-based place among all lines that get a row."""

    place: int
    raw: RawLine


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input whose lines can be read repeatedly; `unpacked` is a plain JSONL copy, if needed.

    Its lines may be the requests of a `table`. With `part`, it has only the lines of a shard, with
    their numbers in the whole file.
    """

    source: Source
    form: FileFormat
    max_line_bytes: int
    unpacked: IO[bytes] | None = None
    table: TableInput | None = None
    part: ShardLines | None = None
    has_constant_prompt: bool = False

    @classmethod
    def from_source(cls, source: Source, max_line_bytes: int, url: str | None = None) -> Self:
        """Detect the format of a source; raises BadInput for an unsupported file.

        `url` is the endpoint of lines that name none; a file whose lines do is refused with one.
        """
        try:
            form = detect_file(source.file, url)
        except FormatError as exc:
            raise BadInput(f"{source.name} cannot be run. {exc.message}") from exc
        if url is not None and form.vendor not in {"no_url", "chats"}:
            raise BadInput(
                f"--url is only for lines without `url`, but {source.name} has other ones: omit it"
            )
        return cls(source, form, max_line_bytes)

    def unpack(self, tmp_dir: Path | None, stack: ExitStack) -> InputFile:
        """Return the input with a plain temporary copy if it is compressed or an array.

        If the disk has no room for a copy, log a note and return the input unchanged.
        """
        if self.form.is_plain:
            return self
        copy = temporary_file(stack, tmp_dir)
        try:
            stream = self._stream()
            while data := stream.read(_COPIED_BYTES):
                copy.write(data)
            copy.flush()
        except FormatError as exc:
            raise self._damaged(exc) from exc
        except OSError as exc:
            folder = tmp_dir or tempfile.gettempdir()
            log(
                f"note: {self.source.name} cannot be unpacked to {folder} ({exc.strerror}), so its "
                "lines run in file order: pass --output-tmp-dir to use another folder"
            )
            return self
        return replace(self, unpacked=copy)

    def select(self, shard: Shard) -> InputFile:
        """Return the input with only a shard's lines; preceding ones are counted, not parsed.

        Raises BadInput for an input that is not seekable.
        """
        num_bytes = self.num_bytes
        return replace(self, part=find_shard_lines(self._plain, num_bytes, shard))

    @property
    def num_bytes(self) -> int:
        """Return the size of the plain JSONL; raises BadInput for an input that is not seekable."""
        if not self.is_seekable:
            raise BadInput(
                f"{self.source.name} is compressed, and sharding requires an uncompressed copy: "
                "pass --output-tmp-dir with a folder that has enough space"
            )
        return os.fstat(self._plain.fileno()).st_size

    @property
    def name(self) -> str:
        """Return the display name of the input, or of its shard."""
        return self.source.name + ("" if self.part is None else f" ({self.part.shard})")

    @property
    def is_seekable(self) -> bool:
        """Return whether lines can be read in any order."""
        return self.form.is_plain or self.unpacked is not None

    def lines(self) -> Iterator[RawLine]:
        """Yield the non-blank lines; raises BadInput for a damaged file."""
        for raw, _ in self.placed_lines():
            yield raw

    def placed_lines(self) -> Iterator[tuple[RawLine, int]]:
        """Yield the non-blank lines, each with the position of its first byte in the plain JSONL.

        Raises BadInput for a damaged file.
        """
        first_number, start, end = 1, 0, None
        try:
            stream = self._stream()
            if (part := self.part) is not None:
                first_number, start, end = part.first.number, part.first.start, part.end.start
                stream.seek(start)
            yield from read_placed_lines(
                stream,
                max_line_bytes=self.max_line_bytes,
                first_number=first_number,
                start=start,
                end=end,
            )
        except FormatError as exc:
            raise self._damaged(exc) from exc

    def read(self, index: LineIndex, places: Iterable[int]) -> Iterator[PlacedLine]:
        """Yield the lines at these places; raises InputChanged for a file that was modified.

        If the input is not seekable, the places must be in file order.
        """
        return self._read_any(index, places) if self.is_seekable else self._read_in_order(places)

    def _read_in_order(self, places: Iterable[int]) -> Iterator[PlacedLine]:
        numbered = enumerate(self.lines())
        for wanted in places:
            yield PlacedLine(wanted, next(raw for place, raw in numbered if place == wanted))

    def _read_any(self, index: LineIndex, places: Iterable[int]) -> Iterator[PlacedLine]:
        """Yield lines from blocks while each is near the previous one, otherwise one by one."""
        file, fd = self._plain, self._plain.fileno()
        limit, span_of, new = self.max_line_bytes, index.span, tuple.__new__
        block, start, end = b"", 0, 0
        for place in places:
            first, num_bytes, number = span_of(place)
            last = first + num_bytes
            if num_bytes > limit:
                file.seek(first)
                raw = next(read_lines(file, max_line_bytes=limit, first_number=number))
                yield PlacedLine(place, raw)
                continue
            if not start <= first <= last <= end:
                is_near = start <= first < end + _BLOCK_BYTES
                size = max(num_bytes, _BLOCK_BYTES) if is_near else num_bytes
                block, start = os.pread(fd, size, first), first
                end = start + len(block)
                if self.unpacked is None:
                    self.source.check()
            raw = new(RawLine, (number, block[first - start : last - start], None))
            yield new(PlacedLine, (place, raw))

    @property
    def _plain(self) -> IO[bytes]:
        """Return the file with a seekable input's plain JSONL."""
        return self.source.file if self.unpacked is None else self.unpacked

    def _stream(self) -> BinaryFile:
        if self.unpacked is None:
            return open_lines(self.form, self.source.file)
        self.unpacked.seek(0)
        return self.unpacked

    def _damaged(self, exc: FormatError) -> BadInput:
        return BadInput(f"{self.source.name} cannot be run. {exc.message}")
