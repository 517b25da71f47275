"""A batch of the first rows of a file, to see some answers before the whole file runs."""

from __future__ import annotations

from typing import Final

TRIAL_ROWS: Final = 50
TRIAL_ENDING: Final = f" (first {TRIAL_ROWS} rows)"
"""End of the name of a file that contains the first rows of another one."""
