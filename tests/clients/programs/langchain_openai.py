"""A chat: whole, streamed, many at once, as a schema; and vectors of documents.

Point: `ChatOpenAI(base_url=URL, api_key=KEY, model=NAME)`
"""

import json
import os

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Home(BaseModel):
    """Where somebody lives."""

    city: str


FRANCE = "What is the capital of France?"
LISBON = "Extract the city as JSON: Maria is 34 years old and lives in Lisbon."
chat = ChatOpenAI(model="tidemill-demo", temperature=0, max_retries=0)
whole = chat.invoke(FRANCE)
vectors = OpenAIEmbeddings(
    base_url=os.environ["VECTORS_BASE_URL"], model="vectors", check_embedding_ctx_length=False
)
print(json.dumps({
    "whole": whole.content,
    "counted": whole.usage_metadata["total_tokens"] > 0,
    "streamed": "".join(chunk.content for chunk in chat.stream(FRANCE)),
    "many": [answer.content for answer in chat.batch([FRANCE, "What is 12 + 7?"])],
    "schema": chat.with_structured_output(Home).invoke(LISBON).model_dump(),
    "vectors": [len(vector) for vector in vectors.embed_documents(["The tide", "The mill"])],
}))
