"""Writes the OpenAPI document of this API to standard output.

python -m handler.api > docs/openapi.json
"""

from __future__ import annotations

import sys

from handler.api.app import app
from handler.api.document import text

sys.stdout.write(text(app))
