"""Which sources run: what is kept from an earlier run holds for the same ones only."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path


def digest_of(folder: Path) -> str:
    """Return what is another text whenever a source file in the folder is another one."""
    digest = blake2b(digest_size=6)
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()
