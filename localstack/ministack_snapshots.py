"""MiniStack with snapshots: its state is written every few seconds, and survives a kill.

    STATE_DIR=FOLDER PERSIST_STATE=1 python -P localstack/ministack_snapshots.py

By itself it writes its state at an orderly shutdown, and loses everything when it is killed.
Here each snapshot is a separate folder, `saved-N`, which is complete once it has its name; the
newest is loaded. Nothing is written while there is a file `deploying`: a stack whose creation was
half recorded can be neither updated nor resumed.
"""

from __future__ import annotations

import filecmp
import importlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SAVE_SECONDS = 2.0
_NUM_KEPT = 2


class SnapshotWriter:
    """Writes numbered snapshots of the state of MiniStack's module `persistence`."""

    def __init__(self, folder: Path, persistence: Any) -> None:
        self._folder = folder
        self._persistence = persistence
        self._write = persistence.save_all
        found = sorted(folder.glob("saved-*"))
        self._newest = found[-1] if found else None
        if self._newest is not None:
            persistence.STATE_DIR = str(self._newest)

    def save(self, services: Mapping[str, Callable[[], Any]]) -> None:
        """Write a snapshot unless nothing changed; replaces MiniStack's own `save_all`."""
        if (self._folder / "deploying").exists():
            return
        saving, before = self._folder / "saving", self._newest
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir()
        self._persistence.STATE_DIR = str(saving)
        self._write(services)
        if before is not None and not self._differs(saving, before):
            return
        number = 1 + int(before.name.removeprefix("saved-")) if before is not None else 1
        self._newest = saving.rename(self._folder / f"saved-{number:09d}")
        for old in sorted(self._folder.glob("saved-*"))[:-_NUM_KEPT]:
            shutil.rmtree(old)

    def _differs(self, saving: Path, before: Path) -> bool:
        """Complete the new folder by the unchanged files; return whether anything changed."""
        written = {path.name for path in saving.iterdir()}
        for path in before.iterdir():
            if path.name not in written:  # of a service without a call since the start
                os.link(path, saving / path.name)
        return not all(
            (before / name).exists() and filecmp.cmp(saving / name, before / name, shallow=False)
            for name in written
        )


def main() -> None:
    """Run MiniStack until it is stopped."""
    persistence = importlib.import_module("ministack.core.persistence")
    emulator: Any = importlib.import_module("ministack.app")
    # It reads the folder's name once, when it is loaded, and stores the code of functions there.
    importlib.import_module("ministack.services.lambda_svc")
    snapshots = SnapshotWriter(Path(os.environ["STATE_DIR"]), persistence)
    emulator.save_all = snapshots.save

    def save() -> None:
        snapshots.save(emulator._build_persistence_save_dict())  # noqa: SLF001 - it has no public one

    def save_for_ever() -> None:
        while True:
            time.sleep(_SAVE_SECONDS)
            loop = emulator._MAIN_LOOP  # noqa: SLF001 - the thread that changes its state
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(save)

    threading.Thread(target=save_for_ever, daemon=True).start()
    emulator.main()


if __name__ == "__main__":
    main()
