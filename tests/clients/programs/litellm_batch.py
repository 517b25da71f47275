"""A batch.

Package: litellm
Point: `litellm.create_batch(custom_llm_provider="openai", api_base=URL, api_key=KEY, …)`
"""

import json
import time

import litellm

lines = [
    {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "tidemill-demo",
            "messages": [{"role": "user", "content": f"What is {number} + 7?"}],
            "temperature": 0,
        },
    }
    for number in (12, 13)
]
made = litellm.create_file(
    file=("in.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines).encode()),
    purpose="batch",
    custom_llm_provider="openai",
)
batch = litellm.create_batch(
    completion_window="24h",
    endpoint="/v1/chat/completions",
    input_file_id=made.id,
    custom_llm_provider="openai",
)
while batch.status not in {"completed", "failed", "cancelled", "expired"}:
    time.sleep(0.2)
    batch = litellm.retrieve_batch(batch_id=batch.id, custom_llm_provider="openai")
content = litellm.file_content(file_id=batch.output_file_id, custom_llm_provider="openai")
rows = [json.loads(line) for line in content.text.splitlines()]
print(
    json.dumps(
        {
            "listed": batch.id
            in {each.id for each in litellm.list_batches(custom_llm_provider="openai")},
            "answers": {
                row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
                for row in rows
            },
        }
    )
)
