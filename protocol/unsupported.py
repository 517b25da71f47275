"""Unsupported parameters of other servers that would change the result.

Ignoring one of them would give a plausible but wrong answer, so each is refused by name unless
its value is neutral. Parameters that are in neither this table nor a request's model are
unknown or harmless (`user`, `metadata`, `store`, `service_tier`, …): accepted.
"""

from __future__ import annotations

from types import MappingProxyType

from .validation import NeutralValues

_TOOLS: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
}

_DECODING: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "suffix": ("",),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "vllm_xargs": ({},),
}

_INPUT: dict[str, tuple[object, ...]] = {
    "audio": (),
    "modalities": (["text"], []),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "prompt_embeds": (),
    "chat_template": (),
    "input_ids": (),
    "lora_path": (),
    "lora_request": (),
    "session_params": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}

# Of other vendors' requests, where they are objects that are read, or content that is not here.
_VENDORS: dict[str, tuple[object, ...]] = {
    "generationConfig": ({},),
    "inferenceConfig": ({},),
    "additionalModelRequestFields": ({},),
    "thinkingConfig": ({},),
    "cachedContent": (),
    "guardrailConfig": ({},),
    "promptVariables": ({},),
    "additionalModelResponseFieldPaths": ([],),
    "outputConfig": ({},),
    "mcp_servers": ([],),
}

_OUTPUT: dict[str, tuple[object, ...]] = {
    "return_hidden_states": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (False, True),
    "return_routed_experts": (False,),
    "return_meta_info": (False,),
}

_VECTORS: dict[str, tuple[object, ...]] = {
    "embed_dtype": ("float32", "float"),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "images": ([],),
    "input_type": (),
    "embedding_types": (["float"],),
    "output_dimension": (),
}

_SCORES: dict[str, tuple[object, ...]] = {
    "top_k": (),
    "rank_fields": (["text"],),
    "max_chunks_per_doc": (),
}

# Older names of `use_activation`.
_ACTIVATION: dict[str, tuple[object, ...]] = {"activation": (True,), "softmax": (True,)}

# Of transformers' pipelines.
_SPLITTING: dict[str, tuple[object, ...]] = {
    "is_split_into_words": (False,),
    "offset_mapping": (),
    "delimiter": (),
}

# Of classifiers elsewhere: labels that the model was not trained for, and other forms of output.
_LABELS: dict[str, tuple[object, ...]] = {
    "candidate_labels": (),
    "hypothesis_template": (),
    "function_to_apply": (),
    "top_k": (),
    "ignore_labels": (["O"],),
    "stride": (0,),
}

GENERATION: NeutralValues = MappingProxyType(_TOOLS | _DECODING | _INPUT | _OUTPUT | _VENDORS)
_OF_CHATS = frozenset({"tools", "tool_choice", "thinking_token_budget"})
CHAT: NeutralValues = MappingProxyType(
    {name: GENERATION[name] for name in GENERATION if name not in _OF_CHATS}
)
_POOLING = _INPUT | _VECTORS
VECTORS: NeutralValues = MappingProxyType(_POOLING)
COHERE: NeutralValues = MappingProxyType(_INPUT)
SCORES: NeutralValues = MappingProxyType(_POOLING | _SCORES | _ACTIVATION)
LABELS: NeutralValues = MappingProxyType(_POOLING | _LABELS | _ACTIVATION | _SPLITTING)
# Of embeddings, and of vLLM's plugins: `/pooling` does not read them.
_OF_VECTORS: dict[str, tuple[object, ...]] = {
    "activation": (),
    "softmax": (),
    "data": (),
    "dimensions": (),
    "normalize": (),
    "output_dtype": ("float", "float32"),
}
POOL: NeutralValues = MappingProxyType(_POOLING | _OF_VECTORS | _SPLITTING)
MODERATION: NeutralValues = MappingProxyType({**LABELS, "use_activation": (True,)})

# Decisions are read, not generated; a joint read needs a diffusion model.
_READS: dict[str, tuple[object, ...]] = {
    **_INPUT,
    "temperature": (1, 0),
    "max_tokens": (),
    "joint": (False,),
    "audio": ([],),
    "videos": ([],),
}
DECISION: NeutralValues = MappingProxyType({**_READS, "images": ([],)})
SYSTEM_ONE_BODY: NeutralValues = MappingProxyType(_READS)

# Parameters of responses that need stored data or built-in tools, and those of decisions.
RESPONSE: NeutralValues = MappingProxyType(
    {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "context_management": ([],),
        "max_tool_calls": (),
        "questions": (),
        "moderation": (),
        "image": (),
        "n": (1,),
        "truncation": ("disabled",),
    }
)

_LISTS = ("keywords", "languages", "include", "known_speaker_names", "known_speaker_references")

# OpenAI's and vLLM's transcription parameters; lists are also listed by their form names.
TRANSCRIPTION: NeutralValues = MappingProxyType(
    {
        **{f"{name}{ending}": ([],) for name in _LISTS for ending in ("", "[]")},
        "to_language": (),
        "hotwords": ("", []),
        "chunking_strategy": ("auto",),
        "use_beam_search": (False,),
        "n": (1,),
        "length_penalty": (1,),
        "max_completion_tokens": (),
        "max_tokens": (),
        "stop": ("", []),
        "logit_bias": ({},),
        "logits_processors": ([],),
        "watermarking": (False,),
        "vllm_xargs": ({},),
    }
)
TRANSLATION: NeutralValues = MappingProxyType(
    {
        **TRANSCRIPTION,
        "to_language": ("en", "english", "English"),
        "timestamp_granularities": ([], ["segment"]),
        "timestamp_granularities[]": ([], ["segment"]),
    }
)
