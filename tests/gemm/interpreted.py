"""Run by test_interpreter.py in a process of its own, because TRITON_INTERPRET decides when Triton is imported.

``python -m tests.gemm.interpreted CASE ...``; on a machine with a GPU the same cases run compiled (``--device cuda``).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from tpoverlap.gemm import PartialGemm
from tpoverlap.gemm.triton import PieceRows, RowBlock, TilePlan, TileShape, kernels_missing, push_plan
from tpoverlap.gemm.triton.copy_launcher import CopyLauncher
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher, View
from tpoverlap.gemm.triton.operation_rows import OperationRows
from tpoverlap.gemm.triton.push_plan import Push, PushPlan, RemoteBlock
from tpoverlap.testing.numeric import assert_close_to_twin

TILE = TileShape(16, 32, 32, 1, 4, group=2)
EPOCHS = (1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
"""Around both ends of a signed and of an unsigned word."""


class Case:
    """One device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype, tma: bool) -> None:
        self.device, self.dtype, self.tma = torch.device(device), dtype, tma
        self.tile = TILE if device == "cpu" else None
        self.use_tma = tma if device == "cpu" else None
        self.launcher = GemmLauncher(self.device, 20.0, tile=self.tile, use_tma=self.use_tma)
        self.generator = torch.Generator().manual_seed(7)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=self.device, dtype=self.dtype)

    def close(self, actual: torch.Tensor, twin: torch.Tensor, reference: torch.Tensor, what: str) -> None:
        assert_close_to_twin(actual, twin.to(self.dtype), reference, what=f"{what} {self.dtype} tma={self.tma}")


def view_of(slot: torch.Tensor) -> View:
    """The slot that ``slot`` is, seen as the launcher asks."""

    def view(first: int, shape: tuple[int, ...]) -> torch.Tensor:
        assert first == 0 and shape == tuple(slot.shape), (first, shape)
        return slot

    return view


def arrivals(case: Case) -> None:
    """A thread writes rows and flags, late and in order, while the kernel spins; any epoch; T not a multiple."""
    blocks = (
        RowBlock(45, 70, (PieceRows(128, 45, 57), PieceRows(129, 57, 70))),
        RowBlock(0, 20, (PieceRows(0, 0, 20),)),
    )
    for number, epoch in enumerate(EPOCHS):
        depth, width = ((48, 40), (33, 37), (16, 8))[number % 3]
        x, weight, bias = case.draw(70, depth), case.draw(width, depth), case.draw(width)
        slot, out = case.empty(70, depth), case.empty(70, width)
        flags = torch.full((256,), _signed(epoch - 1), dtype=torch.int32)
        late = threading.Thread(target=_arrive, args=(blocks, x, slot, flags, epoch))
        late.start()
        matrix = weight.t() if number % 2 else weight.t().contiguous()
        rows = OperationRows(RowBlock(20, 45), blocks)
        place = Slot(slot.data_ptr(), flags.data_ptr())
        own = x[20:45].contiguous()
        case.launcher.gathered_rows(rows, own, place, view_of(slot), matrix, bias, out, epoch)()
        late.join()
        reference = x.double() @ weight.double().t() + bias.double()
        case.close(out, torch.addmm(bias, x, weight.t()), reference, f"epoch {epoch}")
        assert not case.launcher.gave_up


def _arrive(blocks: tuple[RowBlock, ...], x: torch.Tensor, slot: torch.Tensor, flags: torch.Tensor, epoch: int) -> None:
    for block in blocks:
        for piece in block.pieces:
            time.sleep(0.02)
            slot[piece.start : piece.stop] = x[piece.start : piece.stop]
            flags[piece.word] = _signed(epoch)


def gives_up(case: Case) -> None:
    """A piece that never comes: the kernel ends, rows that depend on it are NaN, the error word is set."""
    impatient = GemmLauncher(case.device, 0.02, tile=TILE, use_tma=case.tma)
    x, weight, out = case.draw(64, 32), case.draw(32, 32), case.draw(64, 32)
    flags = torch.zeros(8, dtype=torch.int32)
    flags[0] = 3
    blocks = (RowBlock(16, 64, (PieceRows(0, 16, 32), PieceRows(1, 32, 64))),)
    rows, place = OperationRows(RowBlock(0, 16), blocks), Slot(x.data_ptr(), flags.data_ptr())
    impatient.gathered_rows(rows, x[:16], place, view_of(x), weight.t(), None, out, 3)()
    assert impatient.gave_up
    assert torch.isnan(out[32:]).all(), "what was not waited for may not look like a number"
    assert not torch.isnan(out[:16]).any(), "own rows depend on nobody"


def counts(case: Case) -> None:
    """Partial rows: several terms, an addend; each piece's counter ends at its number of tiles, call after call."""
    blocks = (
        RowBlock(30, 70, (PieceRows(64, 30, 50), PieceRows(65, 50, 70))),
        RowBlock(0, 9, (PieceRows(0, 0, 9),)),
    )
    counters = torch.full((128,), (1 << 31) - 3, dtype=torch.int32, device=case.device)  # wraps to negative
    start = counters.clone()
    expected: dict[int, int] = {}
    asked = OperationRows(RowBlock(9, 30), blocks)
    for num_terms in (1, 2, 3):
        lefts = [case.draw(70, 24 + 8 * term) for term in range(num_terms)]
        matrices = [case.draw(24 + 8 * term, 40) for term in range(num_terms)]
        gemm = PartialGemm(lefts, matrices, case.draw(70, 40) if num_terms == 2 else None, case.draw(40))
        out = case.empty(70, 40)
        for word, tiles in case.launcher.tiles_per_word(asked, gemm).items():
            expected[word] = expected.get(word, 0) + tiles
        case.launcher.partial_rows(asked, gemm, out, counters)()
        reference = sum(left.double() @ matrix.double() for left, matrix in zip(lefts, matrices, strict=True))
        if gemm.addend is not None:
            reference = reference + gemm.addend.double()
        assert isinstance(reference, torch.Tensor)
        twin = gemm.empty(70, 40)
        gemm.rows(0, 70, twin)
        for block in blocks:
            rows = slice(block.start, block.stop)
            case.close(out[rows], twin[rows], reference[rows], f"{num_terms} terms")
        assert torch.isnan(out[9:30]).all(), "own rows were not asked for"
    bumped = (counters.long() - start.long()) % (1 << 32)
    assert {word: int(bumped[word]) for word in range(128) if bumped[word]} == expected


def adds(case: Case) -> None:
    """Own rows: bias, addend and the peers' blocks, float32, in rank order, rounded once."""
    for num_ranks, rank in ((2, 0), (2, 1), (3, 1), (4, 3), (4, 0)):
        rows = RowBlock(5, 42)
        gemm = PartialGemm([case.draw(50, 40)], [case.draw(24, 40).t()], case.draw(50, 24), case.draw(24))
        blocks = case.draw(num_ranks - 1, 37, 24) * 100  # so that the order of additions shows
        out = case.empty(37, 24)
        case.launcher.own_rows(OperationRows(rows), gemm, out, Slot(blocks.data_ptr(), 0, rank, num_ranks), 0)()
        own = gemm.lefts[0][5:42].float() @ gemm.matrices[0].float()
        assert gemm.addend is not None and gemm.bias is not None
        own = own + gemm.addend[5:42].float() + gemm.bias.float()
        parts = [*blocks[:rank].float(), own, *blocks[rank:].float()]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        exact = sum(part.double() for part in parts)
        assert isinstance(exact, torch.Tensor)
        case.close(out, total.to(case.dtype), exact, f"{num_ranks} ranks, rank {rank}")


def adds_late(case: Case) -> None:
    """The peers' blocks come while the kernel multiplies: each tile waits for its pieces of every source."""
    num_ranks, rank, words = 3, 1, 8
    rows = RowBlock(10, 50, (PieceRows(0, 10, 33), PieceRows(1, 33, 50)))
    gemm = PartialGemm([case.draw(60, 40)], [case.draw(24, 40).t()])
    sent, slot, out = case.draw(2, 40, 24), case.empty(2, 40, 24), case.empty(40, 24)
    flags = torch.zeros(num_ranks * words, dtype=torch.int32)

    def arrive() -> None:
        for index, source in ((1, 2), (0, 0)):
            for piece in rows.pieces:
                time.sleep(0.03)
                part = slice(piece.start - 10, piece.stop - 10)
                slot[index, part] = sent[index, part]
                flags[source * words + piece.word] = 9

    late = threading.Thread(target=arrive)
    late.start()
    received = Slot(slot.data_ptr(), flags.data_ptr(), rank, num_ranks, words)
    case.launcher.own_rows(OperationRows(rows), gemm, out, received, 9)()
    late.join()
    own = gemm.lefts[0][10:50].float() @ gemm.matrices[0].float()
    exact = sent[0].double() + gemm.lefts[0][10:50].double() @ gemm.matrices[0].double() + sent[1].double()
    case.close(out, sent[0].float() + own + sent[1].float(), exact, "late blocks")


def pushes(case: Case) -> None:
    """The gather's kernel also copies own rows into a peer's slot: every row, every flag, and no flag too early."""
    x, weight = case.draw(50, 40), case.draw(24, 40)
    ready = torch.full((256,), 5, dtype=torch.int32, device=case.device)
    others = (RowBlock(0, 20, (PieceRows(0, 0, 20),)),)
    rows = OperationRows(RowBlock(20, 50), others, (Push(1, 0, 13, 20, 64, 0), Push(1, 13, 30, 33, 65, 1)))
    for late in (False, True):
        slot, flags = case.empty(60, 40), torch.zeros(64, dtype=torch.int32, device=case.device)
        peers = torch.tensor([[0, 0], [slot.data_ptr(), flags.data_ptr()]], device=case.device)
        out = case.empty(50, 24)
        launcher = GemmLauncher(case.device, 20.0, tile=case.tile, use_tma=case.use_tma)
        # As if a program had yet to copy the last part of each piece.
        with patch.object(PushPlan, "of", _without_last_parts if late else PushPlan.of):
            place = Slot(x.data_ptr(), ready.data_ptr(), 0, 2, 64, peers)
            own = x[20:].contiguous()
            launcher.gathered_rows(rows, own, place, view_of(x), weight.t(), None, out, 5, pushes=True)()
        case.close(out, torch.mm(x, weight.t()), x.double() @ weight.double().t(), "beside pushes")
        assert flags.tolist()[:3] == ([0, 0, 0] if late else [5, 5, 0])
        if not late:
            assert torch.equal(slot[20:50], x[20:50])
        assert torch.isnan(slot[:20]).all() and torch.isnan(slot[50:]).all(), "wrote elsewhere"


def _without_last_parts(given: tuple[Push, ...], row_bytes: int, *limits: int) -> PushPlan:
    plan = push_plan._cut(given, row_bytes, 12, 1)
    last = {row[4]: row for row in plan.rows}
    assert all(row[6] > 1 for row in plan.rows), "nothing is cut here"
    return PushPlan(tuple(row for row in plan.rows if row is not last[row[4]]))


def _one_tile_more(plan: TilePlan, column_tiles: int) -> dict[int, int]:
    return {word: len(plan.rows) * column_tiles + 1 for _, _, word, _ in plan.rows}


def scatters(case: Case) -> None:
    """The one-launch scatter: peers' rows at their place in their slots, each piece flagged by its last tile."""
    gemm = PartialGemm([case.draw(80, 40)], [case.draw(40, 72)], case.draw(80, 72), case.draw(72))
    remote = (
        RemoteBlock(RowBlock(50, 80, (PieceRows(128, 50, 63), PieceRows(129, 63, 80))), 2, 30),
        RemoteBlock(RowBlock(0, 10, (PieceRows(0, 0, 10),)), 0, 10),
    )
    own = RowBlock(10, 50, (PieceRows(0, 10, 50),))
    rows = OperationRows(own, tuple(entry.block for entry in remote), (), remote)
    sent = case.draw(2, 40, 72)
    ready = torch.full((256,), 5, dtype=torch.int32, device=case.device)
    launcher = GemmLauncher(case.device, 20.0, tile=case.tile, use_tma=case.use_tma)
    for turn in range(3):  # its counters are back at zero after each launch; the last turn counts one tile too few
        slots = [case.empty(70, 72) for _ in range(3)]
        flags = [torch.zeros(64, dtype=torch.int32, device=case.device) for _ in range(3)]
        addresses = [(slot.data_ptr(), words.data_ptr()) for slot, words in zip(slots, flags, strict=True)]
        peers = torch.tensor(addresses, device=case.device)
        out = case.empty(40, 72)
        counted = TilePlan.tiles_per_word
        if turn == 2:
            launcher = GemmLauncher(case.device, 20.0, tile=case.tile, use_tma=case.use_tma)
            counted = _one_tile_more
        with patch.object(TilePlan, "tiles_per_word", counted):
            launcher.scatter_rows(rows, gemm, out, Slot(sent.data_ptr(), ready.data_ptr(), 1, 3, 64, peers), 5)()
        twin = gemm.empty(80, 72)
        gemm.rows(0, 80, twin)
        assert gemm.addend is not None and gemm.bias is not None
        exact = gemm.lefts[0].double() @ gemm.matrices[0].double() + gemm.addend.double()
        case.close(slots[2][30:60], twin[50:], exact[50:], "rows of rank 2")
        case.close(slots[0][10:20], twin[:10], exact[:10], "rows of rank 0")
        total = sent[0].double() + (exact[10:50] + gemm.bias.double()) + sent[1].double()
        case.close(out, total, total, "own rows")
        assert [words.tolist()[:3] for words in flags] == (
            [[0] * 3] * 3 if turn == 2 else [[5, 0, 0], [0, 0, 0], [5, 5, 0]]
        )
        assert torch.isnan(slots[2][:30]).all() and torch.isnan(slots[2][60:]).all(), "wrote elsewhere"


def copies(case: Case) -> None:
    """Copy programs: any size and alignment, the flag last, and only once the whole copy is there."""
    launcher = CopyLauncher(case.device, 3)
    flag = torch.zeros(4, dtype=torch.int32, device=case.device)
    for number, size in enumerate((1, 7, 16, 4096, 100_001)):
        source, target = case.draw(size + 1), case.empty(size + 2)
        shift = number % 2
        launcher.copy(target[shift : shift + size], source[:size], flag.data_ptr() + 8, EPOCHS[number])
        assert torch.equal(target[shift : shift + size], source[:size])
        assert torch.isnan(target[shift + size :]).all(), "wrote past the end"
        assert flag.tolist() == [0, 0, _signed(EPOCHS[number]), 0]


def _signed(value: int) -> int:
    return ((value + (1 << 31)) % (1 << 32)) - (1 << 31)


CASES: dict[str, Callable[[Case], None]] = {
    function.__name__: function for function in (arrivals, gives_up, counts, adds, adds_late, pushes, scatters, copies)
}
HOST_FLAGS = ("arrivals", "gives_up", "adds_late")
"""Cases whose flags lie in host memory that another thread writes: on the CPU only."""


def main() -> None:
    """Run cases for float32 and float16 (on a GPU bfloat16 too), with and without descriptors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--missing", action="store_true", help="say what the kernels lack on the device, run nothing")
    arguments = parser.parse_args()
    if arguments.missing:
        print(kernels_missing(torch.device(arguments.device)) or "works")
        return
    torch.set_num_threads(1)
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if arguments.device == "cuda" else [])
    for name in arguments.cases:
        for dtype in dtypes:
            for tma in (False, True) if arguments.device == "cpu" else (False,):
                if arguments.device == "cpu" or name not in HOST_FLAGS:
                    CASES[name](Case(arguments.device, dtype, tma))
        print(f"{name} passed", flush=True)


if __name__ == "__main__":
    main()
