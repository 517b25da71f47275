"""Drift of log-probabilities: the change from quantising a model's weights at load, on a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

import torch
from torch import Tensor

from tidemill.protocol.contract import EngineError

from ...storage.disk_cache import CacheEntry
from ...storage.hub import find_folder
from ...text.tokenizer import load_tokenizer
from ...text.vocabulary import load_vocabulary, recall_vocabulary
from .logits import parity_tokens

MOST_TOKENS = 256
HELD_TEXT = """\
The harbour of Varde has been closed to ships over forty metres since the storm of last winter. The
council asked two engineers whether the old breakwater could be repaired; both said that it would be
cheaper to build another one. A vote is expected in May, and the work would take until 2029.

Subject: Order 48-2210
Hello, I ordered three blue lamps on 14 March and got two green ones and a kettle. Please send the
right ones to Anna Keller, 12 Mill Lane, Leeds, or give me my 86.40 pounds back. Thanks!

def mean(values: list[float]) -> float:
    \"\"\"Return the mean of some numbers; there must be one at least.\"\"\"
    return sum(values) / len(values)

Question: Which planet is closest to the sun, and how long is its year?
Answer: Mercury. It takes 88 days to go around the sun once.
"""


@dataclass(frozen=True, slots=True)
class Drift:
    """Differences of two models' log-probabilities for the next tokens of a text of `num_tokens`.

    `mean` and `largest` are over the reference's likeliest tokens; `equal` is the share of
    positions where both have the same likeliest token.
    """

    mean: float
    largest: float
    equal: float
    num_tokens: int

    @classmethod
    def between(cls, logits: Tensor, reference: Tensor) -> Self:
        """Return the drift of `logits [t, V]` from those of the `reference [t, V]`."""
        likeliest = reference.argmax(-1, keepdim=True)  # [t, 1]
        ours, theirs = (
            each.float().log_softmax(-1).gather(-1, likeliest) for each in (logits, reference)
        )
        apart = (ours - theirs).abs()
        equal = (logits.argmax(-1, keepdim=True) == likeliest).float().mean()
        return cls(float(apart.mean()), float(apart.max()), float(equal), len(likeliest))

    def note(self, method: str, dtype: torch.dtype) -> str:
        """Return a sentence for the user."""
        return (
            f"--quantization {method} changes log-probabilities by {self.mean:.3f} on average and "
            f"{self.largest:.2f} at most on {self.num_tokens} tokens of text, compared with "
            f"{str(dtype).removeprefix('torch.')}; the likeliest token is the same for "
            f"{self.equal:.1%}"
        )


def held_tokens(model: str, vocab_size: int) -> Tensor:
    """Return tokens `[t]` of the text; random ones if the model has no tokenizer."""
    try:
        folder = find_folder(model)
        vocabulary = recall_vocabulary(model, folder) or load_vocabulary(model, folder)
        tokenizer = load_tokenizer(model, vocabulary, vocab_size)
    except EngineError:  # a load of the whole model reports it, too
        return parity_tokens(vocab_size, ())
    ids = tokenizer.encode(HELD_TEXT, add_special_tokens=True)
    return torch.tensor(ids[:MOST_TOKENS])


def cached_drift(fact: CacheEntry, measure: Callable[[], Drift]) -> Drift:
    """Return the drift of a load, measured once per `fact` that it depends on."""
    entry = CacheEntry.from_inputs("drift", fact.digest)
    data = entry.load()
    if data is not None:
        return Drift(**json.loads(data))
    drift = measure()
    entry.save(json.dumps(asdict(drift)).encode())
    return drift
