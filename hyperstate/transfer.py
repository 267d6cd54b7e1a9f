"""Runs a plan over a backend's fabric. Decides nothing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from .backend import Backend, Buffer, Local, Pending
from .errors import OptionError
from .layout import Box
from .plan import Message, Piece, Round, Stage
from .schema import DTYPES

Storage = Callable[[int], tuple[Local, Box]]
"""Of a move's index: this rank's local tensor and the box of the full tensor that it holds."""

IN_FLIGHT = 2
"""Rounds under way at once: one is packed while the other travels."""

PATIENCE_S = 30.0
"""All ranks have agreed, so the bytes are on their way; giving up sooner would only harm the user's process group."""

BUCKET_VARIABLE = "HYPERSTATE_BUCKET_MIB"


def message_limit(ranks: int) -> int:
    """Payload bytes per message, so that a rank's messages of one round fit into one bucket."""
    text = os.environ.get(BUCKET_VARIABLE, "64")
    try:
        bucket = int(float(text) * 2**20)
    except (ValueError, OverflowError):
        bucket = 0
    if bucket < 1:
        raise OptionError(f"{BUCKET_VARIABLE}={text!r} must be a positive number of MiB")
    return max(64 * 1024, bucket // max(1, ranks - 1))


def run(backend: Backend, stages: Sequence[Stage], source: Storage, target: Storage, timeout: float) -> None:
    """Carry out this rank's `stages`; `timeout` seconds, but never less than `PATIENCE_S`, bound each round.

    `source` is asked for what this rank sends (the dtype is the move's), `target` for what it
    receives (converted to the target's own dtype). Forwarding moves read `target`.
    Raises `TransferError` if a peer is lost.
    """
    for stage in stages:
        _Runner(backend, stage, source, target, max(timeout, PATIENCE_S)).run()


@dataclass
class _Arrival:
    """What to do once a round has arrived: copies out of staging buffers."""

    pending: Pending
    staged: list[tuple[Buffer, list[Piece]]] = field(default_factory=list)


class _Runner:
    def __init__(self, backend: Backend, stage: Stage, source: Storage, target: Storage, timeout: float) -> None:
        self.backend, self.stage, self.timeout = backend, stage, timeout
        self._source, self._target = cache(source), cache(target)  # a move has several pieces

    def run(self) -> None:
        tensors = self.backend.tensors
        tensors.copy([(self._to(piece), self._from(piece)) for piece in self.stage.local])
        flying: deque[_Arrival] = deque()
        for one in self.stage.rounds:
            flying.append(self._start(one))
            if len(flying) >= IN_FLIGHT:
                self._finish(flying.popleft())
        while flying:
            self._finish(flying.popleft())

    def _start(self, one: Round) -> _Arrival:
        sends = [(peer, buffer) for peer, message in one.sends.items() for buffer in self._pack(message)]
        recvs: list[tuple[int, Buffer]] = []
        staged: list[tuple[Buffer, list[Piece]]] = []
        for peer, message in one.recvs.items():
            recvs += [(peer, buffer) for buffer in self._receivers(message, staged)]
        return _Arrival(self.backend.fabric.exchange(sends, recvs), staged)

    def _finish(self, arrival: _Arrival) -> None:
        arrival.pending.wait(self.timeout)
        pairs = []
        for buffer, pieces in arrival.staged:
            pairs += list(zip(map(self._to, pieces), self._windows(buffer, pieces), strict=True))
        self.backend.tensors.copy(pairs)

    def _pack(self, message: Message) -> list[Buffer]:
        buffers = []
        if message.packed:
            buffers.append(self._stage(message.nbytes, message.packed))
        for piece in message.direct:
            own = self.backend.tensors.as_buffer(self._from(piece))
            buffers.append(self._stage(self._nbytes(piece), [piece]) if own is None else own)
        return buffers

    def _stage(self, nbytes: int, pieces: list[Piece]) -> Buffer:
        buffer = self.backend.tensors.buffer(nbytes)
        views = map(self._from, pieces)
        self.backend.tensors.copy(list(zip(self._windows(buffer, pieces), views, strict=True)))
        return buffer

    def _receivers(self, message: Message, staged: list[tuple[Buffer, list[Piece]]]) -> list[Buffer]:
        buffers = []
        if message.packed:
            buffers.append(self.backend.tensors.buffer(message.nbytes))
            staged.append((buffers[-1], message.packed))
        for piece in message.direct:
            own = self._own(piece)
            if own is None:
                own = self.backend.tensors.buffer(self._nbytes(piece))
                staged.append((own, [piece]))
            buffers.append(own)
        return buffers

    def _own(self, piece: Piece) -> Buffer | None:
        """The target's own memory, if bytes can arrive there as they are."""
        view = self._to(piece)
        spec = self.backend.tensors.spec(view)
        if spec is None or spec.dtype != self.stage.moves[piece.move].route.dtype:
            return None
        return self.backend.tensors.as_buffer(view)

    def _nbytes(self, piece: Piece) -> int:
        return piece.box.size * DTYPES[self.stage.moves[piece.move].route.dtype][0]

    def _windows(self, buffer: Buffer, pieces: Sequence[Piece]) -> list[Local]:
        parts = [(piece.offset, piece.box.shape, self.stage.moves[piece.move].route.dtype) for piece in pieces]
        return self.backend.tensors.windows(buffer, parts)

    def _from(self, piece: Piece) -> Local:
        move = self.stage.moves[piece.move]
        local, held = (self._target if move.route.forward else self._source)(move.tensor)
        return local if piece.box is held or piece.box == held else self._view(local, held, piece.box)

    def _to(self, piece: Piece) -> Local:
        local, held = self._target(self.stage.moves[piece.move].tensor)
        return local if piece.box is held or piece.box == held else self._view(local, held, piece.box)

    def _view(self, local: Local, held: Box, box: Box) -> Local:
        return self.backend.tensors.view(local, box.within(held))
