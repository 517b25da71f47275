"""Where compiled kernels lie: in the folder that an image brings, else in this machine's own.

Triton names what it keeps by all that it follows from: sources, types, sizes, architecture, its own
version and that of its assembler. So what is found is right, and nothing has to be told stale.
"""

from __future__ import annotations

import logging
import os
import platform
from functools import cache
from pathlib import Path

from triton import knobs
from triton.runtime import build
from triton.runtime.cache import FileCacheManager

# Read as `engine.kernels.cpu.compiling` reads it; Triton's part lies in a folder of its own there.
BROUGHT = "TIDEMILL_KERNELS"
FOLDER = "triton"

logger = logging.getLogger(__name__)


class KeptKernels(FileCacheManager):  # type: ignore[misc]  # triton is not followed
    """What Triton asks for what it has compiled, and gives it to.

    What is brought is only read; all else lies where Triton is told, by TRITON_CACHE_DIR.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:  # noqa: FBT001, FBT002 - as Triton calls it
        brought = _brought(key)
        if brought is None or override or dump:
            super().__init__(key, override, dump)
        else:
            self.key, self.cache_dir, self.lock_path = key, str(brought), None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a kernel, or None; the first that is missing is told of."""
        found: dict[str, str] | None = super().get_group(filename)
        if not found:
            _tell_once()
        return found


def keep() -> None:
    """Have Triton keep here what it compiles, and find it again."""
    knobs.cache.manager_class = KeptKernels
    # Triton's own asks the program `file` of the machine's kind, which an image does not have: what
    # is compiled where it is would not be found where it is not.
    build.platform_key = lambda: f"{platform.machine()},{platform.system()}"


def _brought(key: str) -> Path | None:
    root = os.environ.get(BROUGHT)
    folder = Path(root, FOLDER, key) if root else None
    return folder if folder and folder.is_dir() else None


@cache
def _tell_once() -> None:
    logger.info("compiling the GPU's kernels, once on this machine (a minute or two)")
