"""Known faults of transformers' classes, which are the reference of each parity check.

Uncorrected, they would refuse an engine that computes as a model's authors do. A test shows each
fault, and fails once transformers has corrected it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from torch import nn


class KnownFault(NamedTuple):
    """A fault of the modules of a class, its pull request, and the correction of a module."""

    class_name: str
    fault: str
    pull_request: str
    correct: Callable[[Any], None]


def _set_limits_of_config(mixer: Any) -> None:
    mixer.time_step_limit = tuple(getattr(mixer.config, "time_step_limit", None) or (0.0, inf))


FAULTS = (
    KnownFault(
        "NemotronHMamba2Mixer",
        "it raises dt to time_step_min in prompts, but not in later steps",
        "https://github.com/huggingface/transformers/pull/48989",
        _set_limits_of_config,
    ),
)


def correct_faults(module: nn.Module) -> None:
    """Correct the modules of a loaded network that have known faults."""
    for part in module.modules():
        for fault in FAULTS:
            if type(part).__name__ == fault.class_name:
                fault.correct(part)
