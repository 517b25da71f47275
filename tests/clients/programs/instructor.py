"""A pydantic model by a tool call and by a JSON schema.

Package: instructor
Point: `instructor.from_openai(OpenAI(base_url=URL, api_key=KEY))`
"""

import json

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Home(BaseModel):
    """A person's home."""

    city: str


QUESTION = "Extract the city as JSON: Maria is 34 years old and lives in Lisbon."
answers = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    home = client.chat.completions.create(
        model="tidemill-demo",
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Home,
        max_retries=0,
        temperature=0,
    )
    # The demo model was not trained to call tools: only the form of that answer is checked.
    answers[mode.name] = sorted(home.model_dump()) if mode.name == "TOOLS" else home.model_dump()
print(json.dumps(answers))
