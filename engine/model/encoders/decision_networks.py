"""Decision networks: heads over all tokens of a sequence, loaded from their files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelRefused
from ...scheduling.encoding import SchemaSpans
from ..weights.checkpoint import WHOLE, find_part
from ..weights.sanity import check_numbers
from .decision_heads import JOINT_WEIGHTS, MARKER_KINDS, JointHead, MarkerHead
from .joint_schema import JointSchemaHead
from .loaded_encoder import LoadedEncoder

# The encoder's weights, and those of a head that is not read.
_OTHERS = ("encoder.", "act_head.", "temperature")
_HEAD_DIM = 64


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


class OptionMarkers(nn.Module):
    """Option markers of Laya and Julia: a logit for each option of one question, in fp32.

    The encoder's states, plus an embedding of the question's kind, go through transformer layers;
    the state of the mask token before an option gives the option's logit. Modules have the names
    of the checkpoint.
    """

    def __init__(self, head: MarkerHead, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // _HEAD_DIM), 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.head = nn.TransformerEncoder(layer, head.num_layers, enable_nested_tensor=False)
        self.type_emb = nn.Embedding(len(MARKER_KINDS), width)
        self.scorer = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor, spans: SchemaSpans) -> Tensor:
        """Return the logits `[O]` of the options, from the last hidden states `[T, H]`."""
        del token_ids
        (kind,), (options,) = spans.kinds, spans.options
        states = self.head((hidden.float() + self.type_emb.weight[kind])[None])[0]  # [T, H]
        markers = torch.tensor([start for start, _ in options], device=hidden.device)
        logits: Tensor = self.scorer(states[markers])[:, 0]
        return logits
