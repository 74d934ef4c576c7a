"""The chooser of segments."""

import numpy as np
import pytest

from mpiquant.codecs import EXACT, by_name
from mpiquant.plan import segment_length
from mpiquant.plan.segment import EAGER_NBYTES, ENOUGH, LENGTHS, SHORT


@pytest.mark.parametrize("chunk", [1000, 1 << 22])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", ["exact", "bf16", "q8", "q4", "q3", "q2", "q1", "ternary"])
def test_messages_are_eager_where_that_matters(name, dtype, chunk):
    codec, dtype = by_name(name), np.dtype(dtype)
    for algorithm in ("ring", "direct"):
        length = segment_length(None, algorithm, codec, dtype, "Open MPI", chunk)
        assert length % 512 == 0
        assert length // 512 % 2 == 1
        assert codec.nbytes(length, dtype) <= EAGER_NBYTES or length == 512
        assert length in LENGTHS or codec.nbytes(length + 1024, dtype) > EAGER_NBYTES


@pytest.mark.parametrize(
    ("chunk", "length"),
    [
        (0, LENGTHS[1]),
        (ENOUGH * LENGTHS[0] - 1, LENGTHS[1]),
        (ENOUGH * LENGTHS[0], LENGTHS[0]),
        (1 << 22, LENGTHS[0]),
    ],
)
def test_a_ring_elsewhere_has_long_segments_if_there_are_enough(chunk, length):
    assert segment_length(None, "ring", EXACT, np.dtype("f4"), "MPICH", chunk) == length


@pytest.mark.parametrize("algorithm", ["halving_doubling", "direct"])
def test_other_schedules_have_two_segments_of_a_chunk_if_they_can(algorithm):
    for chunk, length in (
        (1000, SHORT),
        (2 * LENGTHS[1] - 1, SHORT),
        (2 * LENGTHS[1], LENGTHS[1]),
        (ENOUGH * LENGTHS[0], LENGTHS[0]),
    ):
        assert segment_length(None, algorithm, EXACT, np.dtype("f4"), "MPICH", chunk) == length


@pytest.mark.parametrize("exponent", range(16, 27))
def test_no_chunk_of_a_usual_size_ends_in_a_segment_of_next_to_nothing(exponent):
    chunk = 1 << exponent
    length = segment_length(None, "ring", EXACT, np.dtype("f4"), "MPICH", chunk)
    assert chunk % length > min(chunk, length) * 0.4


def test_what_is_asked_for_is_taken():
    assert segment_length(640, "ring", EXACT, np.dtype("f4"), "Open MPI", 1 << 22) == 640
