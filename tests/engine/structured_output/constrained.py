"""Checks whether a constraint allows a text, by masking its tokens one by one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.engine.scripted_model import text_model
from tidemill.engine.scheduling.sequence import ConstraintState
from tidemill.engine.structured_output.grammar_backend import GrammarBackend
from tidemill.engine.text.text_model import TextModel
from tidemill.protocol.constraints.request import (
    JSON_WHITESPACE,
    Kind,
    OutputConstraint,
)


def grammars_of(model: TextModel) -> GrammarBackend:
    """Return the grammars of a model."""
    assert isinstance(model.grammars, GrammarBackend)
    return model.grammars


MODEL = text_model()
GRAMMARS = grammars_of(MODEL)


def constraint_of(kind: Kind, source: Any, whitespace: str = JSON_WHITESPACE) -> OutputConstraint:
    """Return the constraint that a field specifies."""
    text = source if isinstance(source, str) else json.dumps(source)
    return OutputConstraint(kind, text, "field", whitespace)


def allowed(watch: ConstraintState, model: TextModel = MODEL) -> list[int]:
    """Return the tokens that may come next."""
    mask = np.full(-(-model.vocab_size // 32), 0xFFFFFFFF, np.uint32)
    watch.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits[: model.vocab_size]).tolist()
    return ids


def lets_through(
    wanted: OutputConstraint,
    text: str,
    model: TextModel = MODEL,
    *,
    begins_after: str | None = None,
) -> bool:
    """Return whether a text is allowed as the whole output, in the model's own tokens."""
    watch = grammars_of(model).constraint(wanted, begins_after=begins_after).start_state()
    for token_id in ids_of(text, model):
        if token_id not in allowed(watch, model):
            return False
        watch.push(token_id)
    return bool(model.eos_token_ids & set(allowed(watch, model)))


def ids_of(text: str, model: TextModel = MODEL) -> list[int]:
    """Return tokens whose bytes are exactly the text, without any that a vocabulary adds."""
    line = model.tokenizer.encode("\n", add_special_tokens=False)
    ids = model.tokenizer.encode(f"\n{text}", add_special_tokens=False)[len(line) :]
    assert model.tokenizer.text_bytes(ids, skip_special_tokens=False) == text.encode()
    return ids
