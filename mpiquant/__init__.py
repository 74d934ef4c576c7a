"""Quantized allreduce for data-parallel training, on mpi4py and NumPy.

>>> import mpiquant
>>> total = mpiquant.allreduce(gradient, codec="q4")

Importing makes no MPI call and does not import mpi4py; the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mpiquant.api import Allreduce, Iallreduce, allgather, allreduce, iallreduce, reduce_scatter
    from mpiquant.codecs import (
        AqatCodec,
        AutoCodec,
        BFloat16Codec,
        BlockRandomKCodec,
        BoundedCodec,
        Codec,
        Float16Codec,
        IdentityCodec,
        LowBitCodec,
        RandomKCodec,
        TernaryCodec,
        ThresholdCodec,
        TopKCodec,
        UniformCodec,
    )
    from mpiquant.config import Options, options
    from mpiquant.errors import (
        AgreementError,
        CallTimeoutError,
        LifecycleError,
        MPIQuantError,
        RankLostError,
        RemoteTypeError,
    )
    from mpiquant.feedback import ErrorFeedback
    from mpiquant.gradients import (
        SGD,
        Adam,
        DelayedAverage,
        DistributedOptimizer,
        GradientSynchronizer,
        LocalSGD,
        ParameterServer,
        average_parameters,
        broadcast_parameters,
        differing_parameters,
        parameter_drift,
    )
    from mpiquant.request import Request
    from mpiquant.stats import Stats
    from mpiquant.trace import mark
    from mpiquant.wrap import wrap

_HOMES = {
    "api": ("Allreduce", "Iallreduce", "allgather", "allreduce", "iallreduce", "reduce_scatter"),
    "codecs": (
        "AqatCodec",
        "AutoCodec",
        "BFloat16Codec",
        "BlockRandomKCodec",
        "BoundedCodec",
        "Codec",
        "Float16Codec",
        "IdentityCodec",
        "LowBitCodec",
        "RandomKCodec",
        "TernaryCodec",
        "ThresholdCodec",
        "TopKCodec",
        "UniformCodec",
    ),
    "config": ("Options", "options"),
    "errors": (
        "AgreementError",
        "CallTimeoutError",
        "LifecycleError",
        "MPIQuantError",
        "RankLostError",
        "RemoteTypeError",
    ),
    "feedback": ("ErrorFeedback",),
    "gradients": (
        "SGD",
        "Adam",
        "DelayedAverage",
        "DistributedOptimizer",
        "GradientSynchronizer",
        "LocalSGD",
        "ParameterServer",
        "average_parameters",
        "broadcast_parameters",
        "differing_parameters",
        "parameter_drift",
    ),
    "request": ("Request",),
    "stats": ("Stats",),
    "trace": ("mark",),
    "wrap": ("wrap",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SGD",
    "Adam",
    "AgreementError",
    "Allreduce",
    "AqatCodec",
    "AutoCodec",
    "BFloat16Codec",
    "BlockRandomKCodec",
    "BoundedCodec",
    "CallTimeoutError",
    "Codec",
    "DelayedAverage",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Float16Codec",
    "GradientSynchronizer",
    "Iallreduce",
    "IdentityCodec",
    "LifecycleError",
    "LocalSGD",
    "LowBitCodec",
    "MPIQuantError",
    "Options",
    "ParameterServer",
    "RandomKCodec",
    "RankLostError",
    "RemoteTypeError",
    "Request",
    "Stats",
    "TernaryCodec",
    "ThresholdCodec",
    "TopKCodec",
    "UniformCodec",
    "__version__",
    "allgather",
    "allreduce",
    "average_parameters",
    "broadcast_parameters",
    "differing_parameters",
    "iallreduce",
    "mark",
    "options",
    "parameter_drift",
    "reduce_scatter",
    "wrap",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'mpiquant' has no attribute {name!r}")
    value = getattr(import_module(f"mpiquant.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
