"""Chats: whole, streamed, many at once, and as a pydantic model.

Package: langchain-openai
Point: `ChatOpenAI(base_url=URL, api_key=KEY, model=NAME)`
"""

import json

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Home(BaseModel):
    """A person's home."""

    city: str


FRANCE = "What is the capital of France?"
LISBON = "Extract the city as JSON: Maria is 34 years old and lives in Lisbon."
chat = ChatOpenAI(model="tidemill-demo", temperature=0, max_retries=0)
whole = chat.invoke(FRANCE)
print(
    json.dumps(
        {
            "whole": whole.content,
            "counted": whole.usage_metadata["total_tokens"] > 0,
            "streamed": "".join(chunk.content for chunk in chat.stream(FRANCE)),
            "many": [answer.content for answer in chat.batch([FRANCE, "What is 12 + 7?"])],
            "schema": chat.with_structured_output(Home).invoke(LISBON).model_dump(),
        }
    )
)
