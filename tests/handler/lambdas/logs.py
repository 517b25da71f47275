"""Log of a Lambda in a separate process, whose environment can request verbose logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_RUN = """
import importlib, json, sys
from localstack.event_source_mapping import LocalLambdaContext
from tidemill.handler.observability import logger
name, event = json.load(sys.stdin)
try:
    handler = importlib.import_module(f"tidemill.handler.lambdas.{name}").handler
    print(json.dumps(handler(event, LocalLambdaContext(name, 10))))
except Exception:
    logger.exception("as Lambda logs what a handler raises")
"""


def log_of(name: str, event: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return all that a Lambda logs and returns for one event, with verbose logs."""
    loud = {"POWERTOOLS_LOGGER_LOG_EVENT": "true", "POWERTOOLS_LOG_LEVEL": "DEBUG"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        cwd=ROOT,
        env={**os.environ, **environment, **loud},
        input=json.dumps([name, event]),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr
