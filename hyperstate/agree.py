"""One verdict on all ranks before anything is written.

Participants meet on the control channel: each posts, the lowest rank judges, all read one verdict.
Nothing here touches the data fabric, so a late or missing rank leaves the user's process groups
unharmed. A verdict, once written, is final: a rank that comes too late raises the same error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .backend import Backend
from .errors import AbsentRankError, Fault, ParticipantsError, TransferError, raise_faults
from .wire import canonical, digest, from_wire, to_wire

SLICE_S = 1.0
"""How long to wait before looking whether an awaited rank is busy in another call, in seconds."""

Classes = list[tuple[tuple[int, ...], Any]]
"""The distinct descriptions of one part, each with the ranks that gave it, lowest rank first."""


@dataclass
class Call:
    """One collective call, as seen by one rank."""

    backend: Backend
    ranks: tuple[int, ...]
    what: str
    """The public function's name; participants must all call the same."""
    timeout: float
    channel: str = ""
    """Calls with a channel go on beside the caller's own calls: only ranks of the same channel meet."""

    def __post_init__(self) -> None:
        self.me = self.backend.fabric.rank()
        self._stage = 0
        self._keys: list[str] = []
        if self.alone:
            return
        self._set = self.channel + digest(json.dumps(self.ranks).encode())
        self._number = self._next_number()
        if self.channel:
            return
        here = {"ranks": self.ranks, "set": self._set, "number": self._number, "what": self.what}
        self.backend.control.set(f"now/{self.me}", json.dumps(here).encode())

    def _next_number(self) -> int:
        """The number of this call among those of these ranks.

        A rank that was absent once may have left out the call rather than be late for it. It has been told; now it
        passes over the calls that ended without it, else it would be one call behind for ever.
        """
        counters = self._memory("calls")
        number: int = counters.get(self._set, 0) + 1
        if self._memory("absent").pop(self._set, False):
            while self.backend.control.get(f"{self._set}/{number}/1/verdict", 0.0) is not None:
                number += 1
        counters[self._set] = number
        return number

    @property
    def alone(self) -> bool:
        """Whether nobody else takes part."""
        return len(self.ranks) == 1

    @property
    def leader(self) -> int:
        """The lowest participant, who judges."""
        return self.ranks[0]

    def describe(self, faults: Sequence[Fault], parts: Mapping[str, Any]) -> dict[str, Classes]:
        """Exchange descriptions (JSON-able, by part) among all ranks.

        Returns the distinct descriptions of each part; only digests travel where all are equal.
        Raises one error on all ranks if any has a fault.
        """
        if self.alone:
            raise_faults(faults, self.what)
            return {name: [(self.ranks, value)] for name, value in parts.items()}
        texts = {name: canonical(value) for name, value in parts.items()}
        mine = {name: digest(text) for name, text in texts.items()}
        verdict = self._meet(faults, mine)
        self._forget_last_call()
        result = {}
        for name, groups in verdict["parts"].items():
            result[name] = [
                (tuple(ranks), self._fetch(key, ranks, groups, texts[name], mine[name], parts[name]))
                for key, ranks in groups
            ]
        return result

    def compare(self, digests: Mapping[str, str]) -> dict[str, list[tuple[int, ...]]]:
        """By name, the ranks that posted it, those with equal digests together. For few names."""
        if self.alone:
            return {name: [self.ranks] for name in digests}
        verdict = self._meet((), digests)
        return {name: [tuple(ranks) for _, ranks in groups] for name, groups in verdict["parts"].items()}

    def ready(self, faults: Sequence[Fault] = ()) -> None:
        """Wait until all ranks are ready to write; raises one error on all if any has a fault."""
        if self.alone:
            raise_faults(faults, self.what)
        else:
            self._meet(faults, {})

    def gather(self, faults: Sequence[Fault], value: Any) -> dict[int, Any]:
        """All ranks' values (JSON-able) on the leader, nothing on the others. Raises one error on all if any has a
        fault."""
        if self.alone:
            raise_faults(faults, self.what)
            return {self.me: value}
        name = f"{self._set}/{self._number}/{self._stage + 1}/value"
        self._post(f"{name}/{self.me}", to_wire(canonical(value)))
        self._meet(faults, {})
        self._forget_last_call()
        if self.me != self.leader:
            return {}
        found = {}
        for rank in self.ranks:
            data = self.backend.control.get(f"{name}/{rank}", self.timeout)
            if data is None:
                raise AbsentRankError(f"{self.what}: rank {rank} agreed but was lost before it sent its part")
            found[rank] = from_wire(data)
        return found

    def finish(self, error: Exception | None) -> None:
        """Tell all ranks how the writing went; raises `TransferError` on all if it failed on any."""
        if self.alone:
            if error is not None:
                raise self._lost(f"rank {self.me}: {type(error).__name__}: {error}") from error
            return
        faults = [] if error is None else [Fault(self.me, "TransferError", f"{type(error).__name__}: {error}")]
        try:
            verdict = self._meet(faults, {}, raise_at_once=False)
        except (AbsentRankError, TransferError) as lost:
            raise self._lost(str(lost)) from (error or lost)
        if verdict["faults"]:
            raise self._lost("; ".join(f"rank {rank}: {text}" for rank, _, text in verdict["faults"])) from error

    def _lost(self, text: str) -> TransferError:
        return TransferError(
            f"{self.what} was interrupted while it wrote: {text}. The objects given may hold old and new values "
            "mixed; load them again"
        )

    def _fetch(self, key: str, ranks: Sequence[int], groups: Sequence[Any], text: bytes, mine: str, value: Any) -> Any:
        """The description named `key`; its lowest holder publishes it if others need it."""
        name = f"{self._prefix}/part/{key}"
        if key == mine:
            if ranks[0] == self.me and len(groups) > 1:
                self._post(name, to_wire(text))
            return value
        found = self.backend.control.get(name, self.timeout)
        if found is None:
            raise AbsentRankError(f"{self.what}: rank {ranks[0]} agreed but was lost before it sent its description")
        return from_wire(found)

    # -- one meeting ------------------------------------------------------------------------------

    def _meet(self, faults: Sequence[Fault], parts: Mapping[str, str], raise_at_once: bool = True) -> Any:
        self._stage += 1
        self._prefix = f"{self._set}/{self._number}/{self._stage}"
        post = {"what": self.what, "faults": [[f.rank, f.kind, f.text] for f in faults], "parts": parts}
        self._post(f"{self._prefix}/{self.me}", json.dumps(post).encode())
        deadline = time.monotonic() + self.timeout
        if self.me == self.leader:
            self._judge(deadline)
        verdict = self._verdict(deadline)
        if verdict.get("sets"):
            counters = self._memory("calls")
            for name, number in verdict["calls"].items():  # both calls are over, also for who made only one of them
                counters[name] = max(counters.get(name, 0), number)
            raise ParticipantsError(verdict["sets"])
        if verdict.get("absent"):
            if self.me in verdict["ranks"]:
                self._memory("absent")[self._set] = True
            raise AbsentRankError(verdict["absent"])
        if raise_at_once:
            raise_faults([Fault(*fault) for fault in verdict["faults"]], verdict["what"])
        return verdict

    def _memory(self, name: str) -> dict[str, Any]:
        notes: dict[str, Any] = self.backend.control.memory().setdefault(name, {})
        return notes

    def _post(self, key: str, value: bytes) -> None:
        self.backend.control.set(key, value)
        self._keys.append(key)

    def _judge(self, deadline: float) -> None:
        posts = {}
        for rank in self.ranks:
            found = self._wait(f"{self._prefix}/{rank}", rank, deadline)
            if found is None:
                return  # somebody decided already, or this rank will in `_verdict`
            posts[rank] = json.loads(found)
        self._decide(self._prefix, judge(posts))

    def _decide(self, prefix: str, verdict: Any) -> None:
        """Write the verdict of a meeting unless another rank was first."""
        if self.backend.control.add(f"{prefix}/lock", 1) == 1:
            self._keys += [f"{prefix}/lock", f"{prefix}/verdict"]
            self.backend.control.set(f"{prefix}/verdict", json.dumps(verdict).encode())

    def _verdict(self, deadline: float) -> Any:
        key = f"{self._prefix}/verdict"
        found = self._wait(key, self.leader, deadline)
        if found is None:
            absent = [r for r in self.ranks if self.backend.control.get(f"{self._prefix}/{r}", 0.0) is None]
            if absent:
                text = (
                    f"{self.what}: of the participating ranks {list(self.ranks)}, {_names(absent)} did not make the "
                    f"call within {self.timeout:g} s. If only some of these are meant to take part, name them with "
                    "ranks="
                )
                self._decide(self._prefix, {"absent": text, "ranks": absent})
            found = self.backend.control.get(key, max(self.timeout, SLICE_S))
        if found is None:
            raise AbsentRankError(f"{self.what}: rank {self.leader} was lost before it gave the verdict")
        return json.loads(found)

    def _wait(self, key: str, rank: int, deadline: float) -> bytes | None:
        """The value of `key`, which `rank` writes; None at the deadline or when a verdict came first."""
        control = self.backend.control
        while True:
            left = deadline - time.monotonic()
            found = control.get(key, max(0.0, min(SLICE_S, left)))
            if found is not None or left <= 0:
                return found
            if control.get(f"{self._prefix}/verdict", 0.0) is not None and not key.endswith("/verdict"):
                return None
            self._check_sets(rank)

    def _check_sets(self, rank: int) -> None:
        """If `rank` waits for this rank in a call with another set of ranks, neither can ever go on."""
        if self.channel or (found := self.backend.control.get(f"now/{rank}", 0.0)) is None:
            return
        there = json.loads(found)
        number = self._memory("calls").get(there["set"], 0)
        if there["set"] == self._set or self.me not in there["ranks"] or there["number"] <= number:
            return
        if self.backend.control.get(f"{there['set']}/{there['number']}/1/verdict", 0.0) is not None:
            return  # that call is over
        first, second = sorted(((tuple(self.ranks), self.what), (tuple(there["ranks"]), there["what"])))
        text = (
            f"the ranks disagree about who takes part: {first[1]} is called for {list(first[0])}, "
            f"{second[1]} for {list(second[0])}; pass the same ranks= on all of them"
        )
        verdict = {"sets": text, "calls": {self._set: self._number, there["set"]: there["number"]}}
        self._decide(self._prefix, verdict)
        self._decide(f"{there['set']}/{there['number']}/1", verdict)

    def _forget_last_call(self) -> None:
        """Delete what this rank posted in its last call with these ranks: all have left that call by now."""
        last = self._memory("leftovers")
        for key in last.pop(self._set, ()):
            self.backend.control.delete(key)
        last[self._set] = self._keys


def judge(posts: Mapping[int, Any]) -> Any:
    """The verdict on what the ranks posted: all faults, and per part the distinct digests with their ranks."""
    faults = [fault for rank in sorted(posts) for fault in posts[rank]["faults"]]
    calls: dict[str, list[int]] = {}
    parts: dict[str, dict[str, list[int]]] = {}
    for rank in sorted(posts):
        calls.setdefault(posts[rank]["what"], []).append(rank)
        for name, key in posts[rank]["parts"].items():
            parts.setdefault(name, {}).setdefault(key, []).append(rank)
    what = " or ".join(calls)
    if len(calls) > 1 and not faults:  # a rank whose options were refused can't say what it calls
        said = "; ".join(f"{_names(ranks)}: {what}" for what, ranks in calls.items())
        faults = [[min(posts), "DisagreementError", f"the ranks make different calls: {said}"]]
        what = "the call"
    return {"what": what, "faults": faults, "parts": {name: list(keys.items()) for name, keys in parts.items()}}


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
