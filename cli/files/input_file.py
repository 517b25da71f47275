"""Input file: the request lines of a source, in any supported format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from tidemill.batch.file.formats import HEAD_BYTES, FileFormat, detect_format, open_lines
from tidemill.batch.file.lines import FormatError, RawLine, read_lines

from ..console.errors import BadInput
from .source import Source


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input whose lines can be read repeatedly."""

    source: Source
    form: FileFormat
    max_line_bytes: int

    @classmethod
    def from_source(cls, source: Source, max_line_bytes: int) -> Self:
        """Detect the format of a source; raises BadInput for an unsupported file."""
        source.file.seek(0)
        try:
            form = detect_format(source.file.read(HEAD_BYTES))
        except FormatError as exc:
            raise BadInput(f"{source.name} cannot be run. {exc.message}") from exc
        return cls(source, form, max_line_bytes)

    def lines(self) -> Iterator[RawLine]:
        """Yield the non-blank lines; raises BadInput for a damaged file."""
        try:
            stream = open_lines(self.form, self.source.file)
            yield from read_lines(stream, max_line_bytes=self.max_line_bytes)
        except FormatError as exc:
            raise BadInput(f"{self.source.name} cannot be run. {exc.message}") from exc
