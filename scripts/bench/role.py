"""CPU time and memory of one role of a large job, imports included, in seconds and units.

    python scripts/bench/role.py deepseek --runs 3

A middle pipeline stage of a job of 8,192 ranks is traced for one microbatch by a process of its
own: ``deepseek`` has 16 layers a stage of DeepSeek-V3's sizes (256 experts, multi-latent
attention), ``dense`` has 10 of Llama-70B's.  A unit is the CPU time of the fixed pure-Python loop
of ``cold_projection.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cold_projection import unit_s

WORLD = 8192
COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --bf16 "
    "--transformer-impl transformer_engine --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--micro-batch-size 1 --make-vocab-size-divisible-by 128 --no-check-for-nan-in-loss-and-grad "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native "
)
PROGRAMS = {
    # huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, with 64 layers for 61
    "deepseek": (
        2048,
        "--num-layers 64 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 1 "
        "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*61) "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-dtype fp32 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-4 --moe-grouped-gemm --moe-permute-fusion "
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 64 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4 --seq-length 4096 "
        "--max-position-embeddings 4096 --global-batch-size 16384 --vocab-size 129280",
    ),
    # huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json
    "dense": (
        1024,
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --tensor-model-parallel-size 8 "
        "--sequence-parallel --pipeline-model-parallel-size 8 --seq-length 8192 "
        "--max-position-embeddings 8192 --global-batch-size 1024 --vocab-size 128256",
    ),
}
"""A rank of the second stage, and the arguments of the job."""
DEVICE: dict[str, Any] = {
    "name": "h100", "compute_capability": [9, 0], "total_memory": 80 * 2**30,
    "multi_processor_count": 132, "warp_size": 32,
}  # fmt: skip


def traced(name: str, folder: Path) -> tuple[float, int]:
    """CPU seconds of one trace, and its highest resident bytes (imports included).

    Raises:
        SystemExit: It failed.
    """
    rank, words = PROGRAMS[name]
    request = {
        "module": "primus_ext.frameworks.megatron.gpt_program", "args": (COMMON + words).split(),
        "cwd": str(folder), "device": DEVICE, "world_size": WORLD, "gpus_per_node": 8,
        "frameworks": ["primus_ext.frameworks.megatron"], "ranks": [rank],
        "result": str(folder / "answer.json"),
    }  # fmt: skip
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "primus_ext.emulate.bootstrap", str(path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    before, highest = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    while child.poll() is None:
        highest = max(highest, *(resident(pid) for pid in family(child.pid)), 0)
        time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads((folder / "answer.json").read_text())
    if answer["status"] != "ok":
        raise SystemExit(f"{name}: {answer['message']}")
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return cpu, highest


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    for child in children:
        found += family(int(child))
    return found


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main() -> int:
    """Trace and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=list(PROGRAMS), nargs="?", default="deepseek")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    unit = unit_s()
    with tempfile.TemporaryDirectory() as name:
        found = [traced(options.program, Path(name)) for _ in range(options.runs)]
    unit = (unit + unit_s()) / 2
    cpu, memory = statistics.median(c for c, _ in found), max(m for _, m in found)
    print(
        f"{options.program}, one rank of {WORLD:,}: {cpu:.2f} s CPU = {cpu / unit:,.0f} units "
        f"(median of {options.runs}), {memory / 2**30:.2f} GiB at most in one process"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
