"""Grammars in llguidance's form → what goes through them, within bounds that nothing may break.

llguidance goes down into a grammar as deep as that goes, and a stack that runs over ends the
process: what it is given is bounded, and compiled in a thread whose stack bears many times that.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Chains of 5,000 rules or references have run over 8 MiB; below are 1,000 rules, and schemas of up
# to 1,000 references with 50 others around each. What is not used of a stack takes no memory.
_STACK_BYTES = 512 * 2**20
# Fuel bounds what a lexer takes to be made: at a million some took a second and 200 MB.
_LIMITS = LLParserLimits(
    verbose_errors=False,
    initial_lexer_fuel=250_000,
    max_lexer_states=50_000,
)
MAX_REGEX_CHARS = 10_000
MAX_RULES = 1_000
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w.-]*(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Return what goes through a grammar; it says itself what is wrong with that."""
    return (
        _compiler().submit(lambda: LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS)).result()
    )


def check_lark(source: str) -> None:
    """Raise ValueError for a grammar of too many rules, or with one that is too long."""
    starts = [match.start() for match in _RULE.finditer(source)]
    if len(starts) > MAX_RULES:
        raise ValueError(f"it has {len(starts):,} rules; at most {MAX_RULES:,} are served")
    longest = max(
        stop - start for start, stop in zip([0, *starts], [*starts, len(source)], strict=True)
    )
    if longest > MAX_REGEX_CHARS:
        raise ValueError(
            f"a rule has {longest:,} characters; at most {MAX_REGEX_CHARS:,} are served"
        )


def check_regex(source: str) -> None:
    """Raise ValueError for an expression that is too long: what it takes grows with the square."""
    if len(source) > MAX_REGEX_CHARS:
        raise ValueError(
            f"it has {len(source):,} characters; at most {MAX_REGEX_CHARS:,} are served"
        )


@cache
def _compiler() -> ThreadPoolExecutor:
    """Return the thread that compiles."""
    compiler = ThreadPoolExecutor(1, "tidemill-grammars")
    before = threading.stack_size(_STACK_BYTES)
    try:
        compiler.submit(int).result()  # a pool starts its thread with its first task
    finally:
        threading.stack_size(before)
    return compiler
