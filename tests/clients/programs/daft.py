"""`prompt`, which calls `/v1/responses`, and `embed_text` with its OpenAI provider.

Package: daft
Point: `daft.set_provider("openai", base_url=URL, api_key=KEY)`
"""

import json
import os

import daft
from daft.ai.openai.provider import OpenAIProvider
from daft.functions import embed_text, prompt

KEY = os.environ["OPENAI_API_KEY"]
chat = OpenAIProvider("chat", base_url=os.environ["OPENAI_BASE_URL"], api_key=KEY)
vectors = OpenAIProvider("vectors", base_url=os.environ["VECTORS_BASE_URL"], api_key=KEY)
for provider in (chat, vectors):
    daft.attach_provider(provider)
frame = daft.from_pydict({"question": ["What is 12 + 7?", "What is 13 + 7?"]})
frame = frame.with_column(
    "vector", embed_text(daft.col("question"), provider="vectors", model="vectors")
)
frame = frame.with_column(
    "answer",
    prompt(
        daft.col("question"),
        provider="chat",
        model="tidemill-demo",
        temperature=0,
    ),
)
columns = frame.to_pydict()
print(
    json.dumps(
        {
            "answers": columns["answer"],
            "vectors": [len(vector) for vector in columns["vector"]],
        }
    )
)
