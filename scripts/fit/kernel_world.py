"""All constants of all accelerators from a set of samples: fits, and what stands in for no rows."""

from __future__ import annotations

import dataclasses
import functools
import statistics

from kernel_evidence import Sample
from kernel_fit import (
    ATTENTION,
    GENERATIONS,
    Fit,
    Shares,
    fit_attention,
    fit_gemm,
    in_words,
    replaced,
)

from primus_ext.cluster import Accelerator, Figure
from primus_ext.cluster_data import load_accelerator

STANDS_IN = {"a100_pcie": "a100", "h200": "h100", "h100": "h200", "b300": "b200", "gb200": "b200",
             "gb300": "b300", "mi325x": "mi300x", "mi300x": "mi325x",
             "a100": "a100_pcie", "b200": "gb200"}  # fmt: skip
"""Whose share a product has for which there are no rows."""
REFERENCE = 4096
"""Keys of the middle row of a causal sequence of 8192, at which directions are compared."""
Found = dict[str, tuple[float, str]]
"""A value and where it is from, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """Fits by generation, and by group of products that share constants of attention."""

    gemm: dict[str, Fit]
    attention: dict[tuple[str, str], Fit]
    """By direction and group."""


def generation_of(accelerator: str) -> str:
    """Whose constants an accelerator has."""
    return next(g for g, names in GENERATIONS.items() if accelerator in names)


def is_amd(name: str) -> bool:
    """Vendor of a product."""
    return name.startswith("mi")


class Fitter:
    """Fits that are made once for equal samples."""

    def __init__(self, samples: list[Sample]) -> None:
        """Fit to ``samples`` or to parts of them."""
        self._samples = samples

    @functools.cache  # noqa: B019 - a fitter lives as long as the script
    def world(self, without: str = "") -> World:
        """All fits, leaving one source out."""
        attention = {
            (direction, group): self._fit(f"attention_{direction}", names, without)
            for direction, groups in ATTENTION.items() for group, names in groups.items()
        }  # fmt: skip
        return World({g: self._fit("gemm", names, without) for g, names in GENERATIONS.items()},
                     attention)  # fmt: skip

    def _fit(self, family: str, names: tuple[str, ...], without: str) -> Fit:
        there = {s.source for s in self._samples
                 if s.accelerator in names and s.family == family}  # fmt: skip
        return self._cached(family, names, without if without in there else "")

    @functools.cache  # noqa: B019 - as above
    def _cached(self, family: str, names: tuple[str, ...], without: str) -> Fit:
        kept = [s for s in self._samples if s.source != without and s.family == family]
        if family == "gemm":
            return fit_gemm(kept, generation_of(names[0]))
        return fit_attention(kept, names, family.partition("_")[2])


def share(shares: Shares, name: str, key: str) -> tuple[float, str] | None:
    """The share of a product and key, and whose rows it is from; of its stand-in if it has none."""
    second = STANDS_IN.get(name, name)
    for tried in (name, second, STANDS_IN.get(second, second)):
        if (tried, key) in shares:
            return shares[tried, key], tried
    return None


def _own(fit: Fit, name: str, key: str) -> tuple[float, str] | None:
    """The share of a product and key with the rows that it is from, in words."""
    found = share(fit.shares, name, key)
    if found is None:
        return None
    value, product = found
    stands = "" if product == name else f"as {product}: "
    return value, f"{stands}rows of {fit.counts[product, key]}; mean error {fit.error:.3f}"


def _attention_fit(world: World, direction: str, name: str) -> Fit:
    group = next(g for g, names in ATTENTION[direction].items() if name in names)
    return world.attention[direction, group]


def _vendor_shares(world: World, direction: str, name: str) -> Shares:
    found: Shares = {}
    for (own, _), fit in world.attention.items():
        if own == direction:
            found |= {k: v for k, v in fit.shares.items() if is_amd(k[0]) == is_amd(name)}
    return found


def constants_of(world: World, name: str) -> Found:
    """Constants of an accelerator, each with the sources that they are from."""
    found: Found = {}
    for layout in ("gemm_layout_nn", "gemm_layout_nt"):
        others = [
            f.constants[layout] for g, f in world.gemm.items()
            if layout in f.constants and is_amd(GENERATIONS[g][0]) == is_amd(name)
        ]  # fmt: skip
        rate = min(1.0, round(statistics.median(others), 3)) if others else 1.0
        found[layout] = (rate, "the vendor's other generation" if others else "assumed, no rows")
    for fit in (world.gemm[generation_of(name)], *(
            _attention_fit(world, direction, name) for direction in ("forward", "backward"))):
        origin = f"rows of {in_words(fit.rows)}; mean error {fit.error:.3f}"
        found |= {key: (min(value, 1.0) if "layout" in key else value, origin)
                  for key, value in fit.constants.items()}  # fmt: skip
    for part in ("keys", "tail"):
        unknown = (256.0 if part == "keys" else 0.3, "where the search starts, no rows")
        ahead = found.get(f"attention_{part}_forward", unknown)
        found.setdefault(f"attention_{part}_forward", ahead)
        found.setdefault(f"attention_{part}_backward", (ahead[0], "as the forward, no rows"))
    found.setdefault("attention_gqa_backward", (1.0, "assumed, no rows"))
    return found


def _backward_ratio(world: World, name: str) -> float:
    """Rate of a backward over that of a forward, the vendor's middle over products with both."""
    ratios = []
    for (product, key), value in _vendor_shares(world, "backward", name).items():
        ahead = _attention_fit(world, "forward", product)
        base = share(ahead.shares, product, "forward")
        if key == "backward" and base:
            keys = [fit.constants[f"attention_keys_{d}"] for d, fit in (
                ("backward", _attention_fit(world, "backward", product)), ("forward", ahead))]
            ratios.append(value / base[0] * (REFERENCE + keys[1]) / (REFERENCE + keys[0]))
    return round(statistics.median(ratios), 3) if ratios else 0.85


def attention_shares(world: World, name: str) -> Found:
    """Shares of fused attention by direction and dimension, each with where it is from."""
    found: Found = {}
    for direction in ATTENTION:
        for key in sorted({k for _, k in _vendor_shares(world, direction, name)}):
            own = _own(_attention_fit(world, direction, name), name, key)
            if own:
                found[key] = own
    if "forward" not in found:
        shares = _vendor_shares(world, "forward", name)
        others = [value for (_, key), value in shares.items() if key == "forward"]
        found["forward"] = (round(statistics.median(others), 3), "the vendor's other products")
    if "backward" not in found:
        ratio = _backward_ratio(world, name)
        value = found["forward"][0] * ratio
        if _attention_fit(world, "backward", name).constants:  # its keys differ from the forward's
            constants = constants_of(world, name)
            keys = [constants[f"attention_keys_{d}"][0] for d in ("backward", "forward")]
            value *= (REFERENCE + keys[0]) / (REFERENCE + keys[1])
        found["backward"] = (round(value, 3), f"{ratio} of the forward, as products with both")
    return _with_dims(world, name, found)


def _with_dims(world: World, name: str, found: Found) -> Found:
    """Head dimensions without rows, by the middle ratio of the vendor's products."""
    for direction in ATTENTION:
        shares = _vendor_shares(world, direction, name)
        for key in sorted({k for _, k in shares if "/" in k} - found.keys()):
            ratios = [v / base[0] for (product, k), v in shares.items()
                      if k == key and (base := share(shares, product, direction))]  # fmt: skip
            if ratios:
                ratio = statistics.median(ratios)
                found[key] = (round(found[direction][0] * ratio, 3),
                              f"{ratio:.2f} of dimension 128, as the vendor's others")  # fmt: skip
    return found


def gemm_shares(world: World, name: str) -> Found:
    """Shares of matrix products by number format, for every format of the product."""
    found: Found = {}
    for key in load_accelerator(name).peak_flops:
        own = _own(world.gemm[generation_of(name)], name, key)
        if own:
            found[key] = own
    for key in load_accelerator(name).peak_flops:
        if key not in found:
            found[key] = _other_format(world, name, key, found)
    return found


def _other_format(world: World, name: str, key: str, found: Found) -> tuple[float, str]:
    """A format without rows: the vendor's middle ratio to bf16, else a like format, else bf16."""
    base = found.get("bf16") or found.get("fp16") or found.get("fp8") or (0.6, "no rows at all")
    ratios = []
    for g, fit in world.gemm.items():
        for (product, other), value in fit.shares.items():
            plain = share(fit.shares, product, "bf16")
            if other == key and plain and is_amd(GENERATIONS[g][0]) == is_amd(name):
                ratios.append(value / plain[0])
    if ratios:
        ratio = statistics.median(ratios)
        return round(base[0] * ratio, 3), f"{ratio:.2f} of bf16, as the vendor's others"
    like = {"fp8_block": "fp8", "mxfp8": "fp8"}.get(key)
    if like in found:
        return found[like][0], f"no rows for this format: the share of {like}"
    return base[0], "no rows for this format: the share of bf16"


def accelerator(world: World, name: str) -> Accelerator:
    """An accelerator with these fits in place of its file's."""

    def figures(found: Found) -> dict[str, Figure]:
        return {key: Figure(value=value, source=place) for key, (value, place) in found.items()}

    return replaced(
        load_accelerator(name),
        {key: value for key, (value, _) in constants_of(world, name).items()},
        gemm_efficiency=figures(gemm_shares(world, name)),
        attention_efficiency=figures(attention_shares(world, name)),
    )
