"""Networks and processors that tests simulate."""

from mpiquant.sim import KernelCost, Machine

ALPHA, BANDWIDTH = 50e-6, 1.25e8
"""Seconds of latency, and bytes per second."""

FREE = Machine()
BUSY = Machine(
    kernels={
        "exact": KernelCost(encode=3e-10, decode_add=5e-10, hop=6e-10),
        "q4": KernelCost(encode=1e-9, decode=7e-10, decode_add=8e-10, hop=1.5e-9),
    },
    message_s=2e-6,
)
