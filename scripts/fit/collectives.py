"""Fit what collectives reach: ``hydra_conf/collectives/*.yaml`` and ``hydra_conf/fabric/*.yaml``.

    python scripts/fit/collectives.py EVIDENCE.yaml            # write the files
    python scripts/fit/collectives.py EVIDENCE.yaml --check    # fail if a file says otherwise
    python scripts/fit/collectives.py EVIDENCE.yaml --errors validation/collective_errors.md

Needs the optional package ``aiconfigurator-core`` (extra ``tables``).  A constant moves from what
NCCL or RCCL itself says only as far as rows of nccl-tests or rccl-tests make it: the search goes
over fixed grids, and compares the mean of |ln(modelled / measured)|, every source weighing the
same, messages of 1 MiB and more twice and those of 16 MiB to 2 GiB four times.  Nothing here looks
at the step time of any training run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import collective_errors
import numpy as np
import yaml
from collective_errors import LARGE
from collective_rows import Measurement, published, tabled

from primus_ext.cluster import Figure
from primus_ext.cost import collective_tables, collectives
from primus_ext.cost.placement import placement

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATIONS = {
    "ampere": ("a100", "a100_40gb"), "hopper": ("h100", "h200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"), "cdna3": ("mi300x", "mi325x"),
    "cdna4": ("mi350x", "mi355x"),
}  # fmt: skip
"""Accelerators that share links and protocols, and so constants."""
_TOPO = "src/graph/topo.h, over the link's nominal rate"
# What the library itself takes.  Ring: NVLink or xGMI bandwidth of topo.h; nvls: times
# nvlsEfficiency of tuning.cc; the library has no figure for the rest.
PRIORS = {
    "ampere": {"ring": 0.8},
    "hopper": {"ring": 0.824, "nvls": 0.7},
    "blackwell": {"ring": 0.802, "nvls": 0.594},
    "cdna3": {"ring": 0.75},
    "cdna4": {"ring": 0.75},
}
# Figures of the library that a generation without small sizes takes from another one.
AS = {"cdna4": ("cdna3", ("message", "start", "latency", "ramp"))}
# GPUs from which a group spans hosts within one scale-up domain, where there are such.
RACKS = {"blackwell": 9}
FITTED_FABRICS = ("efa", "roce", "tcpxo")
GRIDS = {
    "ring": (0.4, 1.0, 0.005), "nvls": (0.4, 1.0, 0.005), "direct": (0.4, 1.0, 0.005),
    "message": (0.3, 1.0, 0.005), "start": (0.5, 2.0, 0.05), "latency": (0.4, 3.0, 0.05),
    "nvls_start": (1.0, 9.0, 0.1), "ramp": (0.0, 1.0, 0.05), "nic_efficiency": (0.7, 0.96, 0.005),
    "nic_latency_s": (0.0, 100e-6, 1e-6),
}  # fmt: skip
"""First, last and step."""
WORTH = 2e-4
"""Gain below which a constant stays where it is."""
SWEEPS = 6

Constants = dict[str, float]
Ratios = Callable[["Curve"], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """The sizes of one sweep."""

    of: Measurement
    bytes: np.ndarray
    seconds: np.ndarray

    def ratios(self, shares: Constants, fabric: Constants) -> np.ndarray:
        """ln(modelled / measured) of every size."""
        cluster = self.of.cluster
        accelerator = dataclasses.replace(cluster.accelerator, collectives=_figures(shares))
        cluster = dataclasses.replace(cluster, accelerator=accelerator, **_figures(fabric))
        where = placement(cluster, self.of.ranks)
        found = collectives.lines(cluster, self.of.kind, self.of.dtype, where)
        table = np.array([(n.start, n.rate, n.root, n.largest) for n in found])[:, :, None]
        times = table[:, 0] + table[:, 1] * self.bytes + table[:, 2] * np.sqrt(self.bytes)
        times = np.where(self.bytes <= table[:, 3], times, np.inf)
        return np.log(times.min(axis=0) / self.seconds)


def _figures(constants: Constants) -> dict[str, Figure]:
    return {key: Figure(value=value, source="-") for key, value in constants.items()}


def curves(rows: Iterable[Measurement]) -> list[Curve]:
    """Sweeps of the same source, cluster, kind, format and group."""
    found: defaultdict[tuple, list[Measurement]] = defaultdict(list)
    for row in rows:
        key = (row.source, row.accelerator, row.fabric, row.kind, row.dtype, row.usual, row.ranks)
        found[*key, id(row.cluster)].append(row)
    return [
        Curve(
            of=group[0],
            bytes=np.array([row.bytes for row in group], dtype=float),
            seconds=np.array([row.seconds for row in group]),
        )
        for group in found.values()
    ]


def generation_of(accelerator: str) -> str:
    """The entry of :data:`GENERATIONS`; '' for one that has none."""
    return next((name for name, members in GENERATIONS.items() if accelerator in members), "")


def weights(sizes: np.ndarray) -> np.ndarray:
    """How much points count: most where the layers and buckets of training lie."""
    busy = (sizes >= 2**24) & (sizes <= 2**31)
    return np.where(busy, 4.0, np.where(sizes >= LARGE, 2.0, 1.0))


def loss(found: Iterable[Curve], ratios: Callable[[Curve], np.ndarray]) -> float:
    """Mean |ln ratio| of a source's points, by :func:`weights`; mean over sources."""
    by_source: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for curve in found:
        counts = weights(curve.bytes)
        errors_here = np.abs(ratios(curve)) * counts
        by_source[curve.of.source].append((float(errors_here.sum()), float(counts.sum())))
    means = [sum(e for e, _ in v) / sum(w for _, w in v) for v in by_source.values()]
    return statistics.fmean(means)


def _grid(key: str) -> list[float]:
    first, last, step = GRIDS[key.split("/")[0]]
    return [round(first + i * step, 9) for i in range(round((last - first) / step) + 1)]


def search(
    start: Constants, measure: Callable[[Constants], float], fixed: Iterable[str] = ()
) -> tuple[Constants, set[str]]:
    """Move one constant at a time to the best place on its grid until none moves.

    Args:
        start: Where to start.
        measure: What is to become small.
        fixed: Constants that stay.

    Returns:
        The constants, and those that some row depends on.
    """
    best, at, decided = measure(start), dict(start), set()
    for _ in range(SWEEPS):
        moved = False
        for key in (key for key in start if key not in fixed):
            losses = {value: measure({**at, key: value}) for value in _grid(key)}
            value = min(losses, key=lambda v: (losses[v], v))
            if max(losses.values()) - min(losses.values()) > WORTH:
                decided.add(key)
            if losses[value] < best - WORTH:
                best, moved = losses[value], True
                at[key] = value
        if not moved:
            break
    return at, decided


def _of_generation(name: str, found: list[Curve]) -> list[Curve]:
    return [
        c for c in found
        if c.of.usual and not c.of.fabric and c.of.accelerator in GENERATIONS[name]
    ]  # fmt: skip


def _of_fabric(name: str, found: list[Curve]) -> list[Curve]:
    return [c for c in found if c.of.usual and c.of.fabric == name]


def fit_generation(
    name: str, found: list[Curve], others: dict[str, Constants]
) -> tuple[Constants, set[str], list[Curve]]:
    """The constants of one generation from runs inside scale-up domains."""
    mine = _of_generation(name, found)
    ring = PRIORS[name]["ring"]
    start = {**PRIORS[name], "direct": ring, "message": ring,
             "start": 1.0, "latency": 1.0, "ramp": 0.3}  # fmt: skip
    if "nvls" in start:
        start["nvls_start"] = 1.0
    if name in RACKS:
        start[f"nvls/{RACKS[name]}"] = start["nvls"]
    base, fixed = AS.get(name, ("", ()))
    start |= {key: others[base][key] for key in fixed}
    if not mine:
        return start, set(), mine
    at, decided = search(start, lambda at: loss(mine, lambda c: c.ratios(at, {})), fixed)
    return at, decided, mine


def fit_fabric(
    name: str, found: list[Curve], shares: dict[str, Constants]
) -> tuple[Constants, set[str], list[Curve]]:
    """Efficiency and latency of one network from runs that cross it."""
    mine = _of_fabric(name, found)
    start = {"nic_efficiency": 0.955, "nic_latency_s": 0.0}
    if not mine:
        return start, set(), mine
    at, decided = search(
        start,
        lambda at: loss(mine, lambda c: c.ratios(shares[generation_of(c.of.accelerator)], at)),
    )
    return at, decided, mine


class _Fits:
    """Fits with one source left out; what the source has no part in is fitted once."""

    def __init__(self, found: list[Curve]) -> None:
        self._found = found
        self._known: dict[tuple, Constants] = {}

    def without(self, source: str) -> tuple[dict[str, Constants], dict[str, Constants]]:
        """Constants of all generations and of all fitted networks."""
        left = [curve for curve in self._found if curve.of.source != source]
        shares: dict[str, Constants] = {}
        for name in GENERATIONS:
            key = (name, len(_of_generation(name, left)), str(shares.get(AS.get(name, ("",))[0])))
            if key not in self._known:
                self._known[key] = fit_generation(name, left, shares)[0]
            shares[name] = self._known[key]
        fabrics: dict[str, Constants] = {}
        for name in FITTED_FABRICS:
            key = (name, len(_of_fabric(name, left)), str(shares))
            if key not in self._known:
                self._known[key] = fit_fabric(name, left, shares)[0]
            fabrics[name] = self._known[key]
        return shares, fabrics


def errors(found: list[Curve]) -> str:
    """The table of errors with each source left out."""
    fits = _Fits(found)

    def without(source: str) -> Ratios:
        shares, fabrics = fits.without(source)
        return lambda curve: curve.ratios(
            shares[generation_of(curve.of.accelerator)], fabrics.get(curve.of.fabric, {})
        )

    def tabled_ratios(curve: Curve, formula: Ratios) -> np.ndarray:
        of = curve.of
        known = collective_tables.curve(of.accelerator, of.kind, of.dtype, len(of.ranks))
        if of.source == "aic" or of.fabric or not known:
            return formula(curve)

        def model(size: float) -> float:
            one = Curve(of, np.array([size]), np.array([1.0]))
            return float(np.exp(formula(one)[0]))

        times = [collective_tables.seconds(known, int(size), model) for size in curve.bytes]
        return np.log(np.array(times) / curve.seconds)

    return collective_errors.write(collective_errors.collect(found, without, tabled_ratios))


def _text(head: str, at: Constants, source: Callable[[str], str]) -> str:
    table = {key: {"value": value, "source": source(key)} for key, value in at.items()}
    body = yaml.safe_dump(table, sort_keys=False, width=96, allow_unicode=True)
    return f"# {head}  Written by scripts/fit/collectives.py.\n{body}"


def _source(mine: list[Curve], error: float, key: str, decided: set[str], library: str) -> str:
    if key not in decided:
        return f"no rows decide it: {library}"
    rows = sum(len(c.bytes) for c in mine)
    names = ", ".join(sorted({c.of.source for c in mine}))
    return (f"fitted by scripts/fit/collectives.py to {rows} rows of {names}; "
            f"median error {error:.1%}")  # fmt: skip


def files(found: list[Curve]) -> dict[Path, str]:
    """Every file that the fit writes, with its content."""
    written: dict[Path, str] = {}
    shares: dict[str, Constants] = {}
    for name in GENERATIONS:
        at, decided, mine = fit_generation(name, found, shares)
        shares[name] = at
        error = float(np.median(np.abs(np.concatenate([c.ratios(at, {}) for c in mine]))))
        library = f"as {AS[name][0]}" if name in AS else f"NVIDIA/nccl 5067397 {_TOPO}"
        written[ROOT / "hydra_conf" / "collectives" / f"{name}.yaml"] = _text(
            f"What collectives reach on {', '.join(GENERATIONS[name])}.", at,
            lambda key, m=mine, e=error, d=decided, n=library: _source(m, e, key, d, n),
        )  # fmt: skip
    for name in FITTED_FABRICS:
        at, decided, mine = fit_fabric(name, found, shares)
        ratios = [c.ratios(shares[generation_of(c.of.accelerator)], at) for c in mine]
        error = float(np.median(np.abs(np.concatenate(ratios))))
        written[ROOT / "hydra_conf" / "fabric" / f"{name}.yaml"] = _text(
            f"Network {name}.", at,
            lambda key, m=mine, e=error, d=decided: _source(m, e, key, d, "as InfiniBand"),
        )  # fmt: skip
    return written


def main() -> int:
    """Write the files, or the table of errors; with ``--check`` return 1 where a file differs."""
    parser = argparse.ArgumentParser(description="Fit what collectives reach")
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a file differs")
    parser.add_argument("--errors", type=Path, help="write errors with each source left out")
    options = parser.parse_args()
    if not collective_tables.available():
        print("aiconfigurator-core is not installed: pip install 'primus_ext[tables]'")
        return 2
    found = curves([*published(options.evidence), *tabled()])
    if options.errors:
        options.errors.write_text(errors(found))
        return 0
    differing = [p for p, text in files(found).items() if not _agrees(p, text, options.check)]
    for path in differing:
        print(f"{path.relative_to(ROOT)} {'differs' if options.check else 'written'}")
    return 1 if options.check and differing else 0


def _agrees(path: Path, text: str, check: bool) -> bool:
    """Whether a file holds this text; it does afterwards, unless only checked."""
    same = path.is_file() and path.read_text() == text
    if not same and not check:
        path.write_text(text)
    return same


if __name__ == "__main__":
    sys.exit(main())
