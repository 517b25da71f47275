"""Second model of a batch, which answers the rows of which the first one is least sure."""

from __future__ import annotations

from tidemill.batch.errors import InvalidOption
from tidemill.batch.model import BatchError, Escalation
from tidemill.batch.validation import Findings
from tidemill.protocol.names import model_of, own_names
from tidemill.protocol.routes import DECISIONS, SYSTEM_ONE

from ..aws.calls import Operation
from ..deployment import Deployment

_ENDPOINTS = (DECISIONS.name, SYSTEM_ONE.name)
_PARAM = "escalate"


def escalation_of(deployment: Deployment, name: str, below: float) -> Escalation:
    """Return the second model with this name; raises InvalidOption for an unknown one."""
    model = model_of(name, deployment.models)
    if model is None:
        served = ", ".join(own_names(sorted(deployment.models))) or "none"
        words = f"`{_PARAM}` is {name[:100]!r}, which is not a served model: use one of {served}."
        raise InvalidOption(words, param=_PARAM)
    return Escalation(name, model, below)


def find_escalation_error(
    deployment: Deployment, second: Escalation, findings: Findings
) -> Operation[BatchError | None]:
    """Return why the second model of a valid file is unsuitable; None without a reason.

    Workers record the endpoints of their model, so those of a model that never ran are unknown.
    """
    if second.model == findings.model:
        return _error(f"`{_PARAM}` is {second.name!r}, the model of the requests: use another one.")
    if findings.endpoint not in _ENDPOINTS:
        words = f"`{_PARAM}` needs requests for {' or '.join(_ENDPOINTS)}, but the first one is for"
        return _error(f"{words} {findings.endpoint}: remove it.")
    endpoints = yield from deployment.fleets.get_endpoints(second.model)
    if endpoints and findings.endpoint not in endpoints:
        words = f"`{_PARAM}` is {second.name!r}, which does not support {findings.endpoint}"
        return _error(f"{words}: use a chat model.")
    return None


def _error(message: str) -> BatchError:
    return BatchError(InvalidOption.code, message, _PARAM)
