"""Latency and correctness of Allreduce in the manner of the OSU micro-benchmarks.

Plain mpi4py calls only; run it as

    mpiexec -n 4 python -m mpi4py bench/osu_allreduce.py
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

if rank == 0:
    print("# OSU-style MPI Allreduce Latency Test")
    print(f"{'# Size':<12}{'Avg(us)':>18}{'Min(us)':>18}{'Max(us)':>18}  Validation")

for nbytes in (4 << power for power in range(21)):
    iterations, skip = (200, 20) if nbytes <= 8192 else (20, 2)
    count = nbytes // 4
    sendbuf = np.full(count, rank + 1, dtype=np.float32)
    recvbuf = np.zeros(count, dtype=np.float32)
    comm.Barrier()
    elapsed = 0.0
    for i in range(iterations + skip):
        start = MPI.Wtime()
        comm.Allreduce([sendbuf, count, MPI.FLOAT], [recvbuf, count, MPI.FLOAT], op=MPI.SUM)
        if i >= skip:
            elapsed += MPI.Wtime() - start
        comm.Barrier()
    latency = 1e6 * elapsed / iterations
    average = comm.allreduce(latency, op=MPI.SUM) / size
    lowest = comm.allreduce(latency, op=MPI.MIN)
    highest = comm.allreduce(latency, op=MPI.MAX)
    right = bool(np.allclose(recvbuf, size * (size + 1) / 2))
    valid = comm.allreduce(right, op=MPI.LAND)
    if rank == 0:
        verdict = "Pass" if valid else "Fail"
        print(f"{nbytes:<12}{average:>18.2f}{lowest:>18.2f}{highest:>18.2f}  {verdict}", flush=True)
