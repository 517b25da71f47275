"""GGUF files among the names of a model's files: what an engine loads and a worker fetches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SUFFIX: Final = ".gguf"
# Images' projectors, which are next to a text model.
_PROJECTOR: Final = "mmproj"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def gguf_names(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files in order, without projectors of images."""
    return sorted(
        name
        for name in names
        if name.lower().endswith(SUFFIX) and not name.lower().startswith(_PROJECTOR)
    )


def is_part(name: str) -> bool:
    """Say whether a GGUF file is one of a split model's by its name."""
    return bool(_PART.search(name))
