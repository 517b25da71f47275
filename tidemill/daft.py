"""Answers in Daft; see docs/integrations/daft.md.

`Provider` implements Daft's own interface, which may change in any release. It is experimental and
loaded on first use, so that such a change does not break `answer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sdk.integrations.daft import answer, decide

if TYPE_CHECKING:
    from .sdk.integrations.daft_provider import Provider

__all__ = ["Provider", "answer", "decide"]


def __getattr__(name: str) -> object:
    """Import the provider on first use."""
    if name != "Provider":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .sdk.integrations import daft_provider

    return daft_provider.Provider
