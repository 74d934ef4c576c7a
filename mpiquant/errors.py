"""Errors that mpiquant raises beside plain ValueError and TypeError.

::

    MPIQuantError
    +-- AgreementError (ValueError)      ranks disagree, or another rank refused its arguments
    |   +-- RemoteTypeError (TypeError)  another rank refused a type
    +-- CallTimeoutError (TimeoutError)  a rank did not arrive in time
    +-- LifecycleError (RuntimeError)    MPI is not running, or two threads share a communicator
        +-- RankLostError                a rank has died, under an MPI that tells
"""


class MPIQuantError(Exception):
    """Base of all errors of this package."""


class AgreementError(MPIQuantError, ValueError):
    """The ranks of a call disagree, or one of them refused its arguments."""


class RemoteTypeError(AgreementError, TypeError):
    """Another rank refused the type of an argument."""


class CallTimeoutError(MPIQuantError, TimeoutError):
    """A call did not end within its timeout; the communicator is unusable."""


class LifecycleError(MPIQuantError, RuntimeError):
    """A call outside the life of MPI, or from two threads at once."""


class RankLostError(LifecycleError):
    """A rank of the communicator has died; the others can go on without it (see `docs/faults.md`).

    Attributes
    ----------
    ranks : list of int
        Those of the communicator that are known to be lost.
    """

    def __init__(self, text: str, ranks: list[int] | None = None) -> None:
        super().__init__(text)
        self.ranks = ranks or []
