"""The recorded session on the first page shows the script's commands and fetches nothing."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tools.session_picture import COMMANDS, PICTURE


def test_the_picture_shows_the_commands() -> None:
    """It is SVG without addresses of other hosts; `make screenshots` records it again."""
    picture = PICTURE.read_text(encoding="utf-8")
    shown = " ".join(ET.fromstring(picture).itertext()).replace("\xa0", " ")  # noqa: S314 - our own file
    assert [command for command in COMMANDS if command not in shown] == []
    assert "url(http" not in picture
    assert "7 ok, 0 failed" in shown
