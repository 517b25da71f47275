"""Limits on the deaths and restarts of engine processes, in a worker, a run or a server."""

from __future__ import annotations

from typing import Final

# Bounds what may happen in a row without a finished row in between. In a worker: lives of one
# engine. In a run or a server of several engines: deaths of all engines, restarts of one engine,
# and quarantined requests. Bisecting 4,096 suspects down to one takes twelve deaths; more than that
# means that the engine or its device is broken.
MAX_DEATHS_WITHOUT_ROW: Final = 16

# Bounds the deaths in a row of a worker's engine while it loads, which may take minutes: no request
# can be blamed for them.
MAX_FAILED_STARTS: Final = 5

# Bounds, in a run or a server of several engines, the deaths without a finished row in between once
# an engine reports that its machine is broken: bisecting requests would not find the cause.
MAX_MACHINE_FAILURES: Final = 5
