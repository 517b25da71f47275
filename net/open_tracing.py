"""Opens tracing if the environment names an OTLP endpoint for spans.

Only OpenTelemetry's own variables are read; without an endpoint nothing is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Final

from .tracing import Sample, Tracing

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CAPTURES: Final = frozenset({"true", "1", "span_only", "span_and_event"})


def open_tracing(
    warn: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> Tracing | None:
    """Open the tracing that the environment requests, if any; a failure is only a warning."""
    if not is_requested(environment):
        return None
    named = next(name for name in _ENDPOINTS if environment.get(name))
    try:
        from .otlp_tracing import open_otlp
    except ImportError as exc:
        warn(
            f"{named} is set, but {exc.name} is not installed, so no spans are sent: install the "
            "`otel` extra"
        )
        return None
    captures = environment.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "")
    sample = Sample(_share(environment))
    try:
        return open_otlp(warn, sample, captures_content=captures.strip().lower() in _CAPTURES)
    except Exception as exc:  # noqa: BLE001 - work does not depend on it
        warn(f"{named} is set, but tracing cannot start, so no spans are sent: {exc}")
        return None


def is_requested(environment: Mapping[str, str]) -> bool:
    """Say whether the environment requests spans."""
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "").lower() == "none"
        or environment.get("OTEL_TRACES_SAMPLER", "").lower().endswith("always_off")
    )
    return not is_off and any(environment.get(name) for name in _ENDPOINTS)


def _share(environment: Mapping[str, str]) -> float:
    """Return the share of requests in OTEL_TRACES_SAMPLER_ARG; 1.0 for an invalid value."""
    try:
        share = float(environment.get("OTEL_TRACES_SAMPLER_ARG") or 1.0)
    except ValueError:
        return 1.0
    return 1.0 if math.isnan(share) else min(1.0, max(0.0, share))
