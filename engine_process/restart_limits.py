"""Limits on the deaths and restarts of engine processes, in a worker, a run or a server."""

from __future__ import annotations

from typing import Final

# Limits events in a row without a finished row in between. In a worker: lives of one engine. In a
# run or a server of several engines: deaths of all engines, restarts of one engine, and quarantined
# requests. Bisecting 4,096 suspects takes twelve deaths; more deaths mean that the engine or its
# device is broken.
MAX_DEATHS_WITHOUT_ROW: Final = 16

# Limits the deaths in a row of a worker's engine while it loads, which may take minutes: no request
# can be blamed for them.
MAX_FAILED_STARTS: Final = 5

# In a run or a server of several engines, limits the deaths without a finished row in between once
# an engine reports that its machine is broken: bisecting requests would not find the cause.
MAX_MACHINE_FAILURES: Final = 5
