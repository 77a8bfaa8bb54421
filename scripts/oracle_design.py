#!/usr/bin/env python
"""The covering design of the oracle of memory, ``validation/memory_oracle.yaml``.

``python scripts/oracle_design.py [--check] [--fresh]``: small jobs in which every legal pair of
knob values occurs.  Greedy (after AETG, Cohen et al. 1997): of several random completions of an
uncovered pair the one that covers most new pairs is taken.  The seed is fixed, so the file is the
same everywhere.  What the file holds and is still legal is kept, so that a new value of a knob
does not make every result worthless (``--fresh`` starts anew).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

DESIGN = Path(__file__).resolve().parents[1] / "validation" / "memory_oracle.yaml"
SEED, TRIES = 20, 20
AT_LEAST = 3
"""Configurations that every value of every knob is in."""

Config = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

RECIPE = "--fp8-format {} --fp8-recipe {}"
SELECTIVE = "--recompute-granularity selective --recompute-modules "
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method "
LAYOUT = "--pipeline-model-parallel-layout"
DISTRIBUTED = "--use-distributed-optimizer "
KNOBS: dict[str, dict[str, str]] = {
    "tp": {
        "1": "",
        "2": "--tensor-model-parallel-size 2",
        "2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
        "4 sp": "--tensor-model-parallel-size 4 --sequence-parallel",
    },
    "pipeline": {  # pp, and chunks of a rank
        "1": "",
        "2": "--pipeline-model-parallel-size 2",
        "4": "--pipeline-model-parallel-size 4",
        "2x2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "4x2": "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
    },
    "stages": {"even": "", "first": "", "account": "", "layout": "", "mtp": "--mtp-num-layers 1"},
    "cp": {
        "1": "",
        "2 p2p": "--context-parallel-size 2 --cp-comm-type p2p",
        "2 a2a": "--context-parallel-size 2 --cp-comm-type a2a",
        "2 all_gather": "--context-parallel-size 2 --cp-comm-type all_gather",
    },
    "dp": {"1": "", "2": "", "4": ""},
    "optimizer": {
        "plain": "",
        "plain overlap": "--overlap-grad-reduce",
        "distributed": DISTRIBUTED,
        "overlap grad": DISTRIBUTED + "--overlap-grad-reduce",
        "overlap both": DISTRIBUTED + "--overlap-grad-reduce --overlap-param-gather",
        "precision aware": DISTRIBUTED + "--use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16 --main-params-dtype fp16",
        "muon": "--optimizer muon",
    },
    "weights": {"own copies": "", "gathered in fp8": "--fp8-param-gather"},
    "gradients": {
        "fused": "",
        "unfused": "--no-gradient-accumulation-fusion",
        "reduced in bf16": "--grad-reduce-in-bf16",
    },
    "mlp": {
        "dense": "",
        "grouped": "--moe-grouped-gemm",
        "sequential": "",
        "shared": "--moe-grouped-gemm --moe-shared-expert-intermediate-size 256",
        "dense first": "--moe-grouped-gemm",
    },
    "ep": {
        "-": "",
        "1": "",
        "2": "--expert-model-parallel-size 2",
        "2 etp1": "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    },
    "dispatcher": {
        "-": "",
        "alltoall": "--moe-token-dispatcher-type alltoall",
        "alltoall fused": "--moe-token-dispatcher-type alltoall --moe-permute-fusion",
        "allgather": "--moe-token-dispatcher-type allgather",
    },
    "attention": {
        "mha": "",
        "gqa": "--group-query-attention --num-query-groups 4",
        "mla": "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 "
        "--qk-pos-emb-head-dim 32 --v-head-dim 32",
        "window": "--window-size 32,0",
    },
    "activation": {
        "swiglu": "--swiglu --disable-bias-linear",
        "gelu": "--disable-bias-linear",
        "gelu bias": "",
        "squared relu": "--squared-relu --disable-bias-linear",
    },
    "norm": {"RMSNorm": "--normalization RMSNorm", "LayerNorm": "--normalization LayerNorm"},
    "embeddings": {"untied": "--untie-embeddings-and-output-weights", "tied": ""},
    "positions": {
        "rope": "--position-embedding-type rope",
        "learned": "--position-embedding-type learned_absolute",
    },
    "dropout": {
        "0": "--attention-dropout 0 --hidden-dropout 0",
        "0.1": "--attention-dropout 0.1 --hidden-dropout 0.1",
    },
    "recompute": {
        "none": "",
        "core_attn": SELECTIVE + "core_attn",
        "norms": SELECTIVE + "layernorm",
        "mlp": SELECTIVE,
        "uniform": FULL + "uniform",
        "block": FULL + "block",
    },
    "precision": {
        "bf16": "--bf16",
        "fp32": "",
        "fp8 delayed": "--bf16 " + RECIPE.format("hybrid", "delayed"),
        "fp8 tensorwise": "--bf16 " + RECIPE.format("hybrid", "tensorwise"),
        "fp8 blockwise": "--bf16 " + RECIPE.format("e4m3", "blockwise"),
        "mxfp8": "--bf16 " + RECIPE.format("e4m3", "mxfp8"),
        "nvfp4": "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
    },
    "loss": {
        "unfused": "",
        "fused": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    },
    "vocabulary": {"512": "--vocab-size 512", "odd": "--vocab-size 509"},
    "mbs": {"1": "--micro-batch-size 1", "2": "--micro-batch-size 2"},
    "microbatches": {"fewer": "", "equal": "", "more": ""},
}

COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 "
    "--transformer-impl transformer_engine --hidden-size 256 --ffn-hidden-size 512 "
    "--num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--make-vocab-size-divisible-by 128"
)
GROUPED = ("grouped", "shared", "dense first")
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256"


def degrees(config: Config) -> dict[str, int]:
    """tp, pp, vpp, cp, dp, ep and etp as numbers."""
    tp, cp = int(config["tp"][0]), int(config["cp"][0])
    pp, _, vpp = config["pipeline"].partition("x")
    ep = 1 if config["ep"] in "-1" else 2
    etp = 1 if config["ep"].endswith("etp1") else tp
    return {"tp": tp, "pp": int(pp), "vpp": int(vpp or 1), "cp": cp, "dp": int(config["dp"]),
            "ep": ep, "etp": etp}  # fmt: skip


Rule = tuple[str, tuple[str, ...], Callable[..., bool]]
RULES: list[Rule] = [
    (
        "experts, and they alone, have an expert-parallel degree and a dispatcher",
        ("mlp", "ep", "dispatcher"),
        lambda mlp, ep, dispatcher: (mlp == "dense") == (ep == "-") == (dispatcher == "-")
        and (ep == "-") == (dispatcher == "-"),
    ),
    ("experts, and they alone, have an expert-parallel degree", ("mlp", "ep"),
     lambda mlp, ep: (mlp == "dense") == (ep == "-")),
    ("experts, and they alone, have a dispatcher", ("mlp", "dispatcher"),
     lambda mlp, dispatcher: (mlp == "dense") == (dispatcher == "-")),
    ("experts, and they alone, have a dispatcher", ("ep", "dispatcher"),
     lambda ep, dispatcher: (ep == "-") == (dispatcher == "-")),
    ("Megatron: experts with tensor parallelism need sequence parallelism", ("mlp", "tp"),
     lambda mlp, tp: mlp == "dense" or tp != "2"),
    ("the same", ("ep", "tp"), lambda ep, tp: ep == "-" or tp != "2"),
    ("the same", ("dispatcher", "tp"), lambda d, tp: d == "-" or tp != "2"),
    ("etp 1 differs from etp = tp only with tp > 1", ("ep", "tp"),
     lambda ep, tp: not ep.endswith("etp1") or tp != "1"),
    ("the ranks of a stage must be a multiple of ep * etp", ("ep", "tp", "cp", "dp"),
     lambda ep, tp, cp, dp: ep != "2" or int(cp[0]) * int(dp) % 2 == 0),
    ("one stage can't be uneven", ("pipeline", "stages"),
     lambda pipeline, stages: pipeline != "1" or stages == "even"),
    ("latent attention rotates its own part of the head", ("attention", "positions"),
     lambda attention, positions: attention != "mla" or positions == "rope"),
    ("a2a: the key-value heads of a tensor shard must be a multiple of cp",
     ("attention", "tp", "cp"),
     lambda attention, tp, cp: (attention, tp, cp) != ("gqa", "4 sp", "2 a2a")),
    ("Megatron: interleaving needs as many microbatches as stages", ("pipeline", "microbatches"),
     lambda pipeline, microbatches: "x" not in pipeline or microbatches != "fewer"),
    ("Transformer Engine has no attention over context-parallel ranks in fp32",
     ("cp", "precision"), lambda cp, precision: cp == "1" or precision != "fp32"),
    ("Transformer Engine: a window can't be passed from rank to rank", ("cp", "attention"),
     lambda cp, attention: (cp, attention) != ("2 p2p", "window")),
    ("cuDNN: dropout in a window is left to the unfused attention, which has no cp",
     ("cp", "attention", "dropout"),
     lambda cp, attention, dropout: cp == "1" or attention != "window" or dropout == "0"),
    ("Megatron: shared experts have no biases", ("mlp", "activation"),
     lambda mlp, activation: (mlp, activation) != ("shared", "gelu bias")),
    ("Megatron: biases of experts need etp 1", ("mlp", "activation", "ep", "tp"),
     lambda mlp, activation, ep, tp: mlp == "dense" or activation != "gelu bias" or tp == "1"
     or ep == "2 etp1"),
    ("Megatron: multi-token prediction needs rotary positions", ("stages", "positions"),
     lambda stages, positions: stages != "mtp" or positions == "rope"),
    ("a stage of predictions sends its neighbours' shapes, which virtual peers know for one chunk",
     ("stages", "pipeline"),
     lambda stages, pipeline: stages != "mtp" or pipeline in ("2", "4")),
    ("Megatron: FP8 weights are gathered by the distributed optimizer", ("weights", "optimizer"),
     lambda weights, optimizer: weights == "own copies"
     or optimizer in ("distributed", "overlap grad", "overlap both")),
    ("FP8 weights need an FP8 recipe; that of MXFP8 shares the gradients' buffer",
     ("weights", "precision"),
     lambda weights, precision: weights == "own copies"
     or precision in ("fp8 delayed", "fp8 tensorwise", "fp8 blockwise")),
    ("Megatron: delayed scaling can't recompute norms", ("recompute", "precision"),
     lambda recompute, precision: (recompute, precision) != ("norms", "fp8 delayed")),
]  # fmt: skip
"""Sentence, knobs, and what holds of their values in a configuration that can run."""


RULES_OF = {knob: [r for r in RULES if knob in r[1]] for knob in KNOBS}


def legal(config: Config, changed: str) -> bool:
    """Whether no rule on the knob ``changed`` forbids a (partial) configuration."""
    return all(
        holds(*(config[k] for k in knobs))
        for _, knobs, holds in RULES_OF[changed]
        if all(k in config for k in knobs)
    )


def complete(partial: Config, rng: random.Random) -> Config | None:
    """A random legal completion, None if there is none."""
    if not all(legal(partial, knob) for knob in partial):
        return None
    order = [k for k in KNOBS if k not in partial]
    rng.shuffle(order)

    def fill(config: Config, left: list[str]) -> Config | None:
        if not left:
            return config
        values = list(KNOBS[left[0]])
        rng.shuffle(values)
        for value in values:
            more = {**config, left[0]: value}
            found = fill(more, left[1:]) if legal(more, left[0]) else None
            if found is not None:
                return found
        return None

    return fill(dict(partial), order)


def all_pairs() -> Iterator[Pair]:
    """Every pair of values of two knobs."""
    for (a, ones), (b, others) in itertools.combinations(KNOBS.items(), 2):
        for one, other in itertools.product(ones, others):
            yield (a, one), (b, other)


def pairs_of(config: Config) -> set[Pair]:
    """Pairs that a configuration covers."""
    return set(itertools.combinations(((k, config[k]) for k in KNOBS), 2))


def legal_pairs() -> set[Pair]:
    """Pairs that some legal configuration has."""
    rng, found = random.Random(SEED), set()
    for pair in all_pairs():
        if pair not in found:
            config = complete(dict(pair), rng)
            found |= pairs_of(config) if config else set()
    return found


def design(kept: Sequence[Config] = ()) -> list[Config]:
    """Configurations that cover every legal pair, and every value :data:`AT_LEAST` times.

    Args:
        kept: Configurations to start from; those that a rule forbids are left out.  A knob that
            they don't have yet has its first value.
    """
    rng = random.Random(SEED)
    found = [
        c for c in ({knob: c.get(knob, next(iter(KNOBS[knob]))) for knob in {**KNOBS, **c}}
                    for c in kept)
        if c.keys() == KNOBS.keys() and all(c[k] in KNOBS[k] and legal(c, k) for k in c)
    ]
    missing = legal_pairs().difference(*map(pairs_of, found))
    while missing:
        pair = min(missing)
        candidates = [complete(dict(pair), rng) for _ in range(TRIES)]
        improved = [improve(c, dict(pair), missing) for c in candidates if c]
        found.append(max(improved, key=lambda c: len(pairs_of(c) & missing)))
        missing -= pairs_of(found[-1])
    for knob, values in KNOBS.items():
        for value in values:
            while sum(c[knob] == value for c in found) < AT_LEAST:
                extra = complete({knob: value}, rng)
                assert extra is not None
                found.append(extra)
    return found


def improve(config: Config, fixed: Config, missing: set[Pair]) -> Config:
    """Change one value at a time as long as that covers more."""

    def gain(config: Config, knob: str, value: str) -> int:
        mine, total, before = (knob, value), 0, True
        for other, its in config.items():
            if other == knob:
                before = False
            else:
                total += (((other, its), mine) if before else (mine, (other, its))) in missing
        return total

    best, changed = {knob: config[knob] for knob in KNOBS}, True
    while changed:
        changed = False
        for knob, values in KNOBS.items():
            for value in values if knob not in fixed else ():
                other = {**best, knob: value}
                if gain(best, knob, value) > gain(best, knob, best[knob]) and legal(other, knob):
                    best, changed = other, True
    return best


def layers(config: Config) -> tuple[int, str]:
    """Number of layers and the arguments that say how they are split."""
    size = degrees(config)
    pp, chunks = size["pp"], size["pp"] * size["vpp"]
    how, single = config["stages"], 1 if chunks > 2 else 2
    if how == "first":
        first = 2 * size["vpp"]
        return first + size["vpp"] * (pp - 1), f"--decoder-first-pipeline-num-layers {first}"
    if how == "account":
        return (2 if chunks < 8 else 1) * chunks - 2, (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        )
    if how == "mtp":  # predictions in a stage of their own where there are enough
        inner = "t|" * (chunks - 3)
        return (chunks - 2, f"{LAYOUT} Et|{inner}m|L") if chunks > 2 else (2, f"{LAYOUT} Ett|mL")
    if how == "layout":
        inner = "t|" * (chunks - 2)
        return chunks + 1, f"{LAYOUT} Et|{inner}ttL"
    return single * chunks, ""


def recomputed(config: Config) -> list[str]:
    """Arguments of recomputation; which modules there are depends on the MLP."""
    mlp, words = config["mlp"], [KNOBS["recompute"][config["recompute"]]]
    if config["recompute"] == "mlp":
        words += ["mlp"] if mlp == "dense" else ["moe"] if mlp != "dense first" else ["mlp", "moe"]
    if config["recompute"] == "norms" and mlp in GROUPED:
        words.append("moe_act")
    return words


def arguments(config: Config) -> str:
    """Megatron's arguments of a configuration."""
    size = degrees(config)
    count, split = layers(config)
    words = [COMMON, split, f"--num-layers {count}"]
    words += [values[config[knob]] for knob, values in KNOBS.items() if knob != "recompute"]
    if config["stages"] in ("layout", "mtp"):  # its columns are the chunks
        words = [w.partition(" --num-virtual")[0] for w in words]
    words += recomputed(config)
    if config["mlp"] != "dense":
        words.append(EXPERTS)
    if config["mlp"] in GROUPED and config["activation"] == "gelu bias":
        words.append("--no-bias-dropout-fusion --no-bias-gelu-fusion")
    if config["mlp"] == "dense first":
        words.append(f"--moe-layer-freq ([0]*1+[1]*{count - 1})")
    more = 2 * size["pp"] if size["vpp"] > 1 else size["pp"] + (size["pp"] + 1) // 2
    number = {"fewer": max(1, size["pp"] // 2), "equal": size["pp"], "more": more}
    microbatches = number[config["microbatches"]]
    words.append(f"--global-batch-size {int(config['mbs']) * size['dp'] * microbatches}")
    return " ".join(w for w in words if w)


def entries(kept: Sequence[Config] = ()) -> list[dict[str, Any]]:
    """The design as it is written: id, world, knobs, arguments, least compute capability."""
    found = []
    for number, config in enumerate(design(kept), 1):
        size = degrees(config)
        found.append(
            {
                "id": f"m{number:02}",
                "world": size["tp"] * size["pp"] * size["cp"] * size["dp"],
                "capability": [10, 0] if config["precision"] in ("mxfp8", "nvfp4") else [9, 0],
                "knobs": {knob: config[knob] for knob in KNOBS},
                "args": arguments(config),
            }
        )
    return found


def main() -> None:
    """Write the design, or check that the committed one needs no change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with the file")
    parser.add_argument("--fresh", action="store_true", help="keep no configuration of the file")
    options = parser.parse_args()
    kept = [] if options.fresh else [e["knobs"] for e in yaml.safe_load(DESIGN.read_text())]
    text = "# Made by scripts/oracle_design.py; not to be edited.\n" + yaml.safe_dump(
        entries(kept), sort_keys=False, width=100
    )
    if options.check:
        sys.exit(0 if DESIGN.read_text() == text else f"{DESIGN} is not what the script makes")
    DESIGN.write_text(text)


if __name__ == "__main__":
    main()
