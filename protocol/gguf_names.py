"""GGUF files among a model's files: the ones that an engine loads and a worker fetches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SUFFIX: Final = ".gguf"
# Image projectors, which are next to a text model.
_PROJECTOR: Final = "mmproj"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def gguf_names(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files in order, without image projectors."""
    return sorted(
        name
        for name in names
        if name.lower().endswith(SUFFIX) and not name.lower().startswith(_PROJECTOR)
    )


def is_part(name: str) -> bool:
    """Say whether a GGUF file is a part of a split model, by its name."""
    return bool(_PART.search(name))
