"""A warm candidate of ours beside Calculon and SimuMax, in CPU milliseconds and units.

    python scripts/bench/peers.py [--calculon CLONE] [--simumax CLONE] [--site FOLDER] [--trace]

The case is Llama-3-70B on 64 GPUs: tp 4, pp 4, dp 4, 32 microbatches of one sequence of 8192.  Ours
is projected from recorded traces, with everything that follows from them kept as a search keeps it:
the same candidate again, and one whose number of microbatches changes from candidate to candidate.
The others are run from clones of their public sources (github.com/calculon-ai/calculon,
github.com/MooreThreads/SimuMax), each in a process of its own; ``--site`` is a folder with what
SimuMax imports (pandas, sympy, tabulate, graphviz, matplotlib, tqdm).  ``--trace`` adds SimuMax's
own timeline, which takes minutes.  A unit is the CPU time of the fixed pure-Python loop of
``cold_projection.py``, timed before and after each case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cold_projection import unit_s

REPO = Path(__file__).resolve().parents[2]
REPEATS = 15
MICROBATCHES = 32
_ARGUMENTS = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 128256 --micro-batch-size 1 "
    f"--global-batch-size {4 * MICROBATCHES} --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 4 --sequence-parallel --overlap-grad-reduce "
    "--overlap-param-gather"
)


def report(name: str, work: Callable[[], object], repeats: int = REPEATS, warm: int = 1) -> None:
    """Print the median CPU time of some runs; the ``warm`` ones before are not counted."""
    before, times = unit_s(), []
    for index in range(warm + repeats):
        start = time.process_time()
        work()
        if index >= warm:
            times.append(time.process_time() - start)
    unit, seconds = (before + unit_s()) / 2, statistics.median(times)
    print(f"{name}: {seconds * 1e3:.2f} ms, {seconds / unit:.2f} units", flush=True)


def ours() -> None:
    """Candidates and the timeline of this package."""
    from primus_ext import trace_io
    from primus_ext.cluster_data import load_cluster
    from primus_ext.project import compose
    from primus_ext.project.kept import Kept
    from primus_ext.report import step_timeline
    from tests.emulation import emulate

    with tempfile.TemporaryDirectory() as folder:
        answer = emulate(Path(folder), 64, _ARGUMENTS)
        plan = trace_io.plan_from_plain(answer["plan"])
        traces = trace_io.traces_from_plain(answer["traces"])
        cluster = load_cluster("h100", 8, 8)
        kept = Kept(cluster)
        plans = [
            dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, gbs=4 * count))
            for count in range(MICROBATCHES - 15, MICROBATCHES + 17)
        ]

        def candidates(asked: list[Any]) -> Callable[[], object]:
            turn = itertools.cycle(asked)
            return lambda: compose.project(next(turn), traces, cluster, mode="simulate", kept=kept)

        def cold() -> object:
            return compose.project(plan, traces, cluster, mode="simulate")

        report("ours, the same candidate again", candidates([plan]), 20 * REPEATS, 5)
        report("ours, 17 to 48 microbatches in turn", candidates(plans), 320, len(plans))
        report("ours, nothing kept (allocations replayed)", cold, 5)
        timeline = compose.timeline(plan, traces, cluster)
        report("ours, timeline.json", lambda: step_timeline.write(timeline, Path(folder)))
    code = ("import time; s = time.process_time(); import primus_ext.project.compose; "
            "print(time.process_time() - s)")  # fmt: skip
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             check=True, cwd=REPO).stdout)
        for _ in range(5)
    ]  # fmt: skip
    print(f"ours, import of composition: {statistics.median(took):.2f} s CPU", flush=True)


def calculon(clone: Path) -> None:
    """Calculon as its search calls it, and with its logger silenced."""
    sys.path.insert(0, str(clone))
    llm = importlib.import_module("calculon.llm")
    system_of = importlib.import_module("calculon.system").System
    files = importlib.import_module("calculon.io")
    system = system_of(files.read_json_file(str(clone / "systems" / "h100_80g_nvl8.json")))
    # its decoder has two matrices in an MLP: 1.5 times the width has the parameters of three
    app = llm.Llm.Application({
        "hidden": 8192, "feedforward": 43008, "seq_size": 8192, "attn_heads": 64,
        "attn_size": 128, "num_blocks": 80,
    })  # fmt: skip
    execution = llm.Llm.Execution.from_json({
        "num_procs": 64, "tensor_par": 4, "pipeline_par": 4, "data_par": 4, "tensor_par_net": 0,
        "pipeline_par_net": 1, "data_par_net": 1, "batch_size": 4 * MICROBATCHES,
        "microbatch_size": 1, "datatype": "float16", "fused_activation": True,
        "attention_type": "multihead", "activation_recompute": "full",
        "pipeline_interleaving": 1, "optimizer_sharding": True, "tensor_par_comm_type": "rs_ag",
        "tensor_par_overlap": "none", "seq_par_ag_redo": False, "data_par_overlap": True,
        "weight_offload": False, "activations_offload": False, "optimizer_offload": False,
        "training": True,
    })  # fmt: skip

    def candidate(level: int) -> Callable[[], object]:
        def run() -> object:
            model = llm.Llm(app, logging.Logger("sub", level))
            model.compile(system, execution)
            model.run(system)
            return model.get_stats_json(False)

        return run

    report("Calculon, as its search calls it", candidate(logging.NOTSET))
    report("Calculon, logger silenced", candidate(logging.CRITICAL), 5 * REPEATS)


def simumax(clone: Path, interleaving: int, trace: bool) -> None:
    """SimuMax: configure, build, estimate, cost and memory of one candidate."""
    sys.path.insert(0, str(clone))
    config = importlib.import_module("simumax.core.config")
    perf_of = importlib.import_module("simumax.core.perf_llm").PerfLLM
    folder = clone / "configs"
    plain = json.loads((folder / "strategy" / "tp4_pp1_dp2_mbs1.json").read_text())
    plain |= {
        "world_size": 64, "pp_size": 4, "seq_len": 8192, "micro_batch_num": MICROBATCHES,
        "interleaving_size": interleaving, "enable_recompute": False, "pp_comm_async": False,
    }  # fmt: skip

    def candidate() -> Any:
        perf = perf_of()
        with contextlib.redirect_stdout(io.StringIO()):
            perf.configure(
                strategy_config=config.StrategyConfig.init_from_dict(dict(plain)),
                model_config=config.ModelConfig.init_from_config_file(
                    str(folder / "models" / "llama3-70b.json")
                ),
                system_config=config.SystemConfig.init_from_config_file(
                    str(folder / "system" / "b200_bf16_ceperm.json")
                ),
            )
            perf.run_estimate()
            perf.analysis_mem()
            perf.analysis_cost()
        return perf

    name = f"SimuMax, {interleaving} chunk{'s' if interleaving > 1 else ''} a rank"
    report(name, candidate, 7)
    if trace:
        perf = candidate()
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            start = time.process_time()
            perf.simulate(out)
            took = time.process_time() - start
        print(f"{name}, its timeline: {took:.0f} s CPU", flush=True)


def main() -> int:
    """Run the cases, each tool in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--simumax", type=Path)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--only", choices=("ours", "calculon", "simumax", "simumax-vpp"))
    asked = parser.parse_args()
    cases = {
        "ours": ours,
        "calculon": lambda: calculon(asked.calculon),
        "simumax": lambda: simumax(asked.simumax, 1, asked.trace),
        "simumax-vpp": lambda: simumax(asked.simumax, 5, False),
    }
    if asked.only:
        if asked.site:
            sys.path.insert(0, str(asked.site))
        cases[asked.only]()
        return 0
    names = ["ours", *["calculon"] * bool(asked.calculon)]
    names += ["simumax", "simumax-vpp"] * bool(asked.simumax)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    runs = [
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], env=environment,
                       check=False)
        for name in names
    ]  # fmt: skip
    return max(run.returncode for run in runs)


if __name__ == "__main__":
    sys.exit(main())
