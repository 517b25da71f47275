"""A column of answers by `prompt`, and one of vectors by `embed_text`, with Daft's OpenAI provider.

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
    "answer",
    prompt(
        daft.col("question"),
        provider="chat",
        model="tidemill-demo",
        use_chat_completions=True,
        temperature=0,
    ),
)
print(json.dumps({"answers": frame.to_pydict()["answer"]}))
