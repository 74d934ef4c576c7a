"""Gradients of a training run: buckets, overlap, optimizers, replicas."""

from mpiquant.gradients.optimizer import SGD, Adam, DistributedOptimizer
from mpiquant.gradients.parameters import (
    average_parameters,
    broadcast_parameters,
    differing_parameters,
    parameter_drift,
)
from mpiquant.gradients.periodic import DelayedAverage, LocalSGD
from mpiquant.gradients.report import Report, Row
from mpiquant.gradients.server import ParameterServer
from mpiquant.gradients.synchronizer import GradientSynchronizer

__all__ = [
    "SGD",
    "Adam",
    "DelayedAverage",
    "DistributedOptimizer",
    "GradientSynchronizer",
    "LocalSGD",
    "ParameterServer",
    "Report",
    "Row",
    "average_parameters",
    "broadcast_parameters",
    "differing_parameters",
    "parameter_drift",
]
