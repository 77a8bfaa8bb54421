"""Parametric traces against fresh recordings at random points, as a table.

    python scripts/parametric_check.py --points 1000 --seed 7 --out parametric_check.md

For random parallel shapes, recompute modes and recipes of a dense, a mixture-of-experts and a
multi-latent-attention layer: solved from a few recordings, then compared at random (mbs, seq) with
what recording that very point gives: every op with all its numbers, order, phase and module, every
allocation and free, saved and peak bytes.  Points that a condition refuses are counted apart.
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
from primus_ext.parametric import Condition, NotParametric, ParametricChunks

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


def point(draw: random.Random) -> tuple[int, int]:
    """A random microbatch and sequence length, most of them aligned."""
    unit = draw.choice([BASE, BASE, 128, 16])
    return draw.randint(1, 16), unit * draw.randint(1, 8 * BASE // unit)


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


def judge(found: dict[str, Any]) -> Counter[str]:
    """How many check points of one shape are equal, differ, or were refused."""
    if "refused" in found:
        return Counter({f"shape refused: {found['refused'][:90]}": 1})
    recordings = [parametric.from_plain(r) for r in found["recordings"]]
    conditions = [Condition(Fraction(*share), m, r) for share, m, r in found["conditions"]]
    base, checks = recordings[: len(POINTS)], recordings[len(POINTS) :]
    try:
        chunks = ParametricChunks(base, conditions)
    except NotParametric as error:
        return Counter({f"shape not parametric: {str(error)[:90]}": len(checks)})
    result: Counter[str] = Counter()
    for fresh in checks:
        try:
            same = chunks.of(fresh.point[0]).recording(*fresh.point) == fresh
            result["equal" if same else "different"] += 1
        except NotParametric:
            result["to be recorded"] += 1
    return result


def main() -> int:
    """Check, write the table, and return how many points differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--per-shape", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draw, lines, total = random.Random(options.seed), [], Counter()
    for model in options.models:
        count = max(1, options.points // len(options.models) // options.per_shape)
        asked = [shape(draw, model) for _ in range(count)]
        for one in asked:
            one["points"] = [*POINTS, *(point(draw) for _ in range(options.per_shape))]
        for one, found in zip(asked, run(model, asked), strict=True):
            result = judge(found)
            total += result
            lines.append(f"| {one['name']} | {', '.join(f'{k}: {v}' for k, v in result.items())} |")
    table = ["| layer | points |", "| --- | --- |", *lines, "", f"Total: {dict(total)}", ""]
    sys.stdout.write("\n".join(table))
    if options.out:
        options.out.write_text("\n".join(table))
    return min(total["different"], 1)


if __name__ == "__main__":
    sys.exit(main())
