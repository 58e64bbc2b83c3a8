"""The shadow mask: for every layer and KV head, which tokens each generated token could still see.

Eviction is permanent, so a mask is a short list of *events*. An event says "from row `first_row` on, of the keys that
were alive, these survive", with one bit per alive key in ascending position. Alive before an event are the survivors
of the previous one and every position since. A mask without events is dense (plain causal).

Shapes: L layers, H_kv KV heads, T tokens. Heads may keep different numbers of keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

NEVER = np.int32(2**31 - 1)
"""`evicted_at` of a key that no row ever loses."""

KeptPositions = np.ndarray | Sequence[Sequence[np.ndarray]]
"""kept[l][h]: int [K], ascending absolute positions. An array [L, H_kv, K] when all heads keep the same number."""

_MAGIC = b"PSM"
_VERSION = 1
_HEADER = struct.Struct("<3sBIHHI")  # magic, version, tokens, layers, KV heads, events
_EVENT = struct.Struct("<II")  # first row, bytes per layer and head


@dataclass(frozen=True, kw_only=True, eq=False)
class EvictionEvent:
    """One eviction, in every layer and KV head.

    Example:
        >>> EvictionEvent(first_row=3, bits=np.packbits([[[1, 0, 1]]], axis=-1)).bits.shape
        (1, 1, 1)
    """

    first_row: int
    """The first row (position of the query) that can no longer see the evicted keys."""
    bits: np.ndarray
    """uint8 [L, H_kv, ceil(n / 8)], n the number of alive keys (of the head that has most): bit k, counted from the
    most significant bit of byte 0, is 1 if the k-th alive key in ascending position survives. Other bits are 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowMask:
    """Visibility in one sequence of T tokens: row i sees key j iff j <= i and i < evicted_at[l, h, j].

    Example:
        >>> kept = np.array([[[0, 2]]])  # one layer, one head: of the keys 0, 1, 2 keep 0 and 2
        >>> mask = ShadowMask.pack(num_tokens=5, num_layers=1, num_kv_heads=1, kept=[(3, kept)])
        >>> mask.visible(4)[0, 0].tolist()
        [True, False, True, True, True]

    Raises:
        ValueError: the events do not fit the shape, are not ascending, or set a bit of a key that is not alive.
    """

    num_tokens: int
    num_layers: int
    num_kv_heads: int
    events: tuple[EvictionEvent, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"ShadowMask: {name}: expected at least 1, got {getattr(self, name)}")
        for _ in self._replay():
            pass

    @classmethod
    def dense(cls, *, num_tokens: int, num_layers: int, num_kv_heads: int) -> ShadowMask:
        """A mask that hides nothing."""
        return cls(num_tokens=num_tokens, num_layers=num_layers, num_kv_heads=num_kv_heads)

    @classmethod
    def pack(
        cls, *, num_tokens: int, num_layers: int, num_kv_heads: int, kept: Sequence[tuple[int, KeptPositions]]
    ) -> ShadowMask:
        """Packs eviction events from the positions that were kept.

        Args:
            num_tokens: T.
            num_layers: L.
            num_kv_heads: H_kv.
            kept: (first_row, kept positions) per event, ascending in first_row.

        Raises:
            ValueError: a kept position is not alive, not ascending, or the shape is not [L][H_kv].
        """
        alive = np.zeros((num_layers, num_kv_heads, num_tokens), dtype=bool)
        events = []
        start = 0
        for first_row, positions in kept:
            _check_first_row(first_row, start, num_tokens)
            alive[..., start:first_row] = True
            survives = _as_boolean(positions, alive, first_row)
            counts = alive.sum(-1)
            bits = np.zeros((*counts.shape, int(counts.max())), dtype=bool)
            bits[_first(counts)] = survives[alive]
            events.append(EvictionEvent(first_row=int(first_row), bits=np.packbits(bits, axis=-1)))
            alive, start = survives, first_row
        return cls(num_tokens=num_tokens, num_layers=num_layers, num_kv_heads=num_kv_heads, events=tuple(events))

    def unpack(self) -> list[tuple[int, list[list[np.ndarray]]]]:
        """The inverse of `pack`: per event the first row and kept[l][h], int64 [K], ascending positions."""
        return [
            (first_row, [[np.flatnonzero(head) for head in layer] for layer in survives])
            for first_row, _, survives in self._replay()
        ]

    def evicted_at(self) -> np.ndarray:
        """int32 [L, H_kv, T]: the first row that can no longer see each key, `NEVER` if there is none."""
        out = np.full((self.num_layers, self.num_kv_heads, self.num_tokens), NEVER, dtype=np.int32)
        for first_row, alive, survives in self._replay():
            out[..., : alive.shape[-1]][alive & ~survives] = first_row
        return out

    def visible(self, row: int) -> np.ndarray:
        """bool [L, H_kv, T]: the keys that the query at position `row` sees, itself included.

        Raises:
            ValueError: `row` is not in [0, T).
        """
        if not 0 <= row < self.num_tokens:
            raise ValueError(f"row: expected 0 <= row < {self.num_tokens}, got {row}")
        return (np.arange(self.num_tokens) <= row) & (row < self.evicted_at())

    def truncate(self, num_tokens: int) -> ShadowMask:
        """The mask of the first `num_tokens` tokens."""
        if not 1 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens: expected 1 <= num_tokens <= {self.num_tokens}, got {num_tokens}")
        events = tuple(e for e in self.events if e.first_row <= num_tokens)
        return ShadowMask(
            num_tokens=num_tokens, num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, events=events
        )

    @property
    def num_bytes(self) -> int:
        """Size on the wire: one bit per alive key, layer, head and event, and a small header."""
        return _HEADER.size + sum(_EVENT.size + e.bits.size for e in self.events)

    def to_bytes(self) -> bytes:
        """Serialises: magic "PSM", version, T, L, H_kv, number of events; per event first row, width, bits."""
        parts = [_HEADER.pack(_MAGIC, _VERSION, self.num_tokens, self.num_layers, self.num_kv_heads, len(self.events))]
        for event in self.events:
            parts += [_EVENT.pack(event.first_row, event.bits.shape[-1]), event.bits.tobytes()]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> ShadowMask:
        """Reads what `to_bytes` wrote.

        Raises:
            ValueError: not a shadow mask, another version, cut short, or inconsistent.
        """
        if len(data) < _HEADER.size or data[:3] != _MAGIC:
            raise ValueError(
                f"shadow mask: expected at least {_HEADER.size} bytes starting with {_MAGIC!r}, got {data[:8]!r}"
            )
        _, version, num_tokens, num_layers, num_kv_heads, num_events = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"shadow mask: version: expected {_VERSION}, got {version}")
        offset, events = _HEADER.size, []
        for index in range(num_events):
            if len(data) < offset + _EVENT.size:
                raise ValueError(
                    f"shadow mask: event {index}: expected {num_events} events, data ends at byte {len(data)}"
                )
            first_row, width = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            size = num_layers * num_kv_heads * width
            if len(data) < offset + size:
                raise ValueError(f"shadow mask: event {index}: expected {size} bytes of bits, got {len(data) - offset}")
            bits = np.frombuffer(data, np.uint8, size, offset).reshape(num_layers, num_kv_heads, width)
            events.append(EvictionEvent(first_row=first_row, bits=bits))
            offset += size
        if offset != len(data):
            raise ValueError(f"shadow mask: expected {offset} bytes, got {len(data)}")
        return cls(num_tokens=num_tokens, num_layers=num_layers, num_kv_heads=num_kv_heads, events=tuple(events))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShadowMask) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def _replay(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (first_row, alive before, alive after), bool [L, H_kv, last first_row], per event; validates on the
        way. Nothing is allocated that the bits do not account for: the numbers of a damaged mask can be anything."""
        start = 0
        for index, event in enumerate(self.events):
            _check_first_row(event.first_row, start, self.num_tokens)
            self._check_bits(index, event, at_least=event.first_row - start)
            start = event.first_row
        alive = np.zeros((self.num_layers, self.num_kv_heads, start), dtype=bool) if self.events else np.zeros(0, bool)
        start = 0
        for index, event in enumerate(self.events):
            alive[..., start : event.first_row] = True
            counts = alive.sum(-1)
            self._check_bits(index, event, at_least=(most := int(counts.max())), at_most=most)
            bits = np.unpackbits(event.bits, axis=-1).view(bool)
            is_key = np.arange(bits.shape[-1]) < counts[..., None]
            if (bits & ~is_key).any():
                raise ValueError(f"ShadowMask: events[{index}].bits: a bit beyond the alive keys is set")
            survives = np.zeros_like(alive)
            survives[alive] = bits[is_key]
            yield event.first_row, alive, survives
            alive, start = survives.copy(), event.first_row

    def _check_bits(self, index: int, event: EvictionEvent, *, at_least: int, at_most: int | None = None) -> None:
        """Refuses bits that are not [L, H_kv, bytes for so many keys]."""
        bits, heads = event.bits, (self.num_layers, self.num_kv_heads)
        smallest = -(-at_least // 8)
        fits = bits.ndim == 3 and bits.shape[:2] == heads and bits.shape[2] >= smallest
        if not fits or bits.dtype != np.uint8 or (at_most is not None and bits.shape[2] != smallest):
            raise ValueError(
                f"ShadowMask: events[{index}].bits: expected uint8 {[*heads, smallest]}, "
                f"got {bits.dtype} {list(bits.shape)}"
            )


def _check_first_row(first_row: int, previous: int, num_tokens: int) -> None:
    if not previous < first_row <= num_tokens:
        raise ValueError(
            f"ShadowMask: first_row: expected {previous} < first_row <= {num_tokens} (ascending, within the tokens), "
            f"got {first_row}"
        )


def _first(counts: np.ndarray) -> np.ndarray:
    """bool [..., max(counts)]: True in the first counts[...] places."""
    return np.arange(counts.max()) < counts[..., None]


def _as_boolean(kept: KeptPositions, alive: np.ndarray, first_row: int) -> np.ndarray:
    """Kept positions as bool [L, H_kv, T]; refuses what is not alive or not ascending."""
    num_layers, num_kv_heads, _ = alive.shape
    if len(kept) != num_layers or any(len(layer) != num_kv_heads for layer in kept):
        raise ValueError(
            f"ShadowMask: kept: expected [{num_layers}][{num_kv_heads}] position arrays, "
            f"got [{len(kept)}][{sorted({len(layer) for layer in kept})}]"
        )
    heads = [np.asarray(head) for layer in kept for head in layer]
    owner = np.repeat(np.arange(len(heads)), [head.size for head in heads])
    positions = np.concatenate([head.reshape(-1) for head in heads])
    where = f"ShadowMask: kept at first_row {first_row}"
    if any(head.ndim != 1 or not np.issubdtype(head.dtype, np.integer) for head in heads):
        raise ValueError(f"{where}: expected int [K] per head, got {heads[0].dtype} {list(heads[0].shape)}")
    if positions.size and not (positions.min() >= 0 and positions.max() < first_row):
        raise ValueError(f"{where}: expected positions in [0, {first_row}), got {positions.min()} to {positions.max()}")
    if ((np.diff(positions) <= 0) & (np.diff(owner) == 0)).any():
        raise ValueError(f"{where}: expected strictly ascending positions in every head")
    survives = np.zeros_like(alive)
    survives.reshape(len(heads), -1)[owner, positions] = True
    if (survives & ~alive).any():
        layer, head, position = np.argwhere(survives & ~alive)[0].tolist()
        raise ValueError(
            f"ShadowMask: kept at first_row {first_row}, layer {layer}, head {head}: "
            f"expected alive keys, got position {position}, which was evicted before"
        )
    return survives
