"""Vectors of documents by `OpenAIEmbeddings`.

Package: langchain-openai
Point: `OpenAIEmbeddings(base_url=URL, api_key=KEY, model=NAME, check_embedding_ctx_length=False)`
Note: without the last argument it sends tokens of an OpenAI model, which are wrong here
"""

import json
import os

from langchain_openai import OpenAIEmbeddings

client = OpenAIEmbeddings(
    base_url=os.environ["VECTORS_BASE_URL"], model="vectors", check_embedding_ctx_length=False
)
vectors = client.embed_documents(["The tide", "The mill"])
print(json.dumps({"vectors": [len(vector) for vector in vectors]}))
