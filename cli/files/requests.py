"""The requests of an input, whatever form its file has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from cli.errors import BadInput
from cli.files.source import Source
from engine.batchfile.forms import HEAD_BYTES, Form, form_of, open_lines
from engine.batchfile.lines import FormError, RawLine, read_lines


@dataclass(frozen=True, slots=True)
class Requests:
    """An input whose lines can be read from its start any number of times."""

    source: Source
    form: Form
    max_line_bytes: int

    @classmethod
    def of(cls, source: Source, max_line_bytes: int) -> Self:
        """Return the requests of a source; raises BadInput for a file that cannot hold any."""
        source.file.seek(0)
        try:
            form = form_of(source.file.read(HEAD_BYTES))
        except FormError as exc:
            raise BadInput(f"{source.name} cannot be run. {exc.message}") from exc
        return cls(source, form, max_line_bytes)

    def lines(self) -> Iterator[RawLine]:
        """Yield the lines that are not blank; raises BadInput where the file is damaged."""
        try:
            stream = open_lines(self.form, self.source.file)
            yield from read_lines(stream, max_line_bytes=self.max_line_bytes)
        except FormError as exc:
            raise BadInput(f"{self.source.name} cannot be run. {exc.message}") from exc
