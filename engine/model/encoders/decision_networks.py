"""Decision networks: heads over all tokens of a sequence, loaded from their files."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import ModelRefused
from ..weights.checkpoint import WHOLE, find_part
from ..weights.sanity import check_numbers
from .decision_heads import JOINT_WEIGHTS, JointHead, MarkerHead
from .joint_schema import JointSchemaHead
from .loaded_encoder import LoadedEncoder
from .option_markers import OptionMarkers

# The encoder's weights, and those of a head that is not read.
_OTHERS = ("encoder.", "act_head.", "temperature")


def load_network(name: str, head: JointHead | MarkerHead, loaded: LoadedEncoder) -> nn.Module:
    """Return the head of a loaded model; `ModelRefused` names problems with its weights."""
    from safetensors import safe_open

    module: nn.Module
    others: tuple[str, ...] = ()
    if isinstance(head, JointHead):
        assert loaded.lexicon is not None
        module, file = JointSchemaHead(head, loaded.lexicon), JOINT_WEIGHTS
    else:
        module, file, others = OptionMarkers(head, loaded.hidden_size), WHOLE, _OTHERS
    [path] = find_part(name, file).files
    with safe_open(path, framework="pt") as tensors:
        keys = [key for key in tensors.keys() if not key.startswith(others)]  # noqa: SIM118
        weights: dict[str, Any] = {key: tensors.get_tensor(key).float() for key in keys}
    check_numbers(name, weights.items())
    try:
        module.float().load_state_dict(weights)
    except RuntimeError as exc:
        reason = " ".join(str(exc).split())
        raise ModelRefused(f"{name}: {file} does not match {head}: {reason}") from exc
    return module.eval().requires_grad_(requires_grad=False).to(loaded.device)
