"""A deployment's API, as used by the commands; users' programs call it with the OpenAI SDK."""
