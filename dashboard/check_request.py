"""Request of the page to check a file before its upload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, Field

from tidemill.batch.allowed_media import AllowedMedia

from .checked_file import CheckOptions, FileCheck, FileStart
from .file_check import check_file


class FilePart(BaseModel):
    """Bytes of a file from byte `start` on."""

    start: Annotated[int, Field(ge=0)]
    data: Base64Bytes


class CheckRequest(BaseModel):
    """A file that a browser wants to upload: its beginning, and the choices in the form."""

    name: Annotated[str, Field(max_length=1024)]
    bytes: Annotated[int, Field(ge=0)]
    head: Base64Bytes
    tail: Base64Bytes = b""
    parts: Annotated[list[FilePart], Field(max_length=1_000)] = []
    recipe: dict[str, Any] | None = None
    on_invalid_line: Literal["fail", "skip"] = "fail"
    strict_parameters: bool = False

    def check(
        self,
        models: Mapping[str, str],
        *,
        runs_tables: bool = True,
        media: AllowedMedia | None = None,
    ) -> FileCheck:
        """Return what intake would say about the file, as far as its first bytes show."""
        choices = self.recipe, self.on_invalid_line, self.strict_parameters
        options = CheckOptions(models, *choices, runs_tables, media)
        parts = {part.start: part.data for part in self.parts}
        return check_file(FileStart(self.name, self.bytes, self.head, self.tail, parts), options)
