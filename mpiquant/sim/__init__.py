"""Simulated clusters: the same schedules, on networks and machines that need not exist."""

from mpiquant.sim.compute import Load
from mpiquant.sim.engine import Engine, Outcome, simulate
from mpiquant.sim.machine import TYPICAL, KernelCost, Machine
from mpiquant.sim.network import Network
from mpiquant.sim.schemes import Scheme, scheme_of
from mpiquant.sim.training import Training
from mpiquant.sim.wires import Cluster
from mpiquant.sim.workloads import WORKLOADS, Layer, Workload, workload

__all__ = [
    "TYPICAL",
    "WORKLOADS",
    "Cluster",
    "Engine",
    "KernelCost",
    "Layer",
    "Load",
    "Machine",
    "Network",
    "Outcome",
    "Scheme",
    "Training",
    "Workload",
    "scheme_of",
    "simulate",
    "workload",
]
