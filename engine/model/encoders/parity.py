"""Parity check of encoders against transformers' eager attention.

As with decoders, the check in fp32 shows whether both are the same function, since only the order
of sums may differ. The check in the served dtype allows its rounding error, and tests its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...scheduling.encoding import EncodingRequest
from ..native import TOLERANCE, ParityResult
from ..parity.logits import is_rounding, parity_tokens
from .eager import EncoderOutput
from .forward import TokenSequence, hidden_states, num_pages, pack_ids, run
from .loaded_encoder import LoadedEncoder
from .position_bias import FARTHEST

# Logits of a classifier may be close to 0: their error is measured relative to at least 1.
LEAST_LOGIT = 1.0


def parity_sequences(model: LoadedEncoder) -> list[TokenSequence]:
    """Return sequences of random tokens: long and short ones, one of two segments."""
    windows = [FARTHEST if shape.position_bias else shape.window for shape in model.shapes]
    tokens = parity_tokens(model.vocab_size, windows)[: model.max_model_len].tolist()
    cut = len(tokens) // 3 + 1
    requests = [EncodingRequest(part) for part in (tokens, tokens[:1], tokens[-cut:], tokens)]
    if model.num_types > 1:
        types = [int(place > cut // 2) for place in range(cut)]
        requests.append(EncodingRequest(tokens[:cut], types))
    return [TokenSequence(request, pack_ids(request.token_ids)) for request in requests]


def check_parity(
    loaded: LoadedEncoder,
    load_exactly: Callable[[], LoadedEncoder],
    answer: Callable[
        [Sequence[TokenSequence]], tuple[Sequence[EncoderOutput], Sequence[EncoderOutput]]
    ],
    num_layers: int | None = None,
) -> ParityResult:
    """Compare hidden states, and a classifier's logits, with those that transformers `answer`s.

    Both are compared in fp32 and in the `loaded` dtype, which may differ by twice as much.
    `load_exactly` loads the model in fp32, or its first `num_layers`. The `loaded` model is not
    compared if it is in fp32 already, or if only some layers are checked.
    """
    sequences = parity_sequences(loaded)
    is_exact = loaded.dtype == torch.float32 and num_layers is None
    exact = loaded if is_exact else load_exactly()
    got = compute_outputs(exact, sequences)
    del exact
    expected, rounded = answer(sequences)
    distance = _distance(got, expected)
    holds = distance <= TOLERANCE
    if not holds or is_exact or num_layers is not None:
        return ParityResult(holds, distance, num_layers)
    distance = _distance(compute_outputs(loaded, sequences), expected)
    holds = is_rounding(distance, _distance(rounded, expected), loaded.dtype)
    return ParityResult(holds, distance, None)


def compute_outputs(
    model: LoadedEncoder, sequences: Sequence[TokenSequence]
) -> list[EncoderOutput]:
    """Return a model's output for sequences that run together."""
    lengths = [sequence.num_tokens for sequence in sequences]
    attention = model.attention(num_pages(model, sum(lengths), len(lengths)), len(lengths))
    hidden = hidden_states(model, attention, sequences).float()
    if model.pooler.is_sparse:
        model = model.giving("token_vectors")
    if not model.pooler.parts:
        return [EncoderOutput(own, None) for own in torch.split(hidden, lengths)]
    values = run(model, attention, sequences)
    rows = torch.split(values, lengths) if model.pooler.is_per_token else values
    return [
        EncoderOutput(own, row) for own, row in zip(torch.split(hidden, lengths), rows, strict=True)
    ]


def _distance(got: Sequence[EncoderOutput], expected: Sequence[EncoderOutput]) -> float:
    """Return the largest relative L2 distance of a token's hidden states or a sequence's logits."""
    apart = [0.0]
    for ours, theirs in zip(got, expected, strict=True):
        apart.append(_relative(ours.hidden, theirs.hidden, 1e-6))
        if ours.logits is not None and theirs.logits is not None:
            apart.append(_relative(ours.logits, theirs.logits, LEAST_LOGIT))
    return max(apart)


def _relative(got: Tensor, expected: Tensor, least: float) -> float:
    difference = torch.linalg.vector_norm(got - expected, dim=-1)
    scale = torch.linalg.vector_norm(expected, dim=-1).clamp(min=least)
    return float((difference / scale).max())
