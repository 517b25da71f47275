"""Reranking with `ClientV2.rerank`.

Package: cohere
Point: `cohere.ClientV2(base_url="http://127.0.0.1:8000", api_key=KEY)`
"""

import json
import os

import cohere

client = cohere.ClientV2(
    base_url=os.environ["VECTORS_BASE_URL"].removesuffix("/v1"),
    api_key=os.environ["OPENAI_API_KEY"],
)
ranked = client.rerank(
    model="vectors",
    query="What is the capital of France?",
    documents=[
        "A wheel turns in the water.",
        "The capital of France is Paris.",
        "The capital of Brazil is Brasilia.",
    ],
    top_n=2,
)
scores = [result.relevance_score for result in ranked.results]
print(
    json.dumps(
        {
            "order": [result.index for result in ranked.results],
            "falling": scores == sorted(scores, reverse=True),
        }
    )
)
