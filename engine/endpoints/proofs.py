"""What a response says of the form of its choices, where the engine is told to prove it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.protocol.constraints import Asked


def proof(texts: Sequence[str | None], asked: Asked) -> dict[str, Any]:
    """Return our own field of a body: a verdict on each choice's text, null where it has none."""
    # Here, not above: the judges take longer to load than most engines ever need them.
    from engine.grammar.proof import verdict_on

    verdicts = [None if text is None else asdict(verdict_on(text, asked)) for text in texts]
    return {"proof": verdicts}
