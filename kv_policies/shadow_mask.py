"""The shadow mask: for every layer and KV head, which tokens each generated token could still see.

Eviction is permanent, so a mask is a short list of *events*. An event says "from row `first_row` on, of the keys that
were alive, these survive", with one bit per alive key in ascending position. Keys alive before an event are the
survivors of the previous one plus every position since. A mask without events is dense (plain causal).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEVER = np.int32(2**31 - 1)
"""`evicted_at` of a key that no row ever loses."""

_MAGIC = b"PSM"
_VERSION = 1
_HEADER = struct.Struct("<3sBIHHH")  # magic, version, tokens, layers, kv heads, events
_EVENT = struct.Struct("<II")  # first row, bytes per (layer, head)


@dataclass(frozen=True, kw_only=True, eq=False)
class EvictionEvent:
    """One eviction in every layer and KV head.

    Example:
        >>> EvictionEvent(first_row=3, bits=np.packbits([[[1, 0, 1]]], axis=-1)).bits.shape
        (1, 1, 1)
    """

    first_row: int
    """The first row (absolute position of the query) that can no longer see the evicted keys."""
    bits: np.ndarray
    """uint8 [L, H_kv, ceil(n / 8)], big-endian within a byte (numpy.packbits): bit k is 1 if the k-th alive key, in
    ascending position, survives. n is the number of alive keys; padding bits are 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowMask:
    """Visibility of one sequence of T tokens: row i sees key j iff j <= i and i < evicted_at[l, h, j].

    Example:
        >>> kept = np.array([[[0, 2]]])  # one layer, one head: of keys 0, 1, 2 keep 0 and 2
        >>> mask = ShadowMask.pack(num_tokens=5, num_layers=1, num_kv_heads=1, kept=[(3, kept)])
        >>> mask.evicted_at()[0, 0].tolist() == [NEVER, 3, NEVER, NEVER, NEVER]
        True
        >>> mask.visible(4)[0, 0].tolist()
        [True, False, True, True, True]
    """

    num_tokens: int
    num_layers: int
    num_kv_heads: int
    events: tuple[EvictionEvent, ...] = ()
