"""Second model of a batch, which answers the rows of which the first one is least sure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.batch.errors import InvalidOption
from tidemill.batch.escalation import Escalation
from tidemill.batch.model import BatchError, Options
from tidemill.batch.validation import Findings
from tidemill.protocol.names import model_of, own_names
from tidemill.protocol.routes import CHAT_COMPLETIONS, DECISIONS, SYSTEM_ONE

from ..aws.calls import Operation
from ..deployment import Deployment

if TYPE_CHECKING:
    from tidemill.batch.table.recipe import Recipe

_ENDPOINTS = (DECISIONS.name, SYSTEM_ONE.name)
_PARAM = "escalate"


def escalation_of(deployment: Deployment, name: str, requested: Options | Recipe) -> Escalation:
    """Return the second model with this name; raises InvalidOption for an unknown one."""
    model = model_of(name, deployment.models)
    if model is None:
        served = ", ".join(own_names(sorted(deployment.models))) or "none"
        words = f"`{_PARAM}` is {name[:100]!r}, which is not a served model: use one of {served}."
        raise InvalidOption(words, param=_PARAM)
    below, target = requested.escalate_below, requested.target_accuracy
    return Escalation(name, model, below, target, by=requested.escalate_by)


def find_escalation_error(
    deployment: Deployment, second: Escalation, findings: Findings, *, has_gold: bool
) -> Operation[BatchError | None]:
    """Return why the second model of a valid file is unsuitable; None without a reason.

    Workers record the endpoints of their model, so those of a model that never ran are unknown.
    """
    if second.model == findings.model:
        return _error(f"`{_PARAM}` is {second.name!r}, the model of the requests: use another one.")
    if findings.endpoint not in _ENDPOINTS:
        words = f"`{_PARAM}` needs requests for {' or '.join(_ENDPOINTS)}, but the first one is for"
        return _error(f"{words} {findings.endpoint}: remove it.")
    if second.is_waiting and not has_gold:
        words = "`target_accuracy` needs known answers, which only a table with `gold` has"
        return BatchError(InvalidOption.code, f"{words}: use `escalate_below`.", "target_accuracy")
    endpoints = yield from deployment.fleets.get_endpoints(second.model)
    needed = CHAT_COMPLETIONS.name if second.by == "chat" else findings.endpoint
    if endpoints and needed not in endpoints:
        words = f"`{_PARAM}` is {second.name!r}, which does not support {needed}"
        return _error(f"{words}: use a chat model.")
    return None


def _error(message: str) -> BatchError:
    return BatchError(InvalidOption.code, message, _PARAM)
