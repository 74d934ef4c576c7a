"""The chooser of segments."""

import numpy as np
import pytest

from mpiquant.codecs import EXACT, by_name
from mpiquant.plan import segment_length
from mpiquant.plan.segment import EAGER_NBYTES, LONGEST


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", ["exact", "bf16", "q8", "q4", "q3", "q2", "q1", "ternary"])
def test_messages_are_eager_where_that_matters(name, dtype):
    codec, dtype = by_name(name), np.dtype(dtype)
    for algorithm, vendor in (("ring", "Open MPI"), ("direct", "MPICH"), ("direct", "Open MPI")):
        length = segment_length(None, algorithm, codec, dtype, vendor)
        assert length % 512 == 0
        assert length // 512 % 2 == 1
        assert codec.nbytes(length, dtype) <= EAGER_NBYTES or length == 512
        assert length == LONGEST or codec.nbytes(length + 1024, dtype) > EAGER_NBYTES


def test_the_ring_of_others_has_long_segments():
    assert segment_length(None, "ring", EXACT, np.dtype("f4"), "MPICH") == LONGEST


def test_what_is_asked_for_is_taken():
    assert segment_length(640, "ring", EXACT, np.dtype("f4"), "Open MPI") == 640
