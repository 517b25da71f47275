"""schemathesis over the OpenAPI document: what it says is so, whatever is sent.

`TIDEMILL_SCHEMATHESIS` is the number of requests made up for each operation; `make fuzz-api` sends
many.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators import Emulator
from tests.handler.api.rig import serving
from tests.handler.api.server import listening
from tests.handler.intake.rig import Cloud
from tidemill.handler.tenants.keys import KeyStore

NUM_EXAMPLES = int(os.environ.get("TIDEMILL_SCHEMATHESIS", "4"))
# A method that a path does not have is a 404 with OpenAI, not a 405. What is well formed may still
# be refused: there is no such file, or its url is not public.
NOT_OURS = "unsupported_method,positive_data_acceptance"


@pytest.mark.parametrize("seconds", [6, pytest.param(35, marks=pytest.mark.long)])
def test_no_request_breaks_the_word_of_the_document(
    ministack: Emulator, tmp_path: Path, seconds: int
) -> None:
    """No 500, no status, header or field that the document does not know, no route without a key.

    Requests that fit the document and some that do not, alone and in sequences by its links.
    """
    command = Path(sys.executable).with_name("schemathesis")
    with serving(Cloud.on(ministack)) as cloud, listening() as url:
        keys = KeyStore(cloud.deployment.table.name)
        token = cloud.run(keys.create(tenant="default", name="test", now=1))
        options = ["--exclude-checks", NOT_OURS, "-n", str(NUM_EXAMPLES), "--no-color"]
        options += ["--suppress-health-check", "all", "-H", f"Authorization: Bearer {token}"]
        if "TIDEMILL_SCHEMATHESIS" not in os.environ:
            options += ["--generation-deterministic", "--max-time", str(seconds)]
        done = subprocess.run(
            [command, "run", f"{url}/openapi.json", *options],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-20_000:]
