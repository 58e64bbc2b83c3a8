"""Prompt eviction inside vLLM 0.32, through its own extension points.

How many keys go is a pure function of token counts (plan.py), so scheduler and worker agree without a message. Which
keys go is decided layer by layer, right after the layer's attention ran, and is known to the worker alone.

    scheduler  ends prefill chunks at the boundary, frees the tail blocks   scheduler.py, kv_manager.py
    worker     slot = position - evicted; plans the evictions of a step     worker.py, runner.py, tracker.py
    attention  captures window queries, selects, compacts in place          attention.py, eviction.py, cpu_layout.py
"""
