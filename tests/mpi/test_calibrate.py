"""`mpiquant plan --calibrate`: every rank runs the command, rank 0 stores the profile."""

import numpy as np
import pytest
from conftest import together

from mpiquant.cli import calibrate
from mpiquant.cli.main import main
from mpiquant.codecs import EXACT, by_name
from mpiquant.planner.predict import predict
from mpiquant.planner.profile import Profile

pytestmark = pytest.mark.mpi


@pytest.fixture
def brief(monkeypatch):
    """The same measurements, of fewer bytes and seconds."""
    for name, value in {
        "VALUES": 1 << 16,
        "STREAM_S": 5e-3,
        "BURSTS_S": (1e-4,),
        "PAUSE_S": 1e-3,
        "NATIVE_NBYTES": (8, 4096, 1 << 20),
        "EAGER_NBYTES": (1 << 10, 1 << 22),
        "SMALL_NBYTES": (8 << 10, 64 << 10),
    }.items():
        monkeypatch.setattr(calibrate, name, value)


@pytest.mark.usefixtures("brief")
def test_a_profile_is_measured_stored_and_good_for_predictions(comm, tmp_path, capsys):
    file = tmp_path / "new" / "profile.json"
    code = main(["plan", "--calibrate", "--profile", str(file)])
    printed = capsys.readouterr()
    with together(comm):
        if comm.size == 1:
            assert code == 2
            assert "mpiexec" in printed.err
        else:
            assert code == 0
            assert (comm.rank == 0) == (str(file) in printed.out) == file.exists()
    if comm.size == 1 or comm.rank:
        return
    profile = Profile.load(file)
    assert profile.hosts == (0,) * comm.size
    assert profile.mpi
    assert 1e7 < profile.memory.bandwidth < 1e12
    assert 1e-8 < profile.network.latency_s < 1
    assert set(profile.kernels) == {*calibrate.CODECS, "cerar"}
    assert all(cost.decode_add > 0 for cost in profile.kernels.values())
    assert [nbytes for nbytes, _ in profile.native] == [8, 4096, 1 << 20]
    for codec in (EXACT, by_name("q8"), by_name("q4")):
        times = [predict(profile, "ring", codec, 1 << k).seconds for k in (13, 20, 26)]
        assert all(np.diff(times) > 0)
