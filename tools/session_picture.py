"""Record a terminal session of real commands as docs/images/session.svg.

    python -m tools.session_picture        # `make screenshots` does the same

The demo model answers, which the first run downloads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import Final

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT: Final = Path(__file__).parents[1]
PICTURE: Final = ROOT / "docs/images/session.svg"
COMMANDS: Final = (
    "head -3 messages.csv",
    "tidemill run messages.csv",
    "python show.py messages.output.csv",
)
_COLUMNS: Final = 112
_ROWS: Final = 8
# Readers' own fonts: a picture on a page must not fetch any.
_FORMAT: Final = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def record(folder: Path) -> Console:
    """Run the commands in a folder, and return the console that recorded them."""
    console = Console(record=True, width=_COLUMNS, file=StringIO())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        done = subprocess.run(  # noqa: S603 - the commands above
            ["/bin/sh", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": str(_COLUMNS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        printed = done.stdout.replace(str(Path.home()), "~").rstrip()
        console.print(Text.from_ansi(printed), no_wrap=True, overflow="ellipsis")
    return console


def main() -> int:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("messages.recipe.toml", "show.py"):
            shutil.copy(ROOT / "examples" / name, folder)
        lines = (ROOT / "examples/messages.csv").read_text(encoding="utf-8").splitlines()
        (Path(folder) / "messages.csv").write_text("\n".join(lines[:_ROWS]), encoding="utf-8")
        console = record(Path(folder))
    picture = console.export_svg(title="tidemill", theme=SVG_EXPORT_THEME, code_format=_FORMAT)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
