"""A rank that dies under an MPI that tells the others: they go on without it."""

import pytest
from mpi4py import MPI

SCRIPT = """
params = {f"l{i}": np.zeros(20_000, np.float32) for i in range(6)}
optimizer = mpiquant.DistributedOptimizer(
    mpiquant.SGD(params, 0.1, momentum=0.5), codec=CODEC, timeout=20, bucket_bytes=1
)
rng, step = np.random.default_rng(rank), 0
while step < 30:
    try:
        for name in params:
            optimizer.wait(name)
        for i, name in enumerate(reversed(params)):
            time.sleep(0.001)
            if rank == LOST and step == 12 and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            noise = rng.standard_normal(20_000).astype(np.float32)
            optimizer.ready(name, params[name] - 1 + 0.01 * noise)
        step += 1
    except mpiquant.RankLostError as error:
        say("lost", error)
        comm = optimizer.shrink()
        step = comm.allreduce(step, MPI.MAX)
optimizer.step()
different = mpiquant.differing_parameters(params, comm=comm)
say("end", comm.size, different, step, all(abs(p.mean() - 1) < 0.05 for p in params.values()))
"""


@pytest.mark.skipif(MPI.get_vendor()[0] != "Open MPI", reason="needs an MPI with ULFM")
@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("codec", ["aqat", "q4", None])
def test_the_others_go_on(start, codec, lost):
    script = SCRIPT.replace("CODEC", repr(codec)).replace("LOST", str(lost))
    # At its end, Open MPI would wait for the rank that is dead.
    options = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
    _, output = start(4, script, mpi_options=options).finish(60)
    ends = [line for line in output.splitlines() if "] end" in line]
    assert len(ends) == 3, output
    assert all("end 3 [] 30 True" in line for line in ends), output
    assert output.count("] lost") == 3


def test_elsewhere_the_job_ends(start):
    job = start(3, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nmpiquant.allreduce(x)")
    code, _ = job.finish(60)
    assert code != 0
