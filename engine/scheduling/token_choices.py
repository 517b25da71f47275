"""Token choices: for each token of a sequence, its probability among the tokens that were allowed.

They are computed from the model's raw logits, before penalties and temperature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_ALTERNATIVES = 4_096
"""Most allowed tokens of a choice whose probabilities are stored; a free text has more."""

_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class TokenChoice(NamedTuple):
    """One token's choice: `logprob` is normalized over the allowed tokens, None for a forced token.

    `ids [K]` and `logprobs [K]` are the allowed tokens, including the token itself; empty for a
    forced token, and for more than `MAX_ALTERNATIVES`.
    """

    logprob: float | None
    ids: NDArray[np.int32] = _NO_IDS
    logprobs: NDArray[np.float32] = _NO_LOGPROBS


FORCED = TokenChoice(None)
"""The choice of a token without an alternative."""


def choice_among(token_id: int, ids: NDArray[Any], logits: NDArray[Any]) -> TokenChoice:
    """Return the choice of a token among the allowed `ids [K]`, which include it."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    logprobs = wide - highest - np.log(np.exp(wide - highest).sum())
    return TokenChoice(
        float(logprobs[ids == token_id][0]), ids.astype(np.int32), logprobs.astype(np.float32)
    )
