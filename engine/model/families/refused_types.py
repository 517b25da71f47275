"""Model types that no class can run here, by their reasons; docs/models.md shows them.

What is in no table is tried, and refused by what its config says or its layers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REFUSED_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers keep a state that is no KV cache (linear attention, Mamba, convolutions)": (
            *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid"),
            *("inkling2_text", "inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
            *("mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5"),
            *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
            *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
        ),
        "layers attend to a selection of tokens (sparse attention)": (
            *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text"),
            *("glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text"),
        ),
        "layers attend within chunks of the context": ("llama4", "llama4_text"),
        "a layer calls attention more than once": ("diffllama", "hrm_text"),
        "its class computes attention by code of its own, which pages cannot replace": (
            *("bloom", "blt", "codegen", "cpmant", "falcon", "git", "gpt_neo"),
            *("gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "reformer"),
            *("stablelm", "xglm", "xlnet"),
        ),
        "it writes text only beside another network, or none": (
            *("emu3", "gemma4_assistant", "gemma4_unified_assistant", "mllama", "moshi"),
            *("moss_transcribe_diarize", "musicgen", "musicgen_melody"),
        ),
        "it is an encoder-decoder; of these only the Whisper family is served": (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("mvp", "pegasus", "plbart", "prophetnet", "t5", "trocr"),
        ),
    }
)


def reason_refused(model_type: str) -> str | None:
    """Return why no class can run a model type; None where one may."""
    return next((why for why, types in REFUSED_TYPES.items() if model_type in types), None)
