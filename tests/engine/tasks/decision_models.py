"""Tiny random decision models in folders, in the layouts in which they are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, Qwen3_5Config, Qwen3_5Model

from tidemill.demo import MODEL_PATH

VOCAB = json.loads((MODEL_PATH / "config.json").read_bytes())["vocab_size"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 2048,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    },
}
CODES = [chr(65 + n) for n in range(26)] + [f"{a}{b}" for a in "ABCDEFGHI" for b in "QRSTUVWXY"]


def save_module(module: PreTrainedModel, folder: Path) -> None:
    """Save a module whose weights are all random, with a tokenizer and a ChatML template."""
    for weight in module.parameters():
        weight.data += torch.randn_like(weight) * 0.1
    module.eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    (folder / "chat_template.jinja").write_text(CHATML)


def save_d3(folder: Path, **changes: Any) -> tuple[Any, torch.Tensor]:
    """Save a Decision 3.0 model; return its backbone and its readout."""
    torch.manual_seed(11)
    module = Qwen3_5Model(Qwen3_5Config(**QWEN, attn_implementation="eager"))
    save_module(module, folder)
    readout = torch.randn(len(CODES), 48)
    save_file({"weight": readout}, folder / "readout.safetensors")
    described = {
        "format_version": 1,
        "prompt": "d3",
        "codes": CODES,
        "token_ids": list(range(len(CODES))),
        "temperature": 2.0,
        "attention_mode": "noncausal_full_attention",
        **changes,
    }
    (folder / "decision_config.json").write_text(json.dumps(described))
    return module.language_model, readout


def token_ids(folder: Path, text: str) -> torch.Tensor:
    """Return the tokens of a prompt by transformers' tokenizer, `[1, T]`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
