"""Fixtures of runs, which commands share with `offline`."""

from __future__ import annotations

from tests.offline.conftest import run, server, shell, spawn, tmp_dir, write_input

__all__ = ["run", "server", "shell", "spawn", "tmp_dir", "write_input"]
