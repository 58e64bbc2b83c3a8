"""ShadowMask against a naive boolean reference that knows nothing of bits, events or vectorisation."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_policies.shadow_mask import NEVER, EvictionEvent, ShadowMask


class NaiveVisibility:
    """One set of alive keys per layer, head and row, kept by hand."""

    def __init__(self, num_tokens: int, num_layers: int, num_kv_heads: int, kept) -> None:
        self.shape = (num_layers, num_kv_heads, num_tokens)
        self.rows = np.zeros((num_tokens, *self.shape), dtype=bool)
        for layer in range(num_layers):
            for head in range(num_kv_heads):
                alive: set[int] = set()
                for row in range(num_tokens):
                    for first_row, positions in kept:
                        if first_row == row:
                            alive = set(positions[layer][head].tolist())
                    alive.add(row)
                    self.rows[row, layer, head, sorted(alive)] = True

    def evicted_at(self) -> np.ndarray:
        num_tokens = self.shape[-1]
        out = np.full(self.shape, NEVER, dtype=np.int32)
        for key in range(num_tokens):
            for row in range(num_tokens - 1, key, -1):
                out[~self.rows[row, :, :, key], key] = row
        return out


@st.composite
def eviction_histories(draw):
    """(num_tokens, num_layers, num_kv_heads, kept), heads ragged or not."""
    num_tokens = draw(st.integers(1, 40))
    num_layers, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    first_rows = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    uniform = draw(st.booleans())
    alive = [[np.arange(0) for _ in range(num_kv_heads)] for _ in range(num_layers)]
    kept, start = [], 0
    for first_row in first_rows:
        alive = [[np.concatenate([head, np.arange(start, first_row)]) for head in layer] for layer in alive]
        fewest = min(len(head) for layer in alive for head in layer)
        shared = int(rng.integers(0, fewest + 1))
        alive = [
            [
                np.sort(rng.choice(head, shared if uniform else rng.integers(0, len(head) + 1), replace=False))
                for head in layer
            ]
            for layer in alive
        ]
        kept.append((first_row, alive))
        start = first_row
    return num_tokens, num_layers, num_kv_heads, kept


def packed(history) -> ShadowMask:
    num_tokens, num_layers, num_kv_heads, kept = history
    return ShadowMask.pack(num_tokens=num_tokens, num_layers=num_layers, num_kv_heads=num_kv_heads, kept=kept)


@given(eviction_histories())
@settings(max_examples=150, deadline=None)
def test_visibility_equals_the_naive_reference(history):
    mask, naive = packed(history), NaiveVisibility(*history)
    for row in range(mask.num_tokens):
        np.testing.assert_array_equal(mask.visible(row), naive.rows[row])
    within = naive.evicted_at()
    got = mask.evicted_at()
    # An event at first_row == T hides keys from no row of the sequence: the reference cannot see it.
    np.testing.assert_array_equal(np.where(got == mask.num_tokens, NEVER, got), within)
    assert got.dtype == np.int32


@given(eviction_histories())
@settings(max_examples=150, deadline=None)
def test_pack_and_wire_format_round_trip(history):
    mask = packed(history)
    kept = history[3]
    unpacked = mask.unpack()
    assert [first_row for first_row, _ in unpacked] == [first_row for first_row, _ in kept]
    for (_, got), (_, expected) in zip(unpacked, kept, strict=True):
        for got_layer, expected_layer in zip(got, expected, strict=True):
            for got_head, expected_head in zip(got_layer, expected_layer, strict=True):
                np.testing.assert_array_equal(got_head, expected_head)
    data = mask.to_bytes()
    assert len(data) == mask.num_bytes
    assert ShadowMask.from_bytes(data) == mask
    assert hash(ShadowMask.from_bytes(data)) == hash(mask)


@given(eviction_histories(), st.data())
@settings(max_examples=100, deadline=None)
def test_truncation_keeps_the_visibility_of_the_first_rows(history, data):
    mask = packed(history)
    num_tokens = data.draw(st.integers(1, mask.num_tokens))
    short = mask.truncate(num_tokens)
    for row in range(num_tokens):
        np.testing.assert_array_equal(short.visible(row), mask.visible(row)[..., :num_tokens])


@given(eviction_histories(), st.integers(0, 2**16), st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_a_damaged_byte_never_passes_as_the_same_mask(history, position, value):
    data = bytearray(packed(history).to_bytes())
    position %= len(data)
    if data[position] == value:
        return
    data[position] = value
    try:
        damaged = ShadowMask.from_bytes(bytes(data))
    except ValueError:
        return
    assert damaged != packed(history)


def test_an_event_costs_one_bit_per_alive_key():
    kept = np.sort(np.random.default_rng(0).permuted(np.tile(np.arange(4096), (4, 8, 1)), axis=-1)[..., :1024], axis=-1)
    mask = ShadowMask.pack(num_tokens=5000, num_layers=4, num_kv_heads=8, kept=[(4096, kept)])
    bits = 4 * 8 * 4096 // 8
    assert bits <= mask.num_bytes <= bits * 1.01


def test_bits_are_in_ascending_order_of_the_alive_keys():
    mask = ShadowMask.pack(
        num_tokens=14, num_layers=1, num_kv_heads=1, kept=[(10, np.array([[[0, 9]]])), (12, np.array([[[9, 10]]]))]
    )
    np.testing.assert_array_equal(mask.events[0].bits, [[[0b10000000, 0b01000000]]])
    np.testing.assert_array_equal(mask.events[1].bits, [[[0b01100000]]])  # alive: 0, 9, 10, 11
    assert mask.evicted_at()[0, 0, [0, 9, 10, 11, 12]].tolist() == [12, NEVER, NEVER, 12, NEVER]


def test_dense_mask_is_causal():
    mask = ShadowMask.dense(num_tokens=4, num_layers=2, num_kv_heads=3)
    assert (mask.evicted_at() == NEVER).all()
    assert mask.visible(1)[1, 2].tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([(3, np.array([[[0, 5]]]))], r"expected positions in \[0, 3\), got 0 to 5"),
        ([(3, np.array([[[2, 1]]]))], "strictly ascending"),
        ([(3, np.array([[[1, 1]]]))], "strictly ascending"),
        ([(3, np.array([[[0.0, 1.0]]]))], r"expected int \[K\]"),
        ([(3, np.array([[[0], [1]]]))], r"expected \[1\]\[1\] position arrays, got \[1\]\[\[2\]\]"),
        ([(3, np.array([[[0]]])), (5, np.array([[[1, 3]]]))], "position 1, which was evicted before"),
        ([(3, np.array([[[0]]])), (3, np.array([[[0]]]))], "first_row: expected 3 < first_row <= 8"),
        ([(9, np.array([[[0]]]))], "first_row: expected 0 < first_row <= 8"),
    ],
)
def test_pack_refuses_impossible_histories(kept, message):
    with pytest.raises(ValueError, match=message):
        ShadowMask.pack(num_tokens=8, num_layers=1, num_kv_heads=1, kept=kept)


def test_construction_refuses_bits_of_keys_that_are_not_alive():
    event = EvictionEvent(first_row=3, bits=np.array([[[0b10010000]]], np.uint8))
    with pytest.raises(ValueError, match="a bit beyond the alive keys is set"):
        ShadowMask(num_tokens=4, num_layers=1, num_kv_heads=1, events=(event,))
    with pytest.raises(ValueError, match=r"expected uint8 \[1, 1, 1\], got uint8 \[1, 1, 2\]"):
        wide = dataclasses.replace(event, bits=np.zeros((1, 1, 2), np.uint8))
        ShadowMask(num_tokens=4, num_layers=1, num_kv_heads=1, events=(wide,))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"XXX" + data[3:], "starting with b'PSM'"),
        (lambda data: data[:3] + b"\x07" + data[4:], "version: expected 1, got 7"),
        (lambda data: data[:-1], "bytes of bits"),
        (lambda data: data + b"\x00", "expected .* bytes, got"),
        (lambda data: b"", "starting with"),
    ],
)
def test_from_bytes_refuses(damage, message):
    mask = ShadowMask.pack(num_tokens=8, num_layers=1, num_kv_heads=1, kept=[(4, np.array([[[0, 3]]]))])
    with pytest.raises(ValueError, match=message):
        ShadowMask.from_bytes(damage(mask.to_bytes()))


@pytest.mark.parametrize("kept", [[], [(4, np.array([[[0, 3]]]))]])
def test_damaged_sizes_cost_no_memory(kept):
    data = bytearray(ShadowMask.pack(num_tokens=8, num_layers=1, num_kv_heads=1, kept=kept).to_bytes())
    data[4:8] = b"\xff\xff\xff\xff"  # number of tokens
    if kept:
        data[16:20] = b"\xfe\xff\xff\xff"  # first row of the event
    else:
        data[8:12] = b"\xff\xff\xff\xff"  # layers and KV heads
    tracemalloc.start()
    try:
        if kept:
            with pytest.raises(ValueError, match="bits: expected uint8"):
                ShadowMask.from_bytes(bytes(data))
        else:
            assert ShadowMask.from_bytes(bytes(data)).num_tokens == 2**32 - 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_visible_refuses_rows_outside():
    with pytest.raises(ValueError, match="row: expected 0 <= row < 4, got 4"):
        ShadowMask.dense(num_tokens=4, num_layers=1, num_kv_heads=1).visible(4)
