"""Fit the constants of the kernel models to samples; deterministic, on grids of round values."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable

import numpy as np
from kernel_evidence import Sample

from primus_ext.cluster import Accelerator, Figure
from primus_ext.cluster_data import load_accelerator
from primus_ext.cost import attention, gemm, memory_bound, tiles
from primus_ext.cost.memory_bound import traffic_seconds

GENERATIONS = {
    "sm_80": ("a100", "a100_pcie"),
    "sm_90": ("h100", "h200"),
    "sm_100": ("b200", "b300", "gb200", "gb300"),
    "gfx942": ("mi300x", "mi325x"),
    "gfx950": ("mi355x",),
}
"""Products that share constants."""
ATTENTION = {
    "forward": {"sm_80": GENERATIONS["sm_80"], "sm_90": GENERATIONS["sm_90"],
                "sm_100": GENERATIONS["sm_100"],
                "gfx9": GENERATIONS["gfx942"] + GENERATIONS["gfx950"]},
    "backward": {"nvidia": GENERATIONS["sm_80"] + GENERATIONS["sm_90"] + GENERATIONS["sm_100"],
                 "gfx9": GENERATIONS["gfx942"] + GENERATIONS["gfx950"]},
}  # fmt: skip
"""Products that share the constants of attention: where few sources vary heads and lengths, more of
them together."""
SUSTAINED = ("simumax_b200",)
"""Sources whose large products ran at the power limit (two populations, 0.64 and 0.49 of the peak,
for like shapes): their matrix products are scored and give ratios of layouts, but no share."""
SHARE_ONLY = ("aic/fastest",)
"""Sources that give shares of their formats and no constants: the fastest of several frameworks is
no kernel's time, and some of them quantise besides."""
GEMM_GRID = {
    "gemm_prologue_k": [16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384],
    "gemm_wave_share": [round(0.05 * i, 2) for i in range(1, 21)],
    "gemm_tile_loss": [0.5, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96],
    "gemm_overhead_s": [round(0.5e-6 * i, 7) for i in range(2, 31)],
}
ATTENTION_GRID = {
    "keys": [16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024],
    "tail": [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5],
}
SHARES = np.round(np.arange(0.1, 1.0, 0.005), 3)
HOLD = 0.002
"""Error that an octave away from its start costs a constant of attention: where rows do not vary
heads and lengths enough to decide, it stays."""
FEW = 3
"""Samples from which a product and format gets a share of its own; fewer where several formats of
the product have them."""

Constants = dict[str, float]
Shares = dict[tuple[str, str], float]
"""By accelerator and number format, or direction with or without a head dimension."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What one generation's samples of one family say."""

    constants: Constants
    shares: Shares
    error: float
    """Mean over sources of the mean of |ln(modelled / measured)|."""
    rows: dict[str, int]
    """Samples by source."""
    counts: dict[tuple[str, str], str]
    """Where each share is from: its samples by source, in words."""


def weights(samples: list[Sample]) -> np.ndarray:
    """Each source counts the same, whatever its number of rows."""
    count: dict[str, int] = {}
    for s in samples:
        count[s.source] = count.get(s.source, 0) + 1
    return np.array([1.0 / count[s.source] / len(count) for s in samples])


def replaced(accelerator: Accelerator, constants: Constants, **tables: dict) -> Accelerator:
    """An accelerator with other constants and whole tables of figures."""
    model = dict(accelerator.kernel_model)
    model |= {name: Figure(value=value, source="fit") for name, value in constants.items()}
    return dataclasses.replace(accelerator, kernel_model=model, **tables)


def search(
    grid: dict[str, list], start: dict, loss: Callable[[dict], float]
) -> tuple[dict, float]:
    """Coordinate descent on grids, from ``start``, until no step of 1, 2 or 4 places helps."""
    place = {name: values.index(start[name]) for name, values in grid.items()}

    def at(place: dict[str, int]) -> dict:
        return {name: grid[name][i] for name, i in place.items()}

    seen: dict[tuple[int, ...], float] = {}

    def cost(place: dict[str, int]) -> float:
        key = tuple(place.values())
        if key not in seen:
            seen[key] = loss(at(place))
        return seen[key]

    best, moved = cost(place), True
    while moved:
        moved = False
        for name in grid:
            for step in (-4, -2, -1, 1, 2, 4):
                tried = place | {name: place[name] + step}
                if 0 <= tried[name] < len(grid[name]) and cost(tried) < best - 1e-9:
                    place, best, moved = tried, cost(tried), True
    return at(place), best


def _best_shares(
    groups: dict[tuple[str, str], np.ndarray],
    predicted: Callable[[np.ndarray, np.ndarray], np.ndarray],
    measured: np.ndarray, weight: np.ndarray,
) -> tuple[Shares, float]:  # fmt: skip
    """The share of each group that leaves the smallest weighted error, and the error."""
    shares, total = {}, 0.0
    for key, rows in groups.items():
        errors = np.abs(np.log(predicted(rows, SHARES[:, None]) / measured[rows]))
        losses = (errors * weight[rows]).sum(axis=1)
        at = int(np.argmin(np.round(losses / weight[rows].sum(), 9)))
        shares[key] = float(SHARES[at])
        total += float(losses[at])
    return shares, total


def fit_gemm(samples: list[Sample], generation: str) -> Fit:
    """Constants and shares of dense forward products, then the rates of the other layouts."""
    names = GENERATIONS[generation]
    dense = [s for s in samples if s.accelerator in names and s.family == "gemm"]
    fitted = [s for s in dense if s.source not in SUSTAINED and s.ops[0].attr("layout") == "tn"]
    parts = [gemm.parts_of(s.ops[0]) for s in fitted]
    measured = np.array([s.seconds for s in fitted])
    weight = weights(fitted) * np.array([1e-6 if s.source in SHARE_ONLY else 1.0 for s in fitted])
    groups: dict[tuple[str, str], list[int]] = {}
    for i, s in enumerate(fitted):
        groups.setdefault((s.accelerator, s.number_format), []).append(i)
    index = {key: np.array(rows) for key, rows in groups.items()}
    bases = {name: load_accelerator(name) for name in {s.accelerator for s in fitted}}
    peak = np.array([bases[s.accelerator].peak_flops[s.number_format].value for s in fitted])
    memory = np.array([traffic_seconds(bases[s.accelerator], s.ops[0].bytes) for s in fitted])
    cache: dict[tuple, np.ndarray] = {}

    def busy(at: Constants) -> np.ndarray:
        key = tuple(at[n] for n in ("gemm_prologue_k", "gemm_wave_share", "gemm_tile_loss"))
        if key not in cache:
            changed = {name: replaced(a, at) for name, a in bases.items()}
            cache[key] = np.array(
                [tiles.busy_flops(changed[s.accelerator], p)
                 for s, p in zip(fitted, parts, strict=True)])  # fmt: skip
        return cache[key]

    def solve(at: Constants) -> tuple[Shares, float]:
        compute = busy(at) / peak

        def predicted(rows: np.ndarray, share: np.ndarray) -> np.ndarray:
            sharpness = gemm.OVERLAP
            both = (compute[rows] / share) ** sharpness + memory[rows] ** sharpness
            return both ** (1 / sharpness) + at["gemm_overhead_s"]

        return _best_shares(index, predicted, measured, weight)

    start = {"gemm_prologue_k": 128, "gemm_wave_share": 0.5, "gemm_tile_loss": 4,
             "gemm_overhead_s": 3e-6}  # fmt: skip
    found, error = search(GEMM_GRID, start, lambda at: solve(at)[1])
    shares = {k: v for k, v in solve(found)[0].items() if _enough(k, index)}
    layouts = _layout_rates(dense, found, shares)
    return Fit(found | layouts, shares, error, _rows(fitted), _counts(fitted, index))


def _enough(key: tuple[str, str], index: dict[tuple[str, str], np.ndarray]) -> bool:
    """Rows of one format, or single ones of several formats that confirm each other."""
    return len(index[key]) >= FEW or sum(
        len(rows) for (name, _), rows in index.items() if name == key[0] and len(rows) < FEW
    ) >= FEW  # fmt: skip


def _counts(
    samples: list[Sample], index: dict[tuple[str, str], np.ndarray]
) -> dict[tuple[str, str], str]:
    return {key: in_words(_rows(samples[i] for i in rows)) for key, rows in index.items()}


def in_words(rows: dict[str, int]) -> str:
    """``aic/vllm 160, azure 8``."""
    return ", ".join(f"{source} {count}" for source, count in rows.items())


def _rows(samples: Iterable[Sample]) -> dict[str, int]:
    count: dict[str, int] = {}
    for s in samples:
        count[s.source] = count.get(s.source, 0) + 1
    return dict(sorted(count.items()))


def _layout_rates(dense: list[Sample], constants: Constants, shares: Shares) -> Constants:
    """How much slower sources found the other layouts than the forward's, beside the model.

    Within a source, so that its clock cancels: median of measured over modelled.
    """
    found: dict[str, list[float]] = {"nn": [], "nt": []}
    for source in sorted({s.source for s in dense}):
        misses: dict[str, list[float]] = {}
        for s in dense:
            if s.source == source and s.ops[0].flops >= 2**36:
                share = shares.get((s.accelerator, s.number_format))
                if share is not None:
                    base = replaced(
                        load_accelerator(s.accelerator),
                        constants | {"gemm_layout_nn": 1.0, "gemm_layout_nt": 1.0},
                        gemm_efficiency={s.number_format: Figure(value=share, source="")},
                    )
                    modelled = gemm.price(base, s.ops[0]).seconds
                    misses.setdefault(s.ops[0].attr("layout"), []).append(s.seconds / modelled)
        for layout in ("nn", "nt"):
            if len(misses.get(layout, [])) >= FEW and len(misses.get("tn", [])) >= FEW:
                found[layout].append(
                    statistics.median(misses["tn"]) / statistics.median(misses[layout]))
    return {f"gemm_layout_{k}": round(statistics.median(v), 3) for k, v in found.items() if v}


def fit_attention(samples: list[Sample], names: tuple[str, ...], direction: str) -> Fit:
    """Extra keys, tail and shares of one direction of fused attention on some products."""
    family = f"attention_{direction}"
    used = [s for s in samples if s.accelerator in names and s.family == family]
    if not used:
        return Fit({}, {}, 0.0, {}, {})
    bases = {name: load_accelerator(name) for name in {s.accelerator for s in used}}
    others = [sum(memory_bound.price(bases[s.accelerator], op).seconds for op in s.ops[1:])
              for s in used]  # fmt: skip
    measured = np.array(
        [max(s.seconds - o, s.seconds / 2) for s, o in zip(used, others, strict=True)])
    standard = [s.ops[0].attr("dim_qk") == attention.STANDARD for s in used]
    weight = weights(used) * (np.where(standard, 1.0, 1e-6) if any(standard) else 1.0)
    shared = np.array([s.ops[0].attr("kv_heads") < s.ops[0].attr("heads") for s in used])
    groups: dict[tuple[str, str], list[int]] = {}
    for i, s in enumerate(used):
        dim = s.ops[0].attr("dim_qk")
        key = direction if dim == attention.STANDARD else f"{direction}/{dim}"
        groups.setdefault((s.accelerator, key), []).append(i)
    index = {key: np.array(rows) for key, rows in groups.items()}
    peak = np.array([bases[s.accelerator].peak_flops["bf16"].value for s in used])
    memory = np.array([traffic_seconds(bases[s.accelerator], s.ops[0].bytes) for s in used])
    launch = np.array([bases[s.accelerator].kernel_launch_s.value for s in used])
    gqa = _gqa(used, direction)

    def solve(at: Constants) -> tuple[Shares, float]:
        constants = {f"attention_keys_{direction}": at["keys"],
                     f"attention_tail_{direction}": at["tail"]}  # fmt: skip
        changed = {name: replaced(a, constants) for name, a in bases.items()}
        busy = np.array([sum(attention.busy_flops(changed[s.accelerator], s.ops[0])) for s in used])
        compute = busy / peak / np.where(shared, gqa, 1.0)

        def predicted(rows: np.ndarray, share: np.ndarray) -> np.ndarray:
            sharpness = attention.OVERLAP
            both = (compute[rows] / share) ** sharpness + memory[rows] ** sharpness
            return both ** (1 / sharpness) + launch[rows]

        return _best_shares(index, predicted, measured, weight)

    start = {"keys": 256, "tail": 0.3}
    found, _ = search(ATTENTION_GRID, start, lambda at: solve(at)[1] + HOLD * sum(
        abs(math.log2(at[name] / start[name])) for name in start))
    error = solve(found)[1]
    constants = {f"attention_keys_{direction}": found["keys"],
                 f"attention_tail_{direction}": found["tail"]}  # fmt: skip
    if direction == "backward":
        constants["attention_gqa_backward"] = gqa
    return Fit(constants, solve(found)[0], error, _rows(used), _counts(used, index))


def _gqa(used: list[Sample], direction: str) -> float:
    """Rate with shared key heads over that without, where a source has both of one shape."""
    if direction == "forward":
        return 1.0
    ratios = []
    for source in sorted({s.source for s in used}):
        rates: dict[tuple, dict[bool, list[float]]] = {}
        for s in used:
            op = s.ops[0]
            if s.source == source and op.attr("seq_q") >= 4096:
                shape = (s.accelerator, op.attr("seq_q"), op.attr("dim_qk"), op.attr("causal"))
                shares = op.attr("kv_heads") < op.attr("heads")
                rates.setdefault(shape, {}).setdefault(shares, []).append(op.flops / s.seconds)
        ratios += [statistics.median(r[True]) / statistics.median(r[False])
                   for r in rates.values() if len(r) == 2]  # fmt: skip
    return round(statistics.median(ratios), 3) if len(ratios) >= FEW else 1.0
