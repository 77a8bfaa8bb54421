"""A job's layers in any parallel shape, at any microbatch and sequence length.

A shape is recorded at a few points, from which the others follow exactly; a point that does not
follow (token counts that experts or quantized blocks don't divide) is recorded itself.  What was
recorded is kept on disk under everything that shapes it, as traces are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from primus_ext import parametric
from primus_ext.parametric import Condition, NotParametric, ParametricChunks, Recording
from primus_ext.runner import child
from primus_ext.runner.trace_cache import TraceCache


class Refused(ValueError):
    """The framework does not allow the shape or the point; the message is its sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One layer (or other model chunk) of the job."""

    arguments: str
    """Megatron arguments by name that differ from the job's, as JSON with sorted keys."""
    mbs: int
    seq: int
    pp_rank: int = 0

    @staticmethod
    def of(arguments: Mapping[str, Any], mbs: int, seq: int, pp_rank: int = 0) -> Wanted:
        """With arguments as a mapping."""
        return Wanted(json.dumps(dict(arguments), sort_keys=True), mbs, seq, pp_rank)

    def at(self, points: Sequence[Sequence[int]]) -> str:
        """The shape at these points, as a request's ``shapes`` has it, in JSON."""
        asked = {
            "arguments": json.loads(self.arguments), "pp_rank": self.pp_rank,
            "points": [list(point) for point in points],
        }  # fmt: skip
        return json.dumps(asked, sort_keys=True)


class LayerRecords:
    """Recordings of one job's layers, from memory, from disk, or from a child process."""

    def __init__(
        self, request: Mapping[str, Any], options: Sequence[str], unit: int, scratch: Path,
        cache: TraceCache | None, progress: child.Progress,
    ) -> None:  # fmt: skip
        """Nothing is recorded yet.

        Args:
            request: The job as the bootstrap is asked for it (``primus_ext.emulate.bootstrap``).
            options: Of the interpreter.
            unit: Sequence length whose multiples every wanted shape divides, in tokens.
            scratch: Folder of this run alone.
            cache: Where recordings are kept, if they are.
            progress: Told how far a child is.
        """
        self._request, self._options, self._scratch = dict(request), options, scratch
        self._cache, self._progress = cache, progress
        self._base = [(1, unit), (2, unit), (1, 2 * unit), (3, 3 * unit)]
        self._known: dict[str, dict[str, Any]] = {}
        self._chunks: dict[str, ParametricChunks | None] = {}
        self.recorded_themselves = 0
        """Points that did not follow from others."""

    def get(self, wanted: Sequence[Wanted]) -> list[Recording]:
        """One recording each: what recording that very point gives.

        Raises:
            Refused: The framework does not allow one of them.
            ChildError: The child failed.
        """
        self._obtain([one.at(self._base) for one in wanted])
        found = [self._instance(one) for one in wanted]
        alone = [w.at([(w.mbs, w.seq)]) for w, r in zip(wanted, found, strict=True) if r is None]
        self._obtain(alone)
        self.recorded_themselves += len(alone)
        return [
            self._recordings(w.at([(w.mbs, w.seq)]))[0] if r is None else r
            for w, r in zip(wanted, found, strict=True)
        ]

    def _instance(self, one: Wanted) -> Recording | None:
        """From the functions of its shape; None if it does not follow."""
        shape = one.at(self._base)
        if shape not in self._chunks:
            try:
                self._chunks[shape] = ParametricChunks(
                    self._recordings(shape), self._conditions(shape)
                )
            except NotParametric:
                self._chunks[shape] = None
        chunks = self._chunks[shape]
        try:
            return None if chunks is None else chunks.of(one.mbs).recording(one.mbs, one.seq)
        except NotParametric:
            return None

    def _recordings(self, shape: str) -> list[Recording]:
        trace = self._known[shape]
        if "refused" in trace:
            raise Refused(trace["refused"])
        return [parametric.from_plain(recording) for recording in trace["recordings"]]

    def _conditions(self, shape: str) -> list[Condition]:
        conditions = self._known[shape]["conditions"]
        return [Condition(Fraction(*share), modulus, why) for share, modulus, why in conditions]

    def _obtain(self, shapes: Sequence[str]) -> None:
        """Have these in memory; what neither memory nor disk has is recorded by one child."""
        missing = []
        for shape in dict.fromkeys(shapes):
            if shape in self._known:
                continue
            entry = self._cache and self._cache.load(self._key(shape), self._scratch)
            if entry:
                self._known[shape] = entry["traces"][0]
            else:
                missing.append(shape)
        if not missing:
            return
        answer = child.run(
            self._asked(missing), self._options, self._scratch, self._scratch / "layers.log",
            self._progress,
        )  # fmt: skip
        for shape, trace in zip(missing, answer["traces"], strict=True):
            self._known[shape] = trace
            if self._cache is not None:
                self._cache.store(self._key(shape), {**answer, "traces": [trace]}, self._scratch)

    def _asked(self, shapes: Sequence[str]) -> dict[str, Any]:
        return {**self._request, "shapes": [json.loads(shape) for shape in shapes]}

    def _key(self, shape: str) -> str:
        assert self._cache is not None
        environment = child.environment(self._scratch)
        return self._cache.key(self._asked([shape]), self._options, environment, self._scratch)
