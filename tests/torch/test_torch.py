"""The PyTorch face on ranks."""

import os
import socket

import numpy as np
import pytest
import torch
from conftest import raised, together

import mpiquant
import mpiquant.torch as mqt

torch.set_num_threads(1)


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 20, generator=generator).to(dtype)
    return x, torch.randn(16, 4, generator=generator).to(dtype)


def loss_of(model, rank, step, dtype=torch.float32):
    x, y = batch(rank, step, dtype)
    return torch.nn.functional.mse_loss(model(x), y)


def arrays_of(model):
    return {name: mqt.as_array(p) for name, p in model.named_parameters()}


def alike(comm, model):
    return not mpiquant.differing_parameters(arrays_of(model), comm=comm)


def wrapped(model, comm, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mqt.DistributedOptimizer(sgd, model.named_parameters(), comm=comm, **options)


def test_memory_is_shared():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = torch.arange(6).to(dtype)
        array = mqt.as_array(tensor)
        array[0] = 5
        assert tensor[0] == 5
        back = mqt.as_tensor(array)
        assert back.dtype == dtype
        assert back.data_ptr() == tensor.data_ptr()
    with pytest.raises(TypeError, match="expected the CPU"):
        mqt.as_array(torch.empty(3, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_is_that_with_the_mean(comm, dtype):
    ours, theirs = make_model(dtype=dtype), make_model(dtype=dtype)
    optimizer = wrapped(ours, comm, codec="exact")
    right = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(ours, comm.rank, step, dtype).backward()
        optimizer.step()
        right.zero_grad()
        losses = [loss_of(theirs, rank, step, dtype) for rank in range(comm.size)]
        (sum(losses) / comm.size).backward()
        right.step()
    with together(comm):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert alike(comm, ours)


@pytest.mark.parametrize("codec", ["q4", "aqat", "top_k(ratio=0.1)"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_replicas_stay_alike(comm, codec, set_to_none):
    model = make_model()
    optimizer = wrapped(model, comm, codec=codec)
    losses = []
    for step in range(31):
        optimizer.zero_grad(set_to_none)
        loss = loss_of(model, comm.rank, step % 3)
        loss.backward()
        optimizer.step()
        losses.append(comm.allreduce(float(loss.detach())))
    with together(comm):
        assert losses[30] < losses[0]  # of the same batch
    assert alike(comm, model)


def test_means_may_be_clipped_before_the_step(comm):
    model, right = make_model(), make_model()
    optimizer = wrapped(model, comm, codec="exact")
    plain = torch.optim.SGD(right.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        early = [p.grad for p in model.parameters()]
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        plain.zero_grad()
        (sum(loss_of(right, rank, step) for rank in range(comm.size)) / comm.size).backward()
        expected = torch.nn.utils.clip_grad_norm_(right.parameters(), 0.1)
        plain.step()
        with together(comm):
            assert early == [None] * len(early)
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
    with together(comm):
        for mine, other in zip(model.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert alike(comm, model)


def test_bfloat16_gradients(comm):
    model = make_model(dtype=torch.bfloat16)
    optimizer = wrapped(model, comm, codec="q8")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step, torch.bfloat16).backward()
        optimizer.step()
    with together(comm):
        assert next(model.parameters()).grad.dtype == torch.bfloat16
    assert alike(comm, model)


def test_accumulation(comm):
    ours, theirs = make_model(), make_model()
    accumulating, plain = wrapped(ours, comm, codec="exact"), wrapped(theirs, comm, codec="exact")
    accumulating.zero_grad()
    with accumulating.no_sync():
        loss_of(ours, comm.rank, 0).backward()
    loss_of(ours, comm.rank, 1).backward()
    accumulating.step()
    plain.zero_grad()
    (loss_of(theirs, comm.rank, 0) + loss_of(theirs, comm.rank, 1)).backward()
    plain.step()
    with together(comm):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_replicas_are_made_alike(comm):
    model = make_model(seed=comm.rank)
    model.append(torch.nn.BatchNorm1d(4))
    model[-1].num_batches_tracked += comm.rank
    mqt.broadcast_parameters(model, comm.size - 1, comm=comm)
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * (comm.rank + 1))
    loss_of(model, comm.rank, 0).backward()
    adam.step()
    mqt.broadcast_parameters(model, comm=comm)
    mqt.broadcast_optimizer_state(adam, comm=comm)
    moments = {str(i): s["exp_avg"].numpy() for i, s in enumerate(adam.state.values())}
    with together(comm):
        assert int(model[-1].num_batches_tracked) == comm.size  # one forward pass behind
        assert adam.param_groups[0]["lr"] == 0.1
    assert alike(comm, model)
    assert not mpiquant.differing_parameters(moments, comm=comm)


def test_a_checkpoint_goes_on_bit_for_bit(comm, tmp_path):
    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()

    file = tmp_path / f"{comm.rank}.pt"
    whole, first = make_model(), make_model()
    train(whole, wrapped(whole, comm, codec="q2"), range(8))
    optimizer = wrapped(first, comm, codec="q2")
    train(first, optimizer, range(4))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    second = make_model(seed=7)
    optimizer = wrapped(second, comm, codec="q2")
    state = torch.load(file, weights_only=False)
    second.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(second, optimizer, range(4, 8))
    with together(comm):
        for mine, other in zip(second.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_a_missing_gradient_is_named_on_all_ranks(comm):
    private = comm.Dup()
    model = make_model()
    optimizer = wrapped(model, private, codec="q8")
    loss = loss_of(model, comm.rank, 0)
    if comm.rank == 0:
        loss = model[0](batch(0, 0)[0]).sum()  # the last layer has no part in it
    loss.backward()
    errors = raised(comm, optimizer.step)
    with together(comm):
        assert "'2.weight'" in errors[0][1]
        assert comm.size == 1 or "rank 0" in errors[1][1]


def test_schedulers_take_the_inner_optimizer(comm):
    model = make_model()
    optimizer = wrapped(model, comm, codec="exact")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        scheduler.step()
    with together(comm):
        assert optimizer.param_groups[0]["lr"] == 0.025


def test_parameters_of_another_model_are_refused(comm):
    model, other = make_model(), make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="4 without a name, 4 not of the optimizer"):
        mqt.DistributedOptimizer(sgd, other.named_parameters(), comm=comm)


# ---- DistributedDataParallel ----


@pytest.fixture(scope="module")
def group(comm):
    """A process group of gloo on loopback, with the ranks of comm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.bcast(free.getsockname()[1])
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=comm.rank, world_size=comm.size
    )
    yield
    comm.Barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("codec", ["exact", "q4"])
def test_a_hook_for_distributed_data_parallel(comm, group, codec):
    plain = make_model()
    model = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    model.register_comm_hook(mqt.DDPState(comm=comm, codec=codec), mqt.ddp_hook)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    right = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        ours.zero_grad()
        loss_of(model, comm.rank, step).backward()
        ours.step()
        right.zero_grad()
        losses = [loss_of(plain, rank, step) for rank in range(comm.size)]
        (sum(losses) / comm.size).backward()
        right.step()
    close = {"rtol": 1e-4, "atol": 1e-6} if codec == "exact" else {"rtol": 0, "atol": 0.1}
    with together(comm):
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, **close)
    found = {str(i): p.detach().numpy() for i, p in enumerate(model.parameters())}
    assert not mpiquant.differing_parameters(found, comm=comm)


@pytest.mark.mpi(min_size=2)
def test_an_error_in_the_hook_ends_the_backward_pass(comm, group):
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    codec = "q4" if comm.rank else "q8"
    model.register_comm_hook(mqt.DDPState(comm=comm.Dup(), codec=codec), mqt.ddp_hook)
    errors = raised(comm, lambda: loss_of(model, comm.rank, 0).backward())
    with together(comm):
        assert all("ranks disagree" in error[1] for error in errors), errors


def test_arrays_and_tensors_have_one_memory_after_a_step(comm):
    model = make_model()
    optimizer = wrapped(model, comm, codec="exact")
    loss_of(model, comm.rank, 0).backward()
    optimizer.step()
    with together(comm):
        for name, parameter in model.named_parameters():
            own = optimizer.synchronizer.gradients[name]
            assert np.shares_memory(parameter.grad.numpy(), own)
