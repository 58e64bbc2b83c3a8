"""How many keys are gone after n tokens: pure arithmetic on token counts, the same in scheduler and worker.

The *context* of a prompt of P tokens is its first C = P - 1 tokens. It is prefilled dense; when its last row has run,
`policy.num_kept(P)` of its C keys survive. Row P - 1 (the last prompt token) is the first to see the rest only.
A *slot* is a place in a request's blocks: slots = tokens - evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_policies.policy import Policy


@dataclass(frozen=True)
class EvictionPlan:
    """When a policy evicts, and how many keys."""

    policy: Policy

    def num_evicted(self, num_computed_tokens: int, num_prompt_tokens: int) -> int:
        """Keys that are gone, per layer and KV head, once the first `num_computed_tokens` rows have run."""
        context = num_prompt_tokens - 1
        return context - self.policy.num_kept(num_prompt_tokens) if num_computed_tokens >= context else 0

    def next_boundary(self, num_computed_tokens: int, num_prompt_tokens: int) -> int | None:
        """The token count at which the next eviction happens; a prefill chunk must end there, not run across it."""
        context = num_prompt_tokens - 1
        if num_computed_tokens < context and self.policy.num_kept(num_prompt_tokens) < context:
            return context
        return None

    def peak_slots(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Most slots that a request needs at one time on its way to `num_tokens` computed tokens."""
        dense = min(num_tokens, num_prompt_tokens - 1)
        return max(dense, num_tokens - self.num_evicted(num_tokens, num_prompt_tokens))
