"""Chats, vectors, a ranking, and a batch: file, batch, and the file of its rows.

Point: `litellm.completion(model="openai/NAME", api_base=URL, api_key=KEY)`
"""

import json
import os
import time

import litellm

FRANCE = "What is the capital of France?"
VECTORS = os.environ["VECTORS_BASE_URL"]
DOCUMENTS = ["A wheel turns in the water.", "The capital of France is Paris."]


def chat(**more):
    """Ask for a capital."""
    asked = [{"role": "user", "content": FRANCE}]
    return litellm.completion("openai/tidemill-demo", messages=asked, temperature=0, **more)


def batch():
    """Return the answers of a batch, by their lines' ids."""
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
    return {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
        for row in rows
    }


vectors = litellm.embedding("openai/vectors", input=["The tide", "The mill"], api_base=VECTORS)
ranked = litellm.rerank(
    "hosted_vllm/vectors", query=FRANCE, documents=DOCUMENTS, top_n=1, api_base=VECTORS
)
print(json.dumps({
    "whole": chat().choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True)),
    "vectors": [len(vector["embedding"]) for vector in vectors.data],
    "ranked": [result["index"] for result in ranked.results],
    "batch": batch(),
}))
