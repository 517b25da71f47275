"""The CDK's runtime prints no warning about Node.js, which users could not act on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_the_stacks_prints_nothing() -> None:
    """Whichever Node.js runs them, from 20 on."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("JSII_SILENCE")
    }
    done = subprocess.run(
        [sys.executable, "-c", "import infra.data.stack"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
