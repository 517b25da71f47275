"""Mixes of requests, by their numbers of tokens."""

from __future__ import annotations

from typing import NamedTuple


class Mix(NamedTuple):
    """Requests with `prompt` private tokens after `shared` ones, and `output` new ones."""

    prompt: int
    output: int
    shared: int = 0

    @classmethod
    def read(cls, words: str) -> Mix:
        """Parse "1024/128", or "512+100/100" where 512 are shared by all."""
        before, _, output = words.partition("/")
        shared, plus, prompt = before.rpartition("+")
        return cls(int(prompt), int(output), int(shared) if plus else 0)

    def __str__(self) -> str:
        """Return the mix in the form that is parsed."""
        shared = f"{self.shared}+" if self.shared else ""
        return f"{shared}{self.prompt}/{self.output}"

    def at_once(self, places: float, max_num_seqs: int) -> int:
        """Return how many half-finished requests fit into `places` of keys and values."""
        own = (places - self.shared) / (self.prompt + self.output / 2)
        return max(1, min(max_num_seqs, int(own)))


# The mixes of the engine's goals.
MIXES = tuple(map(Mix.read, ("1024/128", "128/1024", "220/200", "512+100/100")))
