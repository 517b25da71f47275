"""Order of lines: prompts with a common prefix run together."""

from __future__ import annotations

from pydantic_core import to_json

from tidemill.batch.file.lines import Overlong, RawLine
from tidemill.handler.worker.shard.line_order import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    LineOrder,
    block_hashes,
)


def line(*texts: str) -> RawLine:
    """Return a line whose prompt consists of that many texts of a block each."""
    prompt = "".join(f"{text:.<{BLOCK_BYTES}}" for text in texts)
    request = {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": prompt}}
    return RawLine(1, to_json(request))


def in_order(*shards: list[str]) -> str:
    """Return names of lines in their order; a line's name is its prompt, a letter a text."""
    order = LineOrder(0)
    ranked = [
        pair
        for names in shards
        for pair in zip(order.add(block_hashes(line(*name)) for name in names), names, strict=True)
    ]
    return " ".join(name for _, name in sorted(ranked))


def test_lines_of_a_prefix_come_where_its_first_does() -> None:
    """Their shard does not matter; those that share a longer prefix are next to each other."""
    assert in_order(["ab", "bb", "ca"], ["aa", "bc", "ab"], ["bb", "dd"]) == (
        "ab ab aa bb bb bc ca dd"
    )


def test_lines_that_share_nothing_stay_in_their_order() -> None:
    """So do those too short for a block, and invalid requests."""
    assert in_order(["da", "bc"], ["ad", ""], ["c"]) == "da bc ad  c"
    assert block_hashes(RawLine(1, b"{")) == []
    assert block_hashes(RawLine(1, b"", Overlong(100, 10, "x"))) == []


def test_a_later_order_comes_behind() -> None:
    """Lines that share a prefix do so, too: the cache has lost it."""
    hashes = block_hashes(line("a", "b"))
    later, earlier = LineOrder(1).add([hashes]), LineOrder(0).add([[], hashes])
    assert max(earlier) < min(later)


def test_a_long_prompt_is_looked_at_as_far_as_it_is_worth() -> None:
    """Memory is bounded by the length of the line, and by this."""
    assert len(block_hashes(line(*"abc" * MAX_BLOCKS))) == MAX_BLOCKS
    assert len(block_hashes(line(*"abc"))) == 3
