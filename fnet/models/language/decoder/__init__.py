"""One decoder for the families of Llama, Mistral, Qwen, Gemma and others, and the reading of their
configurations."""
