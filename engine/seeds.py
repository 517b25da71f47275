"""Where the randomness of a choice comes from: its request's seed, or the request itself."""

from __future__ import annotations

from hashlib import blake2b

_SEED_BITS = 63


def seed_of_choice(
    request_seed: int | None, *, engine_seed: int, request_id: str, prompt: int, choice: int
) -> int:
    """Return the sampler's seed of one choice, in [0, 2**63).

    With a `request_seed` it depends on that and on the number of the `choice` alone: choice 0 is
    what `n: 1` would give, and every prompt of a list draws as if it were sent by itself. Without
    one, the engine's seed, the request's id and the number of the `prompt` stand in for it, so
    that equal prompts differ and a resumed job repeats its rows.
    """
    if request_seed is None:
        key = f"request {engine_seed} {request_id} {prompt} {choice}"
    else:
        key = f"seed {request_seed} {choice}"
    digest = blake2b(key.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
