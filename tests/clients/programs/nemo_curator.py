"""Questions by `OpenAIClient` and `AsyncOpenAIClient`.

Package: nemo-curator
Point: `AsyncOpenAIClient(base_url=URL, api_key=KEY)`
"""

import asyncio
import json

from nemo_curator.models.client.llm_client import GenerationConfig
from nemo_curator.models.client.openai_client import AsyncOpenAIClient, OpenAIClient

GREEDY = GenerationConfig(temperature=0, max_tokens=16)


def question(number):
    """Return a chat with a sum."""
    return [{"role": "user", "content": f"What is {number} + 7?"}]


async def many(numbers):
    """Return the answers to several chats."""
    client = AsyncOpenAIClient(max_concurrent_requests=4)
    client.setup()
    return await asyncio.gather(
        *(
            client.query_model(
                messages=question(number), model="tidemill-demo", generation_config=GREEDY
            )
            for number in numbers
        )
    )


one = OpenAIClient()
one.setup()
print(
    json.dumps(
        {
            "one": one.query_model(
                messages=question(12), model="tidemill-demo", generation_config=GREEDY
            ),
            "many": asyncio.run(many([13, 14, 15])),
        }
    )
)
