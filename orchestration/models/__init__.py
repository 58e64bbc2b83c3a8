"""The embedded models: a tiny one made on the spot, and SmolLM2-135M-Instruct from its GGUF file."""
