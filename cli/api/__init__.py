"""A deployment's API as the commands use it; people's programs use the OpenAI SDK."""
