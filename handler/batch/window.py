"""How long a batch may take: what a client, a deployment or an upload's metadata may say of it."""

from __future__ import annotations

import re
from typing import Final

from handler.errors import InvalidOption, shown

DEFAULT_WINDOW: Final = "24h"
MIN_WINDOW_SECONDS: Final = 30 * 60
MAX_WINDOW_SECONDS: Final = 14 * 24 * 3600

_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)


def window_seconds(window: object, *, param: str = "completion_window") -> int:
    """Return the seconds of a window such as `30m`, `24h` or `14d`; raises InvalidOption."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
    if not MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        raise InvalidOption(
            f"`{param}` must be a number of minutes, hours or days from 30m to 14d, such as 24h; "
            f"got {shown(window)}.",
            param=param,
        )
    return seconds
