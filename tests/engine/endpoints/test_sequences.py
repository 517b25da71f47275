"""What both endpoints make of a request: seeds, and what reaches every sequence."""

from __future__ import annotations

from engine.endpoints.sequences import seed_of_choice
from tests.engine.scripted_model import Scene


def seed(request_seed: int | None = None, **changes: object) -> int:
    """Return the seed of the first choice of a request, but for the changes."""
    asked = {"engine_seed": 0, "request_id": "req_1", "prompt": 0, "choice": 0} | changes
    return seed_of_choice(request_seed, **asked)  # type: ignore[arg-type]


def test_a_requests_seed_and_the_number_of_the_choice_alone_decide() -> None:
    """Neither the line, nor the engine's seed, nor the place in a list of prompts matters."""
    assert seed(5) == seed(5, engine_seed=1, request_id="req_2", prompt=3)
    assert seed(5) != seed(6)
    assert seed(5) != seed(5, choice=1)


def test_without_a_seed_each_choice_draws_its_own() -> None:
    """The same line of the same job draws the same again, and everything else differs."""
    changes: list[dict[str, object]] = [
        {},
        {"engine_seed": 1},
        {"request_id": "req_2"},
        {"prompt": 1},
        {"choice": 1},
    ]
    assert len({seed(**change) for change in changes}) == len(changes)
    assert seed() == seed()


def test_a_seed_fits_a_signed_integer_of_64_bits() -> None:
    """Whatever the client's seed, negative ones too."""
    for request_seed in (-(2**63), -1, 0, 2**63 - 1, None):
        assert 0 <= seed(request_seed) < 2**63


def test_a_salt_reaches_every_sequence_of_its_request() -> None:
    """Of both endpoints; without one, and with null, all share."""
    scene = Scene()
    scene.chat(cache_salt="one", n=2)
    scene.complete(["a", "b"], cache_salt="two")
    scene.chat(cache_salt=None)
    scene.complete()
    salts = [request.cache_salt for request in scene.generator.requests]
    assert salts == ["one", "one", "two", "two", "", ""]
