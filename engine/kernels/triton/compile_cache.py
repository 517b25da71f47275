"""Compile cache of Triton kernels: the image's prebuilt folder first, else this machine's own.

Triton keys its cache by sources, types, sizes, architecture, its own version and that of its
assembler, so entries never become stale.
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

# The variable that `engine.kernels.cpu.jit_cache` reads, too; Triton's files have a subfolder.
PREBUILT_VARIABLE = "TIDEMILL_KERNELS"
PREBUILT_SUBFOLDER = "triton"

logger = logging.getLogger(__name__)


class CompileCache(FileCacheManager):  # type: ignore[misc]  # triton is not followed
    """Triton's cache manager, which reads prebuilt kernels and writes to TRITON_CACHE_DIR."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:  # noqa: FBT001, FBT002 - as Triton calls it
        brought = _prebuilt_folder(key)
        if brought is None or override or dump:
            super().__init__(key, override, dump)
        else:
            self.key, self.cache_dir, self.lock_path = key, str(brought), None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a kernel, or None; the first miss is logged."""
        found: dict[str, str] | None = super().get_group(filename)
        if not found:
            _log_once()
        return found


def install() -> None:
    """Install this cache as Triton's cache manager."""
    knobs.cache.manager_class = CompileCache
    # Triton's own key depends on the program `file`, which an image does not have: kernels compiled
    # with it would not be found without it.
    build.platform_key = lambda: f"{platform.machine()},{platform.system()}"
    # From 3.8 it also depends on the folder of the driver's library, which a builder does not have.
    if hasattr(build, "_get_cache_manager"):
        by_config = build._get_cache_manager  # noqa: SLF001 - no public function makes keys
        build._get_cache_manager = lambda src, config: by_config(  # noqa: SLF001
            src, {**config, "library_dirs": None}
        )


def _prebuilt_folder(key: str) -> Path | None:
    root = os.environ.get(PREBUILT_VARIABLE)
    folder = Path(root, PREBUILT_SUBFOLDER, key) if root else None
    return folder if folder and folder.is_dir() else None


@cache
def _log_once() -> None:
    logger.info("compiling the GPU's kernels, once on this machine (a minute or two)")
