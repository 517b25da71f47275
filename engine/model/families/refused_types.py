"""Model types that no transformers class can run here, by reason, for docs/reference/models.md.

Unlisted types are tried, and refused because of their config or their layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OWN_CODE = "its class has its own attention code, which paged attention cannot replace"
SPEECH = "it is a speech model; only Whisper's family and Qwen2-Audio read recordings"
REFUSED_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers keep a state other than a KV cache (linear attention, Mamba, convolutions)": (
            *("bailing_hybrid", "falcon_mamba", "inkling2_loop_text", "inkling2_text"),
            *("inkling_text", "jamba", "kimi_linear", "lara_mini", "lfm3", "mamba", "minimax"),
            *("olmo_hybrid", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
        ),
        "layers attend to a selection of tokens (sparse attention)": (
            *("axk2", "deepseek_v4", "dots3_note", "dots3_note_text", "hy_v4", "hy_v4_vl"),
            *("hy_v4_vl_text", "qwen4_exp", "qwen4_exp_text"),
        ),
        "a layer calls attention more than once": ("diffllama", "dory", "hrm_text"),
        OWN_CODE: (
            *("bloom", "blt", "codegen", "cpmant", "git", "gpt_neo", "gpt_neox_japanese"),
            *("gptj", "mpt", "openai-gpt", "reformer", "xglm", "xlnet"),
        ),
        "it generates text only together with another network, or not at all": (
            *("emu3", "gemma4_assistant", "gemma4_unified_assistant", "mllama", "moshi"),
            *("musicgen", "musicgen_melody"),
        ),
        SPEECH: (
            *("canary", "cohere_asr", "data2vec-audio", "dia", "fun_asr_nano", "glmasr"),
            *("granite_speech", "granite_speech5_ctc", "granite_speech_plus", "hubert"),
            *("kyutai_speech_to_text", "lasr_ctc", "moonshine", "moonshine_streaming"),
            *("moss_transcribe_diarize", "nemo_speechlm", "nemotron3_5_asr"),
            *("nemotron_asr_streaming", "omniasr", "omniasr_ctc", "parakeet_ctc"),
            *("parakeet_rnnt", "parakeet_tdt", "qwen3_asr", "seamless_m4t", "seamless_m4t_v2"),
            *("sew", "sew-d", "speech-encoder-decoder", "speech_to_text", "speecht5", "unispeech"),
            *("unispeech-sat", "vibevoice", "vibevoice_asr", "voxtral", "voxtral_realtime"),
            *("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm"),
        ),
        "it is an encoder-decoder; of these only the Whisper family is supported": (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("mvp", "pegasus", "plbart", "prophetnet", "t5", "trocr"),
        ),
    }
)


ONLY_OWN_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "falcon": OWN_CODE,
        **dict.fromkeys(
            (
                *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2"),
                *("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
            ),
            "its layers keep a state other than a KV cache",
        ),
        **dict.fromkeys(
            ("deepseek_v32", "glm_moe_dsa"), "its layers attend to a selection of tokens"
        ),
        "llama4_text": "its layers attend within chunks of the context",
        "nemotron": "its class does not pass the arguments that paged attention needs",
        "stablelm": OWN_CODE,
    }
)
"""Families of the engine's own decoder whose classes cannot run models that it does not support."""

VARIANTS: Mapping[str, str] = MappingProxyType(
    {"internvl_chat": "the version whose name ends in -hf, such as OpenGVLab/InternVL3-8B-hf"}
)
"""Versions for transformers' own classes, of model types that come with separate code."""

_MARKS = "it marks the answer to a question in a text"
HEADS: Mapping[str, str] = MappingProxyType(
    {
        "ForMultipleChoice": "it chooses one of several endings",
        "ForNextSentencePrediction": "it predicts whether one sentence follows another",
        "ForProcessRewardModel": "it scores the steps of an answer",
        "QuestionAnswering": _MARKS,
        "QuestionAnsweringSimple": _MARKS,
        "RewardModel": "it scores answers; for that only ForSequenceClassification is supported",
    }
)
"""What heads compute that no endpoint serves, by the end of their class's name."""


def use_of_head(class_name: str) -> str | None:
    """Return what the head of a class computes if no endpoint serves it, else None."""
    return next((use for suffix, use in HEADS.items() if class_name.endswith(suffix)), None)


def refusal_of_head(class_name: str) -> str:
    """Return the reason for which a class with a trained head is refused, and what to do."""
    use = use_of_head(class_name)
    what = "" if use is None else f": {use}"
    return (
        f"it has a trained head ({class_name}) that no endpoint serves{what}. Pass `--convert "
        "embed` to leave the head out and serve vectors."
    )


def reason_refused(model_type: str) -> str | None:
    """Return why no class can run a model type; None if one may."""
    if model_type in ONLY_OWN_TYPES:
        return ONLY_OWN_TYPES[model_type]
    return next((why for why, types in REFUSED_TYPES.items() if model_type in types), None)


def reason_unknown(model_type: object, *, has_own_code: bool) -> str:
    """Return why a model type that transformers does not know is refused, and what to use."""
    import transformers

    who = f"neither the engine nor transformers {transformers.__version__} knows"
    reason = f"{who} its model type {model_type!r}"
    if not has_own_code:
        return reason
    variant = VARIANTS.get(str(model_type), "a version that transformers' own classes run")
    return f"{reason}, and code from a model's folder (auto_map) is never run; use {variant}"
