"""Values of the dialog that retries a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch
from tidemill.batch.retry import FailureCounts, check_retryable

_LIMITS: Final = MappingProxyType(
    {
        "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
        "/v1/completions": ("max_tokens", None),
        "/v1/responses": ("max_output_tokens", None),
    }
)
"""Parameter that limits the tokens of an answer, and an alias that would override it."""


def retry_values(batch: Batch, counts: FailureCounts | None) -> Mapping[str, Any]:
    """Return the values of `retry.html`; `counts` is None if the failures were not counted.

    A batch that cannot be retried has no failed requests there.
    """
    try:
        check_retryable(batch)
    except HandlerError:
        return {"num_failed": 0}
    done = 0 if batch.final is None else batch.final.completed
    limit, replaced = _LIMITS.get(batch.endpoint, (None, None))
    conversion = batch.conversion
    recipe = None if conversion is None or conversion.recipe is None else conversion.recipe
    return {
        "batch": batch,
        "counts": counts,
        "num_failed": max(0, batch.num_rows - done) if counts is None else counts.total,
        "num_retryable": 0 if counts is None else counts.num_selected(include_invalid=False),
        "num_fixed": 0 if counts is None else counts.invalid + counts.malformed,
        "limit": limit,
        "replaced": replaced,
        "is_table": recipe is not None,
        "prompt": "" if recipe is None else _prompt_of(recipe),
    }


def _prompt_of(recipe: str) -> str:
    prompt = json.loads(recipe).get("prompt")
    return prompt if isinstance(prompt, str) else ""
