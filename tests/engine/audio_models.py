"""A tiny random model of Qwen2-Audio's kind, recordings for it, and its output in transformers."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.engine.families import COMMON
from tests.engine.scripted_model import pretrained_tokenizer

AUDIO = 300
RATE = 16_000
MARKS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
TEXT = {key: value for key, value in COMMON.items() if key != "head_dim"}
# It numbers recordings as the published one does, and knows them by a field or their type.
TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for message in messages %}<|im_start|>"
    "{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{% if 'audio' in content or 'audio_url' in "
    "content %}{% set count.value = count.value + 1 %}Audio {{ count.value }}: <|audio_bos|>"
    "<|AUDIO|><|audio_eos|>\n{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build() -> Any:
    """Create the tiny model, whose window is 30 s as in the published one."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config = Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2", "max_position_embeddings": 2048},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 80,
        },
        audio_token_index=AUDIO,
    )
    torch.manual_seed(7)
    network = Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager")
    for key, parameter in network.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
        elif "norm" in key and key.endswith("weight"):
            nn.init.normal_(parameter, 1.0, 0.2)
        elif key.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return network.eval().requires_grad_(requires_grad=False)


def save(network: Any, folder: Path) -> Any:
    """Write a folder that can be served; return transformers' processor of it."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = pretrained_tokenizer(TEMPLATE)
    tokenizer.add_tokens([f"<|none {i}|>" for i in range(AUDIO - len(tokenizer))])
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    assert tokenizer.convert_tokens_to_ids(MARKS[0]) == AUDIO
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=80, return_attention_mask=True)
    extractor.save_pretrained(folder)
    return Qwen2AudioProcessor(extractor, tokenizer, chat_template=TEMPLATE)


def clip(seconds: float, seed: int) -> NDArray[np.float32]:
    """Return noise whose volume rises and falls, on the grid of 16-bit samples."""
    count = round(seconds * RATE)
    noise = np.random.default_rng(seed).standard_normal(count) * np.sin(np.arange(count) / 3_000)
    return (np.round(noise * 3_000) / 2**15).astype(np.float32)


def as_wav(samples: NDArray[np.float32]) -> bytes:
    """Return the samples of a clip, exactly, in 16 bits."""
    buffer = BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 2**15).astype("<i2").tobytes())
    return buffer.getvalue()


@torch.inference_mode()
def generated(
    network: Any, processor: Any, text: str, clips: Sequence[NDArray[np.float32]], count: int
) -> tuple[list[int], list[int], torch.Tensor]:
    """Return the prompt's tokens, the greedy answer's, and the logits after the prompt."""
    recordings = {"audio": list(clips), "sampling_rate": RATE} if clips else {}
    inputs = processor(text=[text], return_tensors="pt", **recordings)
    inputs = {k: v for k, v in inputs.items() if k not in ("token_type_ids", "num_audio_tokens")}
    result = network.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=-1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    size = inputs["input_ids"].shape[1]
    ids = result.sequences[0]
    return inputs["input_ids"][0].tolist(), ids[size:].tolist(), result.logits[0][0]
