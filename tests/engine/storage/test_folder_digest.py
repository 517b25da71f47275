"""Results of an earlier run are found by a digest of the sources that produced them."""

from __future__ import annotations

from pathlib import Path

from tidemill.engine.storage.disk_cache import folder_digest


def test_the_digest_depends_on_every_byte_and_name(tmp_path: Path) -> None:
    """It depends on nothing else: compiled files do not count."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.py").write_text("1")
    (tmp_path / "two.py").write_text("2")
    seen = [folder_digest(tmp_path)]
    (tmp_path / "a/one.pyc").write_text("compiled")
    assert folder_digest(tmp_path) == seen[0]
    (tmp_path / "two.py").write_text("3")
    seen.append(folder_digest(tmp_path))
    (tmp_path / "two.py").rename(tmp_path / "three.py")
    seen.append(folder_digest(tmp_path))
    assert len(set(seen)) == 3
