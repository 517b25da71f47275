"""The engine behind a port: OpenAI-style HTTP over one `Online` engine, without any cloud."""
