"""Rank functions of `test_attacks`: programs that once gave wrong numbers, hung, or spoke for another process."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, FEATURES, WIDTH, make_manager, outcome_of, seeded
from tpoverlap.overlap import gather_beside
from tpoverlap.tokens import TokenPartition


def two_threads(rank: int, size: int, backend: str) -> None:
    """One thread is inside a bulk all-gather while another does two more on the same region."""
    partition = TokenPartition.balanced(CAPACITY, size)
    wholes = [seeded(CAPACITY, WIDTH, seed=70 + turn) for turn in range(3)]
    shards = [whole[partition.rows(rank)].contiguous() for whole in wholes]
    gathered: dict[int, torch.Tensor] = {}
    opened = threading.Event()
    with make_manager(backend=backend, timeout_s=20) as manager:
        comm = manager.get("qkv_dgrad")
        operand = torch.ones(1, 1)

        def slow_gemm() -> None:
            opened.set()
            time.sleep(0.3)

        def first() -> None:
            operation = manager.operation(comm, partition, scatter=False, beside=True)
            gather_beside(operation, shards[0], slow_gemm, lambda whole: gathered.update({0: whole.clone()}))

        def others() -> None:
            assert opened.wait(10)
            for turn in (1, 2):
                gathered[turn] = tpo.bulk_all_gather(shards[turn], comm, (operand, operand), partition=partition)[0]

        threads = [threading.Thread(target=work) for work in (first, others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        manager.check()
    for turn, whole in enumerate(wholes):
        torch.testing.assert_close(gathered[turn], whole, rtol=0, atol=0)


def double_backward(rank: int, size: int) -> str:
    """The gradient of a gradient is refused before anything is sent, and the manager stays usable."""
    with make_manager() as manager:
        manager.set_active_shape(2 * size)
        weight = seeded(FEATURES, WIDTH, seed=rank).requires_grad_()
        x = seeded(2, WIDTH, seed=3).requires_grad_()
        y = tpo.all_gather_gemm(x, weight, manager.layer("qkv"))
        assert isinstance(y, torch.Tensor)
        (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        try:
            grad.pow(2).sum().backward()
        except RuntimeError as error:
            manager.check()
            tpo.all_gather_gemm(x, weight, manager.layer("qkv"))
            return str(error)
    return "no error"


def stale_view(rank: int, size: int) -> str:
    """A view of the coming slot, taken under another partition, would be written over by peers: refused."""
    with make_manager(max_rows_per_rank=CAPACITY) as manager:
        comm = manager.get("qkv_fprop")
        manager.set_active_shape(TokenPartition.from_counts([1] + [3] * (size - 1)))
        x = comm.get_buffer(local_chunk=True)
        manager.set_active_shape(TokenPartition.from_counts([2] + [3] * (size - 1)))
        message = "rank 0's rows start at row 0 in both"
        if rank > 0:
            try:
                tpo.all_gather_gemm(x, seeded(FEATURES, WIDTH, seed=1), manager.layer("qkv"))
            except tpo.ActiveShapeError as error:
                message = str(error)
        manager.set_active_shape(TokenPartition.balanced(2 * size, size))
        tpo.all_gather_gemm(seeded(2, WIDTH, seed=2), seeded(FEATURES, WIDTH, seed=1), manager.layer("qkv"))
    return message


def fork(rank: int, size: int) -> str:
    """A forked child may neither operate nor abort in the name of its parent."""
    manager = make_manager()
    manager.set_active_shape(size)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            manager.check()
            message = "no error"
        except tpo.NotInitializedError as error:
            message = str(error)
        manager.abort()
        os.write(write, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    tpo.all_gather_gemm(seeded(1, WIDTH, seed=rank), seeded(FEATURES, WIDTH, seed=1), manager.layer("qkv"))
    manager.check()
    manager.close()
    return os.read(read, 4096).decode()


def autocast(rank: int, size: int) -> None:
    """A bulk collective under autocast keeps the manager's dtype, in backward outside of it too."""
    with make_manager() as manager:
        manager.set_active_shape(2 * size)
        a, b = seeded(3, FEATURES, seed=1).requires_grad_(), seeded(4, FEATURES, seed=2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, product = tpo.bulk_all_gather(seeded(2, WIDTH, seed=rank), manager.get("qkv_dgrad"), (a, b))
        product.sum().backward()
        assert product.dtype == torch.float32 and a.grad is not None
        torch.testing.assert_close(a.grad, b.sum(0).expand(3, -1))


def too_many(rank: int, size: int, option: str) -> str:
    """More pipeline splits, or streams for them, than flags are refused at set-up."""
    try:
        make_manager(ub_cfgs={"proj_fprop": {"method": "pipeline", option: 65}}).abort()
    except tpo.ConfigError as error:
        return str(error)
    return "no error"


def dies_before(rank: int, size: int) -> str:
    """Rank 1 is killed while the others wait for it in the constructor."""
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        make_manager()
    except tpo.PeerTimeoutError as error:
        return str(error)
    return "no error"


def no_entries(rank: int, size: int, what: str) -> str:
    """A target of 1.7 would be cut to 1; the other two would fail deep inside. Refused before anything is sent."""
    with make_manager() as manager:
        logits, targets = torch.ones(3, 2), torch.tensor([0, 1, 1])
        embedding = tpo.nn.VocabParallelEmbedding(2 * size, WIDTH, manager=manager)
        calls = {
            "targets": lambda: tpo.nn.vocab_parallel_cross_entropy(logits, targets + 0.7, 2 * size, manager),
            "logits": lambda: tpo.nn.vocab_parallel_cross_entropy(logits.long(), targets, 2 * size, manager),
            "tokens": lambda: embedding([0, 1]),
        }
        try:
            calls[what]()
        except tpo.ActiveShapeError as error:
            manager.check()
            return str(error)
    return "no error"


def frozen_meanwhile(rank: int, size: int, option: str | None) -> None:
    """As with plain torch: a weight that was frozen after its forward gets no gradient, wherever gradients go."""
    options = {} if option is None else {option: True}
    with make_manager() as manager:
        layer = tpo.nn.Linear(WIDTH, FEATURES * size, parallel_mode="column", manager=manager, ub_name="qkv", **options)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        x = seeded(2, WIDTH, seed=rank).requires_grad_()
        y = layer(x)
        layer.weight.requires_grad_(False)
        y.sum().backward()
        layer.backward_dw()
        assert layer.weight.grad is None and not layer.weight.main_grad.any() and x.grad is not None
        layer.weight.requires_grad_(True)
        layer(x).sum().backward()
        layer.backward_dw()
        assert layer.weight.grad is not None or layer.weight.main_grad.any()


def bad_names(rank: int, size: int) -> list[str]:
    """A name that is no text is refused where it is given."""
    with make_manager() as manager:
        found = []
        for name in (3, ("qkv",), b"qkv"):
            try:
                tpo.nn.Linear(WIDTH, 2 * size, parallel_mode="column", manager=manager, ub_name=name)
            except tpo.ConfigError as error:
                found.append(str(error))
    return found


def compiled(rank: int, size: int) -> dict[str, bool]:
    """Layers and functions inside torch.compile: they break the graph, and their results and gradients are right."""
    same = {}
    with make_manager() as manager:
        block = tpo.nn.TransformerLayer(WIDTH, 8 * size, size, kv_channels=4, rotary_base=1e4, manager=manager)
        column = tpo.nn.Linear(WIDTH, 3 * size, parallel_mode="column", manager=manager, ub_name="qkv")
        row = tpo.nn.Linear(3 * size, WIDTH, parallel_mode="row", manager=manager, ub_name="proj")
        weight, dgrad = seeded(FEATURES, WIDTH, seed=1), manager.get("qkv_dgrad")

        def functions(x: torch.Tensor) -> torch.Tensor:
            h = tpo.all_gather_gemm(x.sin(), weight, manager.layer("fc1"))
            h = tpo.gemm_reduce_scatter(h.cos(), weight.t(), manager.layer("fc2"))
            return h + tpo.bulk_all_gather(h, dgrad, (x, x))[1].sum()

        def loss(x: torch.Tensor) -> torch.Tensor:
            targets = torch.arange(x.shape[0] * size) % (3 * size)
            return tpo.nn.vocab_parallel_cross_entropy(column(x), targets, 3 * size, manager, reduction="sum")

        calls = {"block": block, "layers": lambda x: row(column(x).relu()), "loss": loss, "functions": functions}
        for name, call in calls.items():
            twin = torch.compile(call, backend="aot_eager", dynamic=True)
            for rows in (2, 5):
                found = []
                for one in (call, twin):
                    x = seeded(rows * size, WIDTH, seed=rows)[rows * rank : rows * rank + rows].requires_grad_()
                    y = one(x)
                    (grad,) = torch.autograd.grad(y.square().sum(), x)
                    found.append((y.detach(), grad))
                same[f"{name}, {rows}"] = all(torch.allclose(a, b) for a, b in zip(*found, strict=True))
        manager.check()
    torch._dynamo.reset()
    return same


def written_meanwhile(rank: int, size: int, mode: str, what: str) -> str:
    """The caller refills its receive buffer between backward and backward_dw(): dW was that of other numbers."""
    with make_manager() as manager:
        features = (WIDTH, FEATURES * size) if mode == "column" else (FEATURES * size, WIDTH)
        layer = tpo.nn.Linear(
            *features, parallel_mode=mode, manager=manager, ub_name="qkv" if mode == "column" else "proj",
            delay_wgrad_compute=True,
        )  # fmt: skip
        x = seeded(2, WIDTH, seed=rank) if mode == "column" else seeded(2 * size, FEATURES, seed=rank)
        y = layer(x)
        dy = torch.ones_like(y)
        y.backward(dy)
        (x if what == "input" else dy).zero_()
        try:
            layer.backward_dw()
        except tpo.ConfigError as error:
            layer(x).sum().backward()
            layer.backward_dw()
            return str(error)
    return "no error"


def other_replicated(rank: int, size: int) -> list[str]:
    """A parameter that is frozen on one rank, then one each of the same length, then none: only that is summed."""
    found = []
    with make_manager() as manager:
        layer = tpo.nn.LayerNormMLP(WIDTH, 2 * size, manager=manager)
        layer(seeded(2, WIDTH, seed=rank)).sum().backward()
        layer.layer_norm_weight.requires_grad_(rank == 1)
        found.append(outcome_of(lambda: tpo.sync_replicated_grads(layer, None)))
        layer.fc2_bias.requires_grad_(rank == 0)
        found.append(outcome_of(lambda: tpo.sync_replicated_grads(layer, None)))
        layer.requires_grad_(True)
        for _ in range(2):
            assert tpo.sync_replicated_grads(layer, None) == 3
        torch.testing.assert_close(layer.fc2_bias.grad, torch.full((WIDTH,), 2.0 * size * size))
        layer.requires_grad_(False)
        assert tpo.sync_replicated_grads(layer, None) == 0
    assert all(outcome is not None and outcome[0][0] == "RankMismatchError" for outcome in found), found
    return [outcome[1] for outcome in found if outcome is not None]
