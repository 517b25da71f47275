"""Chats and responses in the background (`service_tier="flex"`), and a batch of responses.

Package: autobatcher
Point: `BatchOpenAI(base_url=URL, api_key=KEY)`
"""

import asyncio
import json

from autobatcher import BatchOpenAI

SUMS = [f"What is {number} + 7?" for number in (12, 13)]


async def main() -> dict:
    """Ask in each way."""
    fields = {"model": "tidemill-demo", "temperature": 0}
    async with BatchOpenAI(poll_interval_seconds=0.1, batch_window_seconds=0.1) as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        chat, *answers = await asyncio.gather(
            client.chat.completions.create(messages=messages, **fields),
            *(client.responses.create(input=text, **fields) for text in SUMS),
        )
        batched = await asyncio.gather(
            *(
                client.responses.create(input=text, completion_window="24h", **fields)
                for text in SUMS
            )
        )
    return {
        "chat": chat.choices[0].message.content,
        "responses": [answer.output_text for answer in answers],
        "batch": [answer.output_text for answer in batched],
    }


print(json.dumps(asyncio.run(main())))
