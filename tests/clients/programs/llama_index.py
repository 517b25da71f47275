"""Chats, completions and embeddings by `OpenAILike`.

Package: llama-index-llms-openai
Point: `OpenAILike(model=NAME, api_base=URL, api_key=KEY, is_chat_model=True)`
"""

import json
import os

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

FRANCE = "What is the capital of France?"
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
chat = OpenAILike(
    model="tidemill-demo", api_base=URL, api_key=KEY, is_chat_model=True, temperature=0
)
text = OpenAILike(model="tidemill-demo", api_base=URL, api_key=KEY, temperature=0, max_tokens=8)
vectors = OpenAILikeEmbedding(
    model_name="vectors", api_base=os.environ["VECTORS_BASE_URL"], api_key=KEY
)
messages = [ChatMessage(role="user", content=FRANCE)]
whole = text.complete("The capital of France is").text
print(
    json.dumps(
        {
            "whole": chat.chat(messages).message.content,
            "streamed": "".join(chunk.delta for chunk in chat.stream_chat(messages)),
            "completed": whole,
            "completed_alike": "".join(
                chunk.delta for chunk in text.stream_complete("The capital of France is")
            )
            == whole,
            "vectors": [
                len(vector) for vector in vectors.get_text_embedding_batch(["tide", "mill"])
            ],
        }
    )
)
