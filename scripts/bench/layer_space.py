"""CPU time of recording the layer space of Mixtral-8x22B on 32 GPUs, in seconds and units.

    python scripts/bench/layer_space.py --sample 30

15 (tp, cp) x 15 (ep, etp) x 3 recompute modes = 675 parallel shapes of one layer, each recorded at
the four points that its functions of microbatch and sequence are solved from.  A unit is the CPU
time of the fixed pure-Python loop of ``cold_projection.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cold_projection import unit_s

STAGES, GPUS = 3, 32
"""A middle stage of three holds the layer alone."""
SEQ = 2048
POINTS = [[1, SEQ], [2, SEQ], [1, 2 * SEQ], [3, 3 * SEQ]]
ARGUMENTS = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --bf16 "
    "--transformer-impl transformer_engine --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --use-distributed-optimizer --num-layers 3 "
    "--pipeline-model-parallel-size 3 --seq-length 65536 --max-position-embeddings 65536 "
    "--micro-batch-size 1 --global-batch-size 96 --vocab-size 32768 --hidden-size 6144 "
    "--ffn-hidden-size 16384 --num-attention-heads 48 --group-query-attention "
    "--num-query-groups 8 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss"
)  # Mixtral-8x22B: huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json
DEVICE = {
    "name": "h100", "compute_capability": [9, 0], "total_memory": 80 * 2**30,
    "multi_processor_count": 132, "warp_size": 32,
}  # fmt: skip
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)


def shapes() -> list[dict[str, Any]]:
    """All 675."""
    degrees = (1, 2, 4, 8)
    pairs = [(a, b) for a, b in itertools.product(degrees, degrees) if a * b <= GPUS]
    return [
        {
            "pp_rank": 1,
            "points": POINTS,
            "arguments": {
                "tensor_model_parallel_size": tp, "context_parallel_size": cp,
                "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp,
                "sequence_parallel": tp > 1, **recompute,
            },
        }
        for (tp, cp), (ep, etp), recompute in itertools.product(pairs, pairs, RECOMPUTE)
    ]  # fmt: skip


def record(asked: list[dict[str, Any]], processes: int, folder: Path) -> list[dict[str, Any]]:
    """Record the shapes with so many processes."""
    request = {
        "module": "primus_ext.frameworks.megatron.gpt_program", "args": ARGUMENTS.split(),
        "cwd": str(folder), "device": DEVICE, "world_size": STAGES * GPUS, "gpus_per_node": 8,
        "frameworks": ["primus_ext.frameworks.megatron"], "shapes": asked,
        "result": str(folder / "answer.json"), "processes": processes,
    }  # fmt: skip
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    subprocess.run(
        [sys.executable, "-m", "primus_ext.emulate.bootstrap", str(path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads((folder / "answer.json").read_text())["traces"]


def main() -> int:
    """Record and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many neighbouring shapes")
    parser.add_argument("--seed", type=int, default=1, help="which of them")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    asked, before = shapes(), unit_s()
    if options.sample:  # neighbours, since those have sizes in common
        first = random.Random(options.seed).randrange(len(asked) - options.sample)
        asked = asked[first : first + options.sample]
    with tempfile.TemporaryDirectory() as name:
        found = record(asked, options.processes, Path(name))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, unit = used.ru_utime + used.ru_stime, (before + unit_s()) / 2
    seconds = [s for trace in found for s in trace.get("cpu_seconds", [])]
    refused = [trace["refused"] for trace in found if "refused" in trace]
    print(
        f"{len(found)} shapes ({len(refused)} refused), {len(seconds)} recordings: {cpu:.1f} s CPU "
        f"= {cpu / unit:.0f} units; a recording {statistics.median(seconds):.3f} s = "
        f"{statistics.median(seconds) / unit:.0f} units at the median, {max(seconds):.2f} s at most"
    )
    for words in sorted(set(refused)):
        print(f"refused: {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
