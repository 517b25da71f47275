"""`/v1/responses`: OpenAI's Responses API, as a translation of its stateless part to chats."""
