"""Where each dimension of an op comes from: the batch, the model, or a parallel degree.

An op list is recorded once more with the microbatch doubled and once with the sequence doubled.
A dimension that doubles with one of them is proportional to it; one that does not move is the
model's.  Exponents are read off exactly; nothing is fitted.  A dimension that fits neither keeps
``?``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from primus_ext.plan import Plan
from primus_ext.trace import Op, Segment, TensorSpec

UNKNOWN = "?"
Calls = Sequence[Op]


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Names of a plan's quantities, by value."""

    mbs: int
    seq: int
    fixed: Mapping[int, str]
    """Dimensions that the model and the degrees give."""
    shares: Mapping[Fraction, str]
    """What ``mbs*seq`` may be multiplied with: ``/tp``, ``*topk/tp``, ..."""

    @staticmethod
    def of(plan: Plan, padded_vocab: int) -> Names:
        """Names for one plan; where two quantities have one value both are named."""
        return Names(
            mbs=plan.batch.mbs,
            seq=plan.batch.seq,
            fixed=_fixed(plan, padded_vocab),
            shares=_shares(plan),
        )


def _fixed(plan: Plan, padded_vocab: int) -> dict[int, str]:
    model, par = plan.model, plan.parallelism
    heads, kv, dim = model.num_heads, model.num_kv_heads, model.head_dim
    quantities = [
        ("hidden_size", model.hidden_size),
        ("ffn_hidden_size/tp", Fraction(model.ffn_hidden_size, par.tp)),
        ("2*ffn_hidden_size/tp", Fraction(2 * model.ffn_hidden_size, par.tp)),
        ("heads*head_dim/tp", Fraction(heads * dim, par.tp)),
        ("(heads+2*kv_heads)*head_dim/tp", Fraction((heads + 2 * kv) * dim, par.tp)),
        ("heads/tp", Fraction(heads, par.tp)),
        ("kv_heads/tp", Fraction(kv, par.tp)),
        ("head_dim", dim),
        ("head_dim/2", Fraction(dim, 2)),
        ("padded_vocab/tp", Fraction(padded_vocab, par.tp)),
    ]
    if model.num_experts:
        quantities += [
            ("experts", model.num_experts),
            ("experts/ep", Fraction(model.num_experts, par.ep)),
            ("topk", model.topk),
            ("moe_ffn_hidden_size/etp", Fraction(model.moe_ffn_hidden_size, par.etp)),
            ("2*moe_ffn_hidden_size/etp", Fraction(2 * model.moe_ffn_hidden_size, par.etp)),
        ]
    names: dict[int, str] = {1: "1"}
    for name, value in quantities:
        if value == int(value) and value > 1:
            known = names.get(int(value))
            names[int(value)] = name if known is None else f"{known}|{name}"
    return names


def _shares(plan: Plan) -> dict[Fraction, str]:
    par, topk = plan.parallelism, plan.model.topk
    shares: dict[Fraction, str] = {}
    over = {"": 1, "/cp": par.cp, "/tp": par.tp, "/cp/tp": par.cp * par.tp, "/ep": par.ep}
    for numerator, name in ((1, ""), (topk, "*topk")):
        for suffix, degree in over.items():
            if numerator:
                shares.setdefault(Fraction(numerator, degree), name + suffix)
    return shares


def dimension(base: int, more_mbs: int, more_seq: int, names: Names) -> str:
    """Name of one dimension from its values at (mbs, seq), (2 mbs, seq) and (mbs, 2 seq)."""
    if base == 0:
        return "0"
    by_mbs, by_seq = Fraction(more_mbs, base), Fraction(more_seq, base)
    if (by_mbs, by_seq) == (1, 1):
        return names.fixed.get(base, str(base))
    if by_mbs not in (1, 2) or by_seq not in (1, 2):
        return UNKNOWN
    batch = (["mbs"] if by_mbs == 2 else []) + (["seq"] if by_seq == 2 else [])
    value = (names.mbs if by_mbs == 2 else 1) * (names.seq if by_seq == 2 else 1)
    share = Fraction(base, value)
    known = names.shares.get(share)
    if known is None:
        known = f"*{share}" if share.numerator > 1 else f"/{share.denominator}"
    return "*".join(batch) + known


def label(base: Op, more_mbs: Op, more_seq: Op, names: Names) -> Op | None:
    """``base`` with origins on every tensor, or None if the three are not the same op."""
    if not base.name == more_mbs.name == more_seq.name:
        return None

    def tensors(field: str) -> tuple[TensorSpec, ...] | None:
        triples = zip(getattr(base, field), getattr(more_mbs, field), getattr(more_seq, field),
                      strict=False)  # fmt: skip
        found = []
        for one, two, three in triples:
            if not len(one.shape) == len(two.shape) == len(three.shape):
                return None
            dims = zip(one.shape, two.shape, three.shape, strict=True)
            origins = tuple(dimension(*values, names) for values in dims)
            found.append(dataclasses.replace(one, origins=origins))
        return tuple(found)

    inputs, outputs = tensors("inputs"), tensors("outputs")
    if inputs is None or outputs is None:
        return None
    return dataclasses.replace(base, inputs=inputs, outputs=outputs)


def match(
    segments: Iterable[Segment],
    probes: tuple[Iterable[Segment], Iterable[Segment]],
    ops: Sequence[Op],
    names: Names,
) -> dict[int, Op]:
    """Labelled ops by index, from segments of one kind that run the same ops in the same order.

    Args:
        segments: Segments of the main recording.
        probes: Segments recorded with the microbatch, and with the sequence, doubled.
        ops: Op table that all of them refer to.
        names: Names of the plan's quantities.
    """
    labelled: dict[int, Op] = {}
    tables = [{_structure(s, ops): s for s in probe} for probe in probes]
    for segment in segments:
        structure = _structure(segment, ops)
        twins = [table.get(structure) for table in tables]
        if twins[0] is None or twins[1] is None:
            continue
        for one, two, three in zip(_calls(segment), _calls(twins[0]), _calls(twins[1]),
                                   strict=True):  # fmt: skip
            found = label(ops[one], ops[two], ops[three], names)
            if found is not None:
                labelled.setdefault(one, found)
    return labelled


def covers(probe: Iterable[Segment], segments: Iterable[Segment], ops: Sequence[Op]) -> bool:
    """Whether every one of ``segments`` has one in ``probe`` with the same ops in order."""
    return {_structure(s, ops) for s in segments} <= {_structure(s, ops) for s in probe}


def _calls(segment: Segment) -> list[int]:
    return [c.op for c in (*segment.forward, *segment.backward)]


def _structure(segment: Segment, ops: Sequence[Op]) -> tuple:
    return (segment.kind, tuple(ops[i].name for i in _calls(segment)))
