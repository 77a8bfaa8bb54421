"""Parametric traces against fresh recordings at random points, as a table.

    python scripts/parametric_check.py --points 1000 --seed 7 --out parametric_check.md

For random parallel shapes, recompute modes and recipes of a dense, a mixture-of-experts and a
multi-latent-attention layer: solved from a few recordings, then compared at random (mbs, seq) with
what recording that very point gives: every op with all its numbers, order, phase and module, every
allocation and free, saved and peak bytes.  Points that a condition refuses are counted apart: the
product records them.  Every recording must also hold what equality can't see: FLOPs of matrix
products by closed form, and a module for every byte that is saved for the backward.

With ``--state FILE`` shapes that were checked before are not recorded again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

from primus_ext import parametric
from primus_ext.parametric import Condition, NotParametric, ParametricChunks, Recording
from primus_ext.trace import Family

PROGRAM = "primus_ext.frameworks.megatron.gpt_program"
DEVICE = {
    "name": "h100", "compute_capability": [9, 0], "total_memory": 80 * 2**30,
    "multi_processor_count": 132, "warp_size": 32,
}  # fmt: skip
COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --bf16 "
    "--transformer-impl transformer_engine --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --use-distributed-optimizer --num-layers 3 "
    "--pipeline-model-parallel-size 3 --seq-length 1024 --max-position-embeddings 65536 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 1023 "
    "--make-vocab-size-divisible-by 128 --hidden-size 512 --ffn-hidden-size 1408 "
    "--num-attention-heads 8 "
)
GQA = "--group-query-attention --num-query-groups 4 "
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 704 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
)
MODELS = {
    "dense": GQA,
    "moe": GQA + EXPERTS,
    "mla": (
        "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 128 --qk-head-dim 64 "
        "--qk-pos-emb-head-dim 32 --v-head-dim 64 " + EXPERTS
    ),
}
WORLD, BASE = 24, 1024
"""Ranks (three stages of eight) and the unit of the sequence length, in tokens."""
POINTS = ((1, BASE), (2, BASE), (1, 2 * BASE), (3, 3 * BASE))
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
}  # fmt: skip
PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8 tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8 blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


BATCH = 12
"""Shapes that one process records."""
BAD = ("different", "FLOPs differ", "bytes without module")


def shape(draw: random.Random, model: str) -> dict[str, Any]:
    """A random legal shape of eight ranks a stage."""
    tp, cp = draw.choice([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (8, 1), (1, 4)])
    ep, etp = (1, 1) if model == "dense" else draw.choice([(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)])
    recompute = draw.choice(list(RECOMPUTE))
    precision = draw.choice([*PRECISION, "bf16"])
    if model == "mla":
        tp, cp = min(tp, 4), 1
    arguments = {
        "tensor_model_parallel_size": tp, "context_parallel_size": cp,
        "sequence_parallel": tp > 1, "global_batch_size": 8 * 3,
        **RECOMPUTE[recompute], **PRECISION[precision],
    }  # fmt: skip
    if model != "dense":
        arguments |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    name = f"{model} tp{tp} cp{cp} ep{ep} etp{etp}, recompute {recompute}, {precision}"
    return {"name": name, "arguments": arguments, "pp_rank": 1}


def point(draw: random.Random, asked: dict[str, Any]) -> tuple[int, int]:
    """A random microbatch and sequence length, most of them aligned, that the shape can run.

    With FP8 the tokens of a rank are a multiple of 16: Transformer Engine takes no other tensors.
    """
    arguments = asked["arguments"]
    split = arguments["tensor_model_parallel_size"] * arguments["context_parallel_size"]
    while True:
        unit = draw.choice([BASE, BASE, 128, 16])
        mbs, seq = draw.randint(1, 16), unit * draw.randint(1, 8 * BASE // unit)
        if "fp8" not in arguments or mbs * seq % (16 * split) == 0:
            return mbs, seq


def run(model: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recordings of the shapes, from one process."""
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "module": PROGRAM, "args": (COMMON + MODELS[model]).split(), "cwd": folder,
            "device": DEVICE, "world_size": WORLD, "gpus_per_node": 8, "shapes": asked,
            "frameworks": ["primus_ext.frameworks.megatron"], "result": f"{folder}/answer.json",
        }  # fmt: skip
        path = Path(folder, "request.json")
        path.write_text(json.dumps(request))
        ended = subprocess.run(
            [sys.executable, "-m", "primus_ext.emulate.bootstrap", str(path)],
            capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        answer = json.loads(Path(folder, "answer.json").read_text())
    if answer["status"] != "ok":
        raise SystemExit(f"{model}: {answer['message']}\n{ended.stderr[-2000:]}")
    return answer["traces"]


def judge(asked: dict[str, Any], found: dict[str, Any]) -> Counter[str]:
    """How many check points of one shape are equal, differ, or were refused."""
    checks = len(asked["points"]) - len(POINTS)
    if "refused" in found:
        return Counter({f"shape refused: {found['refused'][:90]}": checks})
    recordings = [parametric.from_plain(r) for r in found["recordings"]]
    conditions = [Condition(Fraction(*share), m, r) for share, m, r in found["conditions"]]
    result: Counter[str] = Counter()
    for recording, saved in zip(recordings, found["saved_by_module"], strict=True):
        even = all(condition.holds(*recording.point) for condition in conditions)
        if even and flops(recording) != closed_form(asked, *recording.point):
            result["FLOPs differ"] += 1
        if sum(saved.values()) != recording.memory.saved_bytes or "" in saved:
            result["bytes without module"] += 1
    try:
        chunks = ParametricChunks(recordings[: len(POINTS)], conditions)
    except NotParametric as error:
        return result + Counter({f"shape not parametric: {str(error)[:90]}": checks})
    for fresh in recordings[len(POINTS) :]:
        try:
            same = chunks.of(fresh.point[0]).recording(*fresh.point) == fresh
            result["equal" if same else "different"] += 1
        except NotParametric:
            result["to be recorded"] += 1
    return result


def flops(recording: Recording) -> int:
    """Of the matrix products, dense and grouped."""
    families = (Family.GEMM, Family.GROUPED_GEMM)
    return sum(op.flops for op, _, _ in recording.calls if op.family in families)


def closed_form(asked: dict[str, Any], mbs: int, seq: int) -> Fraction:
    """FLOPs of the matrix products of one rank: twice weights times tokens, three or four times.

    Args:
        asked: A shape.
        mbs: Sequences.
        seq: Tokens of each.
    """
    arguments, model = asked["arguments"], asked["name"].partition(" ")[0]
    granularity = arguments.get("recompute_granularity")
    passes = 8 if granularity == "full" else 6
    tokens = Fraction(mbs * seq, arguments["context_parallel_size"])
    tokens /= arguments["tensor_model_parallel_size"]
    hidden, heads, groups, dim = 512, 8, 4, 64
    attention = hidden * dim * (heads + 2 * groups) + heads * dim * hidden
    if model == "mla":  # projections down to the ranks and up, and the output
        attention = hidden * 192 + 192 * heads * (64 + 32)
        attention += hidden * (128 + 32) + 128 * heads * (64 + 64) + heads * 64 * hidden
    if model == "dense":
        again = 8 if granularity == "selective" else passes  # the MLP is recomputed
        return tokens * (passes * attention + again * 3 * hidden * 1408)
    return tokens * passes * (attention + hidden * 8 + 2 * 3 * hidden * 704)


def checked(model: str, asked: list[dict[str, Any]], state: Path | None) -> list[Counter[str]]:
    """Verdicts on shapes, from the state file where it has them."""
    known: dict[str, dict[str, int]] = {}
    if state is not None and state.exists():
        known = dict(json.loads(line) for line in state.read_text().splitlines())
    for start in range(0, len(asked), BATCH):
        batch = [one for one in asked[start : start + BATCH] if json.dumps(one) not in known]
        for one, found in zip(batch, run(model, batch) if batch else [], strict=True):
            known[json.dumps(one)] = dict(judge(one, found))
            if state is not None:
                with state.open("a") as file:
                    file.write(json.dumps([json.dumps(one), known[json.dumps(one)]]) + "\n")
    return [Counter(known[json.dumps(one)]) for one in asked]


def main() -> int:
    """Check, write the table, and return 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--per-shape", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--state", type=Path, help="verdicts so far, a line a shape")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draw, lines, total = random.Random(options.seed), [], Counter()
    for model in options.models:
        count = max(1, options.points // len(options.models) // options.per_shape)
        asked = [shape(draw, model) for _ in range(count)]
        for one in asked:
            one["points"] = [*POINTS, *(point(draw, one) for _ in range(options.per_shape))]
        for one, result in zip(asked, checked(model, asked, options.state), strict=True):
            total += result
            lines.append(f"| {one['name']} | {', '.join(f'{k}: {v}' for k, v in result.items())} |")
    table = ["| layer | points |", "| --- | --- |", *lines, "", f"Total: {dict(total)}", ""]
    sys.stdout.write("\n".join(table))
    if options.out:
        options.out.write_text("\n".join(table))
    return min(sum(total[bad] for bad in BAD), 1)


if __name__ == "__main__":
    sys.exit(main())
