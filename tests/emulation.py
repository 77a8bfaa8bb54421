"""Run a program in the virtual world from a test and get its traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

H100 = {
    "name": "h100",
    "compute_capability": [9, 0],
    "total_memory": 80 * 2**30,
    "multi_processor_count": 132,
    "warp_size": 32,
}
GPT = "primus_ext.frameworks.megatron.gpt_program"
COMMON = [
    "--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--lr", "1e-4",
    "--bf16", "--transformer-impl", "transformer_engine", "--swiglu", "--disable-bias-linear",
    "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights",
    "--position-embedding-type", "rope", "--attention-dropout", "0", "--hidden-dropout", "0",
    "--use-distributed-optimizer",
]  # fmt: skip


def emulate(
    tmp_path: Path, world_size: int, args: str, common: list[str] = COMMON, **request: Any
) -> dict[str, Any]:
    """The answer of one emulation of the built-in GPT program.

    Args:
        tmp_path: Where request and answer lie.
        world_size: Ranks of the target.
        args: Megatron arguments beside ``common``.
        common: The others.
        request: Further keys of the request.
    """
    result = tmp_path / "answer.json"
    result.unlink(missing_ok=True)
    request = {
        "module": GPT,
        "args": [*common, *args.split()],
        "cwd": str(tmp_path),
        "device": H100,
        "world_size": world_size,
        "gpus_per_node": min(8, world_size),
        "frameworks": ["primus_ext.frameworks.megatron"],
        "result": str(result),
        **request,
    }
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request))
    run = subprocess.run(
        [sys.executable, "-m", "primus_ext.emulate.bootstrap", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.exists(), run.stderr[-3000:]
    answer = json.loads(result.read_text())
    answer["stderr"] = run.stderr
    return answer


def traces(tmp_path: Path, world_size: int, args: str, **request: Any) -> list[dict[str, Any]]:
    """Traces of one emulation that must succeed."""
    answer = emulate(tmp_path, world_size, args, **request)
    assert answer["status"] == "ok", (answer, answer["stderr"][-3000:])
    return answer["traces"]


def ops_of(trace: dict[str, Any], phase: str | None = None) -> list[dict[str, Any]]:
    """Every op of the microbatch of all chunks, repeated as often as it runs."""
    found = []
    for chunk in trace["chunks"]:
        for segment in chunk["segments"]:
            calls = segment["forward"] + segment["backward"]
            chosen = [trace["ops"][c["op"]] for c in calls if phase in (None, c["phase"])]
            found += chosen * segment["count"]
    return found
