"""ECS's scale-in protection: a task that has work is not stopped to save money."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from handler.aws.queues import parse_message
from handler.log import logger

_EXPIRES_MINUTES = 60
_RENEW_SECONDS = 15 * 60
_TIMEOUT_SECONDS = 2.0


class Protection:
    """Asks the agent of the task; without an agent it does nothing. Failures are logged only."""

    def __init__(self, agent_uri: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = f"{agent_uri}/task-protection/v1/state" if agent_uri else None
        self._clock = clock
        self._taken_at: float | None = None

    async def keep(self, *, is_busy: bool) -> None:
        """Take or renew protection while there is work, drop it when there is none."""
        now, taken_at = self._clock(), self._taken_at
        if self._url is None:
            return
        if is_busy and (taken_at is None or now >= taken_at + _RENEW_SECONDS):
            wanted: dict[str, object] = {
                "ProtectionEnabled": True,
                "ExpiresInMinutes": _EXPIRES_MINUTES,
            }
            if await self._put(self._url, wanted):
                self._taken_at = now
        elif (
            not is_busy
            and taken_at is not None
            and await self._put(self._url, {"ProtectionEnabled": False})
        ):
            self._taken_at = None

    async def _put(self, url: str, wanted: dict[str, object]) -> bool:
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS) as client:
                response = await client.put(url, json=wanted)
        except httpx.HTTPError as exc:
            logger.warning("scale-in protection not changed", reason=repr(exc))
            return False
        answer = parse_message(response.text)
        if not response.is_success or answer is None or answer.get("failure"):
            logger.warning("scale-in protection not changed", reason=response.text[:500])
            return False
        return True
