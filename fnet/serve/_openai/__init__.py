"""OpenAI's HTTP API for the language models and text encoders of the server."""
