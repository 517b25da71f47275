"""Opening of tracing, where the environment names an endpoint of OTLP for spans.

OpenTelemetry's own variables are read and nothing else; without an endpoint nothing is imported.
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
    """Open the tracing that the environment asks for; None without. What fails is a warning."""
    if not is_asked(environment):
        return None
    named = next(name for name in _ENDPOINTS if environment.get(name))
    try:
        from .otlp_tracing import open_otlp
    except ImportError as exc:
        warn(f"{named} is set, but {exc.name} is not installed (extra `otel`): there are no spans")
        return None
    captures = environment.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "")
    sample = Sample(_share(environment))
    try:
        return open_otlp(warn, sample, captures_content=captures.strip().lower() in _CAPTURES)
    except Exception as exc:  # noqa: BLE001 - work does not depend on it
        warn(f"{named} is set, but spans cannot be sent ({exc}): there are none")
        return None


def is_asked(environment: Mapping[str, str]) -> bool:
    """Say whether the environment asks for spans."""
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "").lower() == "none"
        or environment.get("OTEL_TRACES_SAMPLER", "").lower().endswith("always_off")
    )
    return not is_off and any(environment.get(name) for name in _ENDPOINTS)


def _share(environment: Mapping[str, str]) -> float:
    """Return the share of requests that OTEL_TRACES_SAMPLER_ARG says; all for what is none."""
    try:
        share = float(environment.get("OTEL_TRACES_SAMPLER_ARG") or 1.0)
    except ValueError:
        return 1.0
    return 1.0 if math.isnan(share) else min(1.0, max(0.0, share))
