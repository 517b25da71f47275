"""Option markers of Laya and Julia: a logit for each option of one question, in fp32.

The encoder's states, plus an embedding of the question's kind, go through transformer layers; the
state of the mask token before an option gives the option's logit. Modules have the names of the
checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...scheduling.encoding import SchemaSpans
from .decision_heads import MARKER_KINDS, MarkerHead

_HEAD_DIM = 64


class OptionMarkers(nn.Module):
    """The head with its weights."""

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
