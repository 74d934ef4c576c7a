"""What the tests under mpiexec share, from tests/mpi."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("mpi_conftest", Path(__file__).parents[1] / "mpi" / "conftest.py")
_shared = module_from_spec(_spec)
_spec.loader.exec_module(_shared)

comm, together, raised = _shared.comm, _shared.together, _shared.raised
