"""The pool of buffers."""

import numpy as np
import pytest

from mpiquant import pool as pools


def address(buffer):
    return buffer.__array_interface__["data"][0]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1_000_000])
def test_a_buffer_is_as_long_as_asked_and_is_used_again(nbytes):
    pool = pools.Pool()
    first = pool.take(nbytes)
    assert (first.nbytes, first.dtype) == (nbytes, np.uint8)
    place = address(first.base)
    pool.give(first)
    assert pool.nbytes >= nbytes
    assert address(pool.take(nbytes).base) == place
    assert pool.nbytes == 0


def test_a_slice_gives_the_whole_back():
    pool = pools.Pool()
    buffer = pool.take(10_000)
    pool.give(buffer[100:200])
    assert pool.nbytes == 12_288


def test_buffers_in_use_are_disjoint():
    pool = pools.Pool()
    for _ in range(3):
        taken = [pool.take(5000) for _ in range(5)]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(taken) for b in taken[i + 1 :])
        for buffer in taken:
            pool.give(buffer)
    assert pool.nbytes == 5 * 8192


def test_small_requests_do_not_take_large_buffers():
    pool = pools.Pool()
    pool.give(pool.take(1 << 20))
    assert pool.take(100).base.nbytes == 4096
    assert pool.take(200_000).base.nbytes == 1 << 20


def test_a_larger_buffer_takes_the_place_of_a_free_one():
    pool = pools.Pool()
    for nbytes in (100_000, 200_000, 400_000, 800_000, 400_000, 200_000):
        pool.give(pool.take(nbytes))
        assert pool.nbytes <= 802_816


def test_what_is_not_used_any_more_is_let_go(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pools.time, "monotonic", lambda: now[0])
    pool = pools.Pool()
    pool.give(pool.take(1 << 20))
    for _ in range(30):
        now[0] += 1.0
        pool.give(pool.take(4096))
    assert pool.nbytes == 4096
