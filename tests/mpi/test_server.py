"""The parameter server with bounded staleness."""

import time

import numpy as np
import pytest
from conftest import raised, together

import mpiquant
from mpiquant import SGD, ParameterServer


def train(comm, staleness, steps, codec="exact", rate=1.0, slow=None):
    """Workers send gradients that are -1 everywhere; their leads over the slowest, and the result.

    A worker's lead is what it sees in the parameters, which count the steps of all.
    """
    params = {"w": np.zeros(300), "b": np.zeros((2, 3))}
    server = ParameterServer(SGD(params, rate=rate), staleness, comm=comm, codec=codec, timeout=30)
    done = None
    if comm.rank == 0:
        done = server.serve()
    else:
        for _ in range(steps):
            if slow == comm.rank:
                time.sleep(0.01)
            server.step({name: np.full(p.shape, -1.0) for name, p in params.items()})
    server.finish()
    return params, done


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("codec", ["exact", "q4"])
def test_every_gradient_counts_once(comm, staleness, codec):
    params, done = train(comm, staleness, 5, codec)
    with together(comm):
        np.testing.assert_allclose(params["w"], 5, rtol=1e-6)
        np.testing.assert_allclose(params["b"], 5, rtol=1e-6)
        if comm.rank == 0:
            assert done == [0] + [5] * (comm.size - 1)
    assert not mpiquant.differing_parameters(params, comm=comm)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("staleness", [0, 3])
def test_nobody_gets_further_ahead_than_allowed(comm, staleness):
    """The last rank is slow; what others see of its steps tells how far they were ahead."""
    workers, steps = comm.size - 1, 12
    params = {"w": np.zeros(workers)}
    server = ParameterServer(SGD(params, rate=float(workers)), staleness, comm=comm, timeout=30)
    leads = []
    if comm.rank == 0:
        server.serve()
    else:
        for step in range(1, steps + 1):
            if comm.rank == workers:
                time.sleep(0.01)
            gradient = np.zeros(workers)
            gradient[comm.rank - 1] = -1
            server.step({"w": gradient})
            leads.append(step - params["w"].min())
    server.finish()
    most = max(max(found, default=0) for found in comm.allgather(leads))
    with together(comm):
        np.testing.assert_allclose(params["w"], steps)
        assert most <= staleness
        if staleness:
            assert most > 0


def test_bad_arguments_are_errors_everywhere(comm):
    private = comm.Dup()
    make = lambda: ParameterServer(  # noqa: E731
        SGD({"w": np.zeros(3)}, rate=1), -1 if comm.rank == 0 else 0, comm=private
    )
    errors = raised(comm, make)
    with together(comm):
        assert "staleness is -1" in errors[0][1] or "two ranks" in errors[0][1]


@pytest.mark.mpi(min_size=2)
def test_a_server_that_does_not_serve_is_named(comm):
    private = comm.Dup()
    server = ParameterServer(SGD({"w": np.zeros(3)}, rate=1), comm=private, timeout=0.3)
    if comm.rank == 1:
        with pytest.raises(mpiquant.CallTimeoutError, match="for rank 0"):
            server.step({"w": np.zeros(3)})
    comm.Barrier()
