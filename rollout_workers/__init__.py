"""vLLM engines whose KV cache is physically compressed while they sample, and which record shadow masks."""
