"""Chats, whole and streamed, vectors and a ranking.

Package: litellm
Point: `litellm.completion(model="openai/NAME", api_base=URL, api_key=KEY)`
"""

import json
import os

import litellm

FRANCE = "What is the capital of France?"
VECTORS = {"api_base": os.environ["VECTORS_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
DOCUMENTS = ["A wheel turns in the water.", "The capital of France is Paris."]


def chat(**more):
    """Ask for a capital."""
    messages = [{"role": "user", "content": FRANCE}]
    return litellm.completion("openai/tidemill-demo", messages=messages, temperature=0, **more)


vectors = litellm.embedding("openai/vectors", input=["The tide", "The mill"], **VECTORS)
ranked = litellm.rerank(
    "hosted_vllm/vectors", query=FRANCE, documents=DOCUMENTS, top_n=1, **VECTORS
)
print(
    json.dumps(
        {
            "whole": chat().choices[0].message.content,
            "streamed": "".join(
                chunk.choices[0].delta.content or "" for chunk in chat(stream=True)
            ),
            "vectors": [len(vector["embedding"]) for vector in vectors.data],
            "ranked": [result["index"] for result in ranked.results],
        }
    )
)
