"""Joint schema head of Clef: scores every option of every question in one pass, in fp32.

The state and all questions are one sequence. Options gather evidence from all of its tokens,
questions from their options, from each other and from all tokens. An option's logit is a prior,
its likeness to the question, plus a gated joint score. Modules have the names of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...scheduling.encoding import SchemaSpans, Span
from .decision_heads import JointHead

_NUM_KINDS = 3
_MAX_LOG_SCALE = math.log(100.0)


class EvidenceLayer(nn.Module):
    """Cross-attention from options to the tokens of the sequence, and an MLP."""

    def __init__(self, width: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.query_norm, self.memory_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = _mlp(width, feedforward, width)

    def forward(self, options: Tensor, memory: Tensor) -> Tensor:
        """Return the options `[1, O, W]` after attention to the memory `[1, T, W]`."""
        keys = self.memory_norm(memory)
        found, _ = self.attention(self.query_norm(options), keys, keys, need_weights=False)
        options = options + found
        mixed: Tensor = self.feedforward(self.feedforward_norm(options))
        return options + mixed


class JointSchemaHead(nn.Module):
    """The head with its weights; `lexicon [V, H]` are the network's output embeddings."""

    def __init__(self, head: JointHead, lexicon: Tensor) -> None:
        super().__init__()
        hidden, width = head.hidden_size, head.width
        self._lexicon = lexicon
        self.hidden_norm = nn.LayerNorm(hidden)
        self.memory_projection = nn.Linear(hidden, width, bias=False)
        self.question_projection = nn.Linear(hidden, width, bias=False)
        self.option_question_projection = nn.Linear(hidden, width, bias=False)
        self.global_projection = nn.Linear(hidden, width, bias=False)
        self.option_context_projection = nn.Linear(hidden, width, bias=False)
        self.option_lexical_projection = nn.Linear(hidden, width, bias=False)
        self.type_embedding = nn.Embedding(_NUM_KINDS, width)
        sizes = (width, head.heads, head.feedforward)
        self.evidence_layers = nn.ModuleList(
            EvidenceLayer(*sizes) for _ in range(head.routing_layers)
        )
        self.option_summary_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                *sizes, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(head.layers)
        )
        self.field_norm, self.option_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.residual_scorer = _mlp(4 * width, width, 1)
        self.prior_logit_scale = nn.Parameter(torch.zeros(()))
        self.joint_logit_scale = nn.Parameter(torch.zeros(()))
        self.residual_gate = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor, token_ids: Tensor, spans: SchemaSpans) -> Tensor:
        """Return the logits `[O]` of all options, from the last hidden states `[T, H]`."""
        counts = [len(options) for options in spans.options]
        flat = [span for options in spans.options for span in options]
        device = hidden.device
        owner = torch.arange(len(counts), device=device).repeat_interleave(
            torch.tensor(counts, device=device)
        )  # [O]
        hidden = self.hidden_norm(hidden.float())
        memory = self.memory_projection(hidden)[None]  # [1, T, W]
        last = hidden[-1]  # [H]
        questions, contexts = _means(hidden, spans.questions), _means(hidden, flat)
        lexical = torch.stack([self._lexicon[token_ids[a:b]].float().mean(0) for a, b in flat])
        options = (  # [O, W]
            self.option_context_projection(contexts)
            + self.option_lexical_projection(lexical)
            + self.option_question_projection(questions)[owner]
        )
        for layer in self.evidence_layers:
            options = layer(options[None], memory)[0]
        fields = self._fields(questions, torch.split(options, counts), last, spans, memory)[owner]
        prior = _scale(self.prior_logit_scale) * functional.cosine_similarity(
            lexical, (questions + last)[owner], dim=-1
        )
        options = self.option_norm(options)
        features = [fields, options, fields * options, (fields - options).abs()]
        likeness = functional.cosine_similarity(fields, options, dim=-1)
        residual = self.residual_scorer(torch.cat(features, dim=-1))[:, 0]
        joint = _scale(self.joint_logit_scale) * likeness + residual
        logits: Tensor = prior + self.residual_gate.sigmoid() * joint
        return logits

    def _fields(
        self,
        questions: Tensor,
        options: Sequence[Tensor],
        last: Tensor,
        spans: SchemaSpans,
        memory: Tensor,
    ) -> Tensor:
        """Return a vector for each question `[Q, W]`, from its text, options and the others."""
        base = self.question_projection(questions)
        summaries = []
        for field, own in zip(base, options, strict=True):
            weights = (own @ field / math.sqrt(len(field))).softmax(0)
            summaries.append(weights @ own)
        kinds = torch.tensor(spans.kinds, device=base.device)
        fields = (
            base
            + self.option_summary_norm(torch.stack(summaries))
            + self.global_projection(last)
            + self.type_embedding(kinds)
        )[None]
        for layer in self.layers:
            fields = layer(fields, memory)
        normed: Tensor = self.field_norm(fields[0])
        return normed


def _means(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    return torch.stack([hidden[start:stop].mean(0) for start, stop in spans])


def _scale(logarithm: Tensor) -> Tensor:
    return logarithm.clamp(max=_MAX_LOG_SCALE).exp()


def _mlp(inputs: int, inner: int, outputs: int) -> nn.Sequential:
    # The checkpoint numbers a dropout between the two, which has no weights.
    return nn.Sequential(
        nn.Linear(inputs, inner), nn.GELU(), nn.Identity(), nn.Linear(inner, outputs)
    )
