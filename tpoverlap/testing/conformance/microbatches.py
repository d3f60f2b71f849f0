"""Case 7: microbatches of different T in flight, in 1F1B order, with and without recomputation.

Rank functions, as in `gemms`. Everything accumulates in ``parameter.grad`` over the microbatches (case 13).
"""

from __future__ import annotations

from typing import Any

from tpoverlap.errors import ActiveShapeError, TpOverlapError
from tpoverlap.nn.replicated import sync_replicated_grads
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.conformance.stack import SCHEMES, Stack, Twin
from tpoverlap.testing.specs import uneven_partitions
from tpoverlap.tokens import TokenPartition


def one_forward_one_backward(num_microbatches: int, num_warmup: int) -> list[tuple[str, int]]:
    """("F" | "B", microbatch) in the order of one pipeline stage.

    ``num_warmup`` forwards, then a forward and a backward in turn, then the backwards that are left. The last stage has
    ``num_warmup`` 0, the first of P stages P - 1.
    """
    num_warmup = min(num_warmup, num_microbatches)
    order = [("F", index) for index in range(num_warmup)]
    for index in range(num_warmup, num_microbatches):
        order += [("F", index), ("B", index - num_warmup)]
    return order + [("B", index) for index in range(num_microbatches - num_warmup, num_microbatches)]


def microbatch_partitions(setting: Setting, size: int) -> list[TokenPartition]:
    """Four T: C, R + 1, uneven counts (with a rank that owns no row, where R > 1), and one in between."""
    uneven = list(uneven_partitions(setting.capacity, size).values())
    return [
        TokenPartition.balanced(setting.capacity, size),
        TokenPartition.balanced(size + 1, size),
        next((partition for partition in uneven if 0 in partition.counts), uneven[0]),
        TokenPartition.balanced(setting.capacity * 3 // 5, size),
    ]


def check_microbatches_1f1b(
    rank: int,
    size: int,
    setting: Setting,
    num_warmup: int,
    recomputation: str = "none",
    scheme: str = "default",
    by_argument: bool = False,
) -> dict[str, Any]:
    """Four microbatches through two stacked blocks that share buffers.

    T is set before each forward and nowhere else, so every backward runs while the manager holds a later T.
    ``by_argument``: the layers get ``partition=``, and the manager holds a wrong T all the time.
    """
    comparison = Comparison()
    partitions = microbatch_partitions(setting, size)
    with setting.open_manager(rank, ub_cfgs=SCHEMES[scheme]) as manager:
        stack = Stack(manager, setting, recomputation)
        twin, reference = (Twin(rank, size, setting, t, scheme) for t in (setting.dtype, setting.reference_dtype))
        stack.load(twin)
        inputs, outputs = {}, {}
        for phase, index in one_forward_one_backward(len(partitions), num_warmup):
            partition = partitions[index]
            comparison.where = f"rank {rank}, {phase}{index} of {num_warmup} warm-up, {recomputation}, {scheme}"
            own = partition.rows(rank)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", index)
            dy = setting.draw(rank, (partition.total, setting.hidden), "dy", index)
            if phase == "F":
                manager.set_active_shape(partition.total % setting.capacity + 1 if by_argument else partition)
                inputs[index] = x[own].clone().requires_grad_()
                outputs[index] = stack(inputs[index], partition if by_argument else None)
                continue
            outputs[index].backward(dy[own])
            (y, dx), (y_reference, dx_reference) = (model.train(x, dy, partition) for model in (twin, reference))
            comparison.close("y", outputs.pop(index), y[own], y_reference[own])
            comparison.close("dx", inputs.pop(index).grad, dx[own], dx_reference[own])
        _compare_parameters(comparison, stack, twin, reference)
        manager.check()
    return comparison.summary()


def _compare_parameters(comparison: Comparison, stack: Stack, twin: Twin, reference: Twin) -> None:
    count = sync_replicated_grads(stack, stack.manager.group)
    comparison.true(f"{count} replicated parameters", count == 2 * len(stack.blocks))
    for name, parameter in stack.named_parameters():
        comparison.close(f"d {name}", parameter.grad, twin.grad_of(name), reference.grad_of(name))


def check_forgotten_context(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """Recomputation without ``context_fn``: while the manager holds a later T, every rank gets ActiveShapeError.

    The manager stays usable, and with the first T set again the same backward gives the right gradients.
    """
    comparison = Comparison(f"rank {rank}, no context_fn")
    first, later = (TokenPartition.balanced(t, size) for t in (3 * size, 5 * size))
    with setting.open_manager(rank) as manager:
        stack = Stack(manager, setting, "forgotten")
        twin, reference = (Twin(rank, size, setting, dtype) for dtype in (setting.dtype, setting.reference_dtype))
        stack.load(twin)
        x = setting.draw(rank, (first.total, setting.hidden), "x")
        dy = setting.draw(rank, (first.total, setting.hidden), "dy")
        for lead in (later, first):
            stack.zero_grad()
            manager.set_active_shape(first)
            y = stack(x[first.rows(rank)].clone().requires_grad_())
            manager.set_active_shape(lead)
            try:
                y.backward(dy[first.rows(rank)])
            except ActiveShapeError as error:
                comparison.true(f"the message names both: {error}", "3 rows" in str(error) and "owns 5" in str(error))
                comparison.true("an error, although T is right", lead == later)
            else:
                comparison.true("no error, although the manager holds another T", lead == first)
        for model in (twin, reference):
            model.train(x, dy, first)
        _compare_parameters(comparison, stack, twin, reference)
        manager.check()
    return comparison.summary()


def check_forgotten_context_seen_by_one(rank: int, size: int, setting: Setting) -> str:
    """The same where only rank 0's row count changes: the others cannot know, and must not go on with wrong rows.

    Returns the error of this rank: rank 0 has ActiveShapeError and gives up, which ends the wait of the others.
    """
    first, later = (TokenPartition.balanced(t, size) for t in (2 * size, 2 * size + 1))
    manager = setting.open_manager(rank)
    try:
        stack = Stack(manager, setting, "forgotten", num_blocks=1)
        stack.load(Twin(rank, size, setting, setting.dtype))
        manager.set_active_shape(first)
        y = stack(setting.draw(rank, (first.counts[rank], setting.hidden), "x").requires_grad_())
        manager.set_active_shape(later)
        y.sum().backward()
    except TpOverlapError as error:
        return type(error).__name__
    finally:
        manager.abort()
    raise AssertionError(f"rank {rank}: backward recomputed with T={later.total} instead of {first.total}")
