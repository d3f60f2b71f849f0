"""Rank functions of `test_active_shape`. Each asserts by itself."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, assert_right, make_manager, seeded
from tpoverlap.tokens import TokenPartition


def forms(rank: int, size: int) -> None:
    """Everything that may say T."""
    uneven = TokenPartition.from_counts((1, 6, 0)[:size])
    total = uneven.total
    balanced = TokenPartition.balanced(total, size)
    with make_manager() as manager:
        shapes: list[Any] = [total, (total, WIDTH), [total, WIDTH], torch.Size((total, WIDTH)), np.int64(total)]
        shapes += [(np.int32(total), WIDTH), torch.tensor([total, WIDTH]), np.array([total, WIDTH])]
        for shape in shapes:
            manager.set_active_shape(CAPACITY)
            assert manager.set_active_shape(shape) == balanced
            assert manager.partition == balanced, shape
            assert manager.active_shape == (total, WIDTH) and type(manager.active_shape[0]) is int
            with manager.microbatch(shape) as partition:
                assert partition == balanced
            comm = manager.get("fc2_dgrad")
            comm.set_buffer_active_shape(shape)
            assert comm.partition == balanced
        for arguments in ((uneven,), (None, uneven), (total, uneven), ((total, WIDTH), uneven), (uneven, uneven)):
            manager.set_active_shape(CAPACITY)
            assert manager.set_active_shape(*arguments) == uneven
            assert manager.partition == uneven
            assert manager.num_tokens == total
        assert_right(manager, uneven, backward=True)
        assert manager.set_active_shape() is None  # back to inference
        assert manager.partition is None and manager.active_shape == (CAPACITY, WIDTH)


def getters_before_any_shape(rank: int, size: int) -> None:
    """They answer with the capacity, and buffers are whole."""
    whole = TokenPartition.balanced(CAPACITY, size)
    with make_manager() as manager:
        assert manager.active_shape == manager.capacity_shape == (CAPACITY, WIDTH)
        assert manager.partition is None and manager.num_tokens == CAPACITY
        for name in ("qkv_fprop", "proj_fprop", "qkv_dgrad", "qkv_wgrad"):
            comm = manager.get(name)
            assert comm.get_buffer_active_shape() == comm.get_buffer_capacity_shape() == (CAPACITY, WIDTH)
            assert comm.get_buffer().shape == (CAPACITY, WIDTH)
            assert comm.get_buffer(local_chunk=True).shape == (whole.counts[rank], WIDTH)
        torch.distributed.barrier()


def buffers(rank: int, size: int) -> None:
    """Views are a contiguous prefix of one slot, whatever T; copies land in them; local chunks are own rows."""
    with make_manager() as manager:
        for name in ("qkv_fprop", "proj_fprop"):
            comm = manager.get(name)
            start = comm.get_buffer().data_ptr()
            for total in (CAPACITY, 1, 7):
                manager.set_active_shape(total)
                partition = TokenPartition.balanced(total, size)
                view = comm.get_buffer()
                assert view.shape == (total, WIDTH) and view.is_contiguous() and view.data_ptr() == start, name
                assert view.dtype == torch.float32
                x = seeded(total, WIDTH, seed=total)
                comm.copy_into_buffer(x)
                assert torch.equal(comm.get_buffer(), x)
                own = comm.get_buffer(local_chunk=True)
                assert torch.equal(own, x[partition.rows(rank)])
                comm.copy_into_buffer(2 * own, local_chunk=True)
                assert torch.equal(view[partition.rows(rank)], 2 * x[partition.rows(rank)])
        torch.distributed.barrier()


def scopes(rank: int, size: int) -> None:
    """They nest, end with an exception, win over what is set meanwhile, and belong to one thread."""
    seen: dict[str, Any] = {}
    with make_manager() as manager:
        manager.set_active_shape(9)
        with manager.microbatch(7):
            assert manager.num_tokens == 7
            try:
                with manager.microbatch(partition=TokenPartition((1,) * size)):
                    assert manager.num_tokens == size
                    raise KeyError
            except KeyError:
                pass
            assert manager.num_tokens == 7
            manager.set_active_shape(11)
            assert manager.num_tokens == 7, "the scope wins"

            def elsewhere() -> None:
                seen["outside"] = manager.num_tokens
                with manager.microbatch(3):
                    seen["inside"] = manager.num_tokens
                    entered.set()
                    leave.wait(20.0)

            entered, leave = threading.Event(), threading.Event()
            thread = threading.Thread(target=elsewhere)
            thread.start()
            assert entered.wait(20.0)
            assert manager.num_tokens == 7, "another thread's scope"
            leave.set()
            thread.join()
            assert_right(manager, TokenPartition.balanced(7, size))
        assert seen == {"outside": 11, "inside": 3}
        assert manager.num_tokens == 11
        assert_right(manager, TokenPartition.balanced(11, size))


def one_name(rank: int, size: int) -> None:
    """A name's own shape holds until the manager's changes: by set, by entering a scope or by leaving one."""
    own = TokenPartition.from_counts((1, 6, 0)[:size])
    with make_manager() as manager:
        comm, other = manager.get("qkv_fprop"), manager.get("fc1_fprop")

        def replaced(by: int) -> None:
            assert comm.get_buffer_active_shape() == (by, WIDTH)

        manager.set_active_shape(9)
        comm.set_buffer_active_shape(own)
        assert comm.get_buffer_active_shape() == (own.total, WIDTH) and comm.partition == own
        assert comm.get_buffer().shape == (own.total, WIDTH)
        assert other.get_buffer_active_shape() == (9, WIDTH) and manager.active_shape == (9, WIDTH)
        assert_right(manager, own, comm, None, backward=True)
        assert_right(manager, TokenPartition.balanced(9, size), other, "proj", backward=True)
        manager.set_active_shape(9)
        replaced(9)
        comm.set_buffer_active_shape(own)
        with manager.microbatch(5):
            replaced(5)
            comm.set_buffer_active_shape((own.total, WIDTH), own)
            assert comm.partition == own
        replaced(9)
        torch.distributed.barrier()


def order_of_resolution(rank: int, size: int) -> None:
    """partition= of the call, then the scope, then the manager, then the input: each says another split of 7 rows."""
    splits = {
        "call": TokenPartition.from_counts((0, 7, 0)[:size]),
        "scope": TokenPartition.from_counts((1, 6, 0)[:size]),
        "manager": TokenPartition.from_counts((2, 5, 0)[:size]),
    }
    with make_manager() as manager:
        assert_right(manager, TokenPartition.even(2 * size, size), "qkv", None)  # all-gather: T = R * T_r
        assert_right(manager, TokenPartition.balanced(7, size), None, "proj")  # reduce-scatter: balanced
        manager.set_active_shape(splits["manager"])
        assert_right(manager, splits["manager"], backward=True)
        with manager.microbatch(splits["scope"]):
            assert_right(manager, splits["scope"], backward=True)
            assert_right(manager, splits["call"], by_call=True, backward=True)
            linear = tpo.nn.Linear(WIDTH, 2 * size, parallel_mode="column", manager=manager, ub_name="qkv")
            shard = torch.ones(splits["call"].counts[rank], WIDTH)
            assert linear(shard, partition=splits["call"]).shape == (7, 2)
        assert_right(manager, splits["manager"])


def backward_keeps_its_partition(rank: int, size: int) -> None:
    """Backward uses the forward's rows, whatever the manager says by then."""
    first = TokenPartition.from_counts((1, 6, 0)[:size])
    with make_manager() as manager:
        comm = manager.layer("qkv")
        with manager.microbatch(first):
            x = seeded(7, WIDTH, seed=1)
            shard = x[first.rows(rank)].requires_grad_()
            weight = seeded(4, WIDTH, seed=2).requires_grad_()
            y = tpo.all_gather_gemm(shard, weight, comm)
        with manager.microbatch(CAPACITY):
            assert_right(manager, TokenPartition.balanced(CAPACITY, size), backward=True)
            y.sum().backward()
        torch.testing.assert_close(weight.grad, x.sum(0).expand(4, WIDTH))
        torch.testing.assert_close(shard.grad, (size * weight.detach().sum(0)).expand_as(shard))
