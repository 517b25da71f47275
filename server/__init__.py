"""HTTP server: the OpenAI API over one `Online` engine, without any cloud."""
