"""Writes the OpenAPI document of this API to standard output.

python -m tidemill.handler.api > docs/reference/openapi.json
"""

from __future__ import annotations

import sys

from .app import app
from .document import text

sys.stdout.write(text(app))
