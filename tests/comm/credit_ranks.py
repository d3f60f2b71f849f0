"""Rank function of `test_credits`: which memory operations an operation on one stream hands to the driver."""

from __future__ import annotations

import torch

import tpoverlap as tpo
from tests.costs.null_device import NullBackend, NullDriver
from tpoverlap.comm.device_exchange import DeviceExchange
from tpoverlap.memory.driver import MASK32, OPERATION_BYTES, PACK, WAIT_32, WRITE_64, MemoryOperations
from tpoverlap.tokens import TokenPartition


class _Recording(NullDriver):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[int, int]] = []
        self.published = 0

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        for number in range(operations.count):
            kind, address, value, *_ = PACK.unpack_from(operations.buffer, number * OPERATION_BYTES)
            self.published += kind == WRITE_64
            if kind == WAIT_32:
                self.waits.append((address, value))


class _RecordingBackend(NullBackend):
    def driver(self) -> NullDriver:
        return _Recording()


def waits_for_credits(rank: int, size: int) -> bool:
    """Whether `trade` and `collect_credit_waits` wait for every peer's credit of the slot's last use, and whether the
    peers are told of the operation no later: a kernel that comes next waits for them.
    """
    partition, x = TokenPartition.even(4 * size, size), torch.zeros(4, 8)
    with tpo.UserBufferManager(None, (4 * size, 8), torch.float32, "cpu", backend=_RecordingBackend) as mgr:
        assert mgr.channel is not None, "several ranks"
        driver = mgr.channel.transport.driver
        assert isinstance(driver, _Recording), "the backend's"
        found = []
        for trades in (True, False):
            driver.waits.clear()
            driver.published = 0
            with mgr.operation(mgr.get("qkv_fprop"), partition, scatter=False).open_gather(order="at_once") as exchange:
                assert isinstance(exchange, DeviceExchange), "a device"
                if trades:
                    exchange.trade(x, 4 * rank)
                else:
                    exchange.collect_credit_waits()
                    exchange.caller.flush()
                due = (exchange.arrivals.epoch - mgr.channel.regions["ag"].depth) & MASK32
                words = [exchange._slot.credit_in[peer] for peer in range(size) if peer != rank]
                found.append(all((word, due) in driver.waits for word in words))
                found.append(driver.published == 2 * (size - 1))  # record and digest, each in 64 bits
        return all(found)
