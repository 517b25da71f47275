"""An agent's answer: as text, streamed, and as a pydantic model.

Package: pydantic-ai-slim
Point: `OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=URL, api_key=KEY))`
"""

import asyncio
import json

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Home(BaseModel):
    """A person's home."""

    city: str


FRANCE = "What is the capital of France?"
LISBON = "Extract the city as JSON: Maria is 34 years old and lives in Lisbon."


async def main() -> dict:
    """Run the agent in each way."""
    model = OpenAIChatModel("tidemill-demo", provider=OpenAIProvider())
    agent = Agent(model, model_settings={"temperature": 0})
    async with agent.run_stream(FRANCE) as streamed:
        text = await streamed.get_output()
    by_tool = Agent(model, output_type=Home, model_settings={"temperature": 0})
    by_schema = Agent(model, output_type=NativeOutput(Home), model_settings={"temperature": 0})
    whole = await agent.run(FRANCE)
    return {
        "whole": whole.output,
        "streamed": text,
        # The demo model was not trained to call tools: only the form of that answer is checked.
        "by_tool": sorted((await by_tool.run(LISBON)).output.model_dump()),
        "by_schema": (await by_schema.run(LISBON)).output.model_dump(),
    }


print(json.dumps(asyncio.run(main())))
