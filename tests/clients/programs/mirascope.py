"""Calls by `/v1/responses`: whole, streamed, continued, and as a pydantic model.

Package: mirascope
Point: `llm.register_provider("openai", base_url=URL, api_key=KEY)`
"""

import json

from mirascope import llm
from pydantic import BaseModel

MODEL = "openai/tidemill-demo"


class Home(BaseModel):
    """A person's home."""

    city: str


@llm.call(MODEL, temperature=0)
def capital() -> str:
    """Ask for a capital."""
    return "What is the capital of France?"


@llm.call(MODEL, temperature=0, format=llm.format(Home, mode="strict"))
def home() -> str:
    """Ask for an object."""
    return "Extract the city as JSON: Maria is 34 years old and lives in Lisbon."


@llm.call(MODEL, temperature=0)
def more() -> str:
    """Ask for a sum."""
    return "What is 12 + 7?"


answer = more()
print(
    json.dumps(
        {
            "provider": answer.provider_id,
            "whole": capital().text(),
            "streamed": "".join(capital.stream().text_stream()).strip(),
            "schema": home().parse().model_dump(),
            "continued": answer.resume("What is the capital of France?").text(),
        }
    )
)
