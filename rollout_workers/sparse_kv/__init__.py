"""Prompt eviction for vLLM: scheduler, KV manager, runner, attention and worker, through vLLM's extension points."""
