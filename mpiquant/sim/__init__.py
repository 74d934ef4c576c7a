"""Simulated clusters: the same schedules, on networks and machines that need not exist."""

from mpiquant.sim.engine import Engine, Outcome, simulate
from mpiquant.sim.machine import KernelCost, Machine
from mpiquant.sim.network import Network
from mpiquant.sim.workloads import WORKLOADS, Layer, Workload, workload

__all__ = [
    "WORKLOADS",
    "Engine",
    "KernelCost",
    "Layer",
    "Machine",
    "Network",
    "Outcome",
    "Workload",
    "simulate",
    "workload",
]
