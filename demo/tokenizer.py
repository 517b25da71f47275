"""The demo model's tokenizer: byte-level BPE in which operands are always spelt out.

A word of the fixed text (see `questions.fixed_text`) is one token and everything else is spelt
byte by byte, digits one by one: copying, reversing and adding are then the same task for every
operand. It is BPE without merges and with `ignore_merges`: what is in the vocabulary as a whole is
taken, what is not stays bytes.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from . import questions

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = """\
{%- if tools -%}
    {{- "<|im_start|>system\\n" -}}
    {%- if messages[0].role == "system" -%}
        {{- messages[0].content ~ "\\n" -}}
    {%- endif -%}
    {%- for tool in tools -%}
        {{- (tool.function | tojson) ~ "\\n" -}}
    {%- endfor -%}
    {{- "Call with <tool_call>{name, arguments}</tool_call>.<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant", "tool"] -%}
        {{- raise_exception("The demo model knows no role " ~ message.role) -}}
    {%- endif -%}
    {%- if not (tools and loop.first and message.role == "system") -%}
        {{- "<|im_start|>" ~ message.role ~ "\\n" ~ (message.content or "") -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
            {{- (call.function.arguments | tojson) ~ "}</tool_call>" -}}
        {%- endfor -%}
        {{- "<|im_end|>\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer, the same one every time; `max_length` is the model's context."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    words = {"user", "assistant", "system", "\n"}
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {
        piece
        for text in (*questions.fixed_text(), *words)
        for piece, _ in splitter.pre_tokenize_str(text)
    }
    vocabulary += sorted(pieces - set(vocabulary))
    bpe = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(vocabulary)}, [], ignore_merges=True)
    )
    bpe.pre_tokenizer = splitter
    bpe.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    bpe.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
