"""Customer messages made by rule, each with the fields that are in it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

SEED: Final = 1
NAMES: Final = (
    "Maria", "Tom", "Aisha", "Jonas", "Priya", "Lucas", "Emma", "Omar", "Sofia", "Daniel",
    "Yuki", "Peter", "Nadia", "Carlos", "Hannah", "Ivan", "Grace", "Mateo", "Chloe", "Samir",
    "Ingrid", "David", "Leila", "Marco", "Olivia",
)  # fmt: skip
CITIES: Final = (
    "Lyon", "Boston", "Madrid", "Oslo", "Dublin", "Toronto", "Berlin", "Porto", "Chicago",
    "Vienna", "Leeds", "Seattle", "Milan", "Prague", "Denver", "Krakow", "Austin", "Geneva",
    "Helsinki", "Bristol", "Montreal", "Athens", "Phoenix", "Ghent", "Cork",
)  # fmt: skip
PRODUCTS: Final = (
    "coffee grinder", "desk lamp", "rain jacket", "bluetooth speaker", "office chair", "tent",
    "electric kettle", "yoga mat", "running shoes", "phone case", "toaster", "backpack",
    "bike helmet", "water bottle", "keyboard", "headphones", "rice cooker", "wool blanket",
    "alarm clock", "sleeping bag", "blender", "camera", "suitcase", "board game", "wall clock",
)  # fmt: skip
_FORMS: Final = (
    "Hi, {name} here from {city}. My {product} arrived broken and I want a refund.",
    "hello!! I ordered a {product} two weeks ago and it still isnt here. {name}, {city}",
    "The {product} stopped working after one day. Please call me. Regards, {name} ({city})",
    "My name is {name} and I live in {city}. Could you send me a manual for the {product}?",
    "Dear team, the {product} I bought is the wrong colour. Can I exchange it? {name} from {city}",
    "i love the {product}, it's great!!! thanks a lot - {name} in {city}",
    "This is {name}. I moved to {city} last month, where do you want me to return the {product}?",
    "Order 4471: the box was empty, no {product} inside. Not happy. {name}, {city}",
    "Good morning, does the {product} come with a warranty? I am in {city}. Thanks, {name}",
    "Two of the screws for the {product} are missing. Ship them to {city} please. Yours, {name}",
    "{name} ({city}) asked on the phone whether the {product} can be repaired.",
    "Greetings from {city}! How do I clean my {product}? Best wishes, {name}",
)


@dataclass(frozen=True, slots=True)
class Message:
    """A message, and the fields that a reader finds in it."""

    text: str
    fields: dict[str, str]


def make_messages(count: int) -> list[Message]:
    """Return a number of messages, the same ones each time."""
    rng = random.Random(SEED)
    messages = []
    for _ in range(count):
        fields = {
            "name": rng.choice(NAMES),
            "city": rng.choice(CITIES),
            "product": rng.choice(PRODUCTS),
        }
        messages.append(Message(rng.choice(_FORMS).format(**fields), fields))
    return messages


def count_right(fields: dict[str, str], answer: object) -> int:
    """Return how many of the fields an answer has right, whatever its capitals are."""
    if not isinstance(answer, dict):
        return 0
    return sum(
        str(answer.get(name, "")).strip().casefold() == value.casefold()
        for name, value in fields.items()
    )
