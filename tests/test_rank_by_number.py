"""Any rank of worlds up to 16,384: its process groups, three ways.

The groups of an emulated rank (Megatron's parallel state in a world where only this rank's groups
are made), those that Megatron's own generator lists for the whole world, and plain arithmetic.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.training import ROOT, environment

# What is held fixed in a group, and what varies: dimensions of the dense and the expert layout.
DENSE = {
    "tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("dp",), "dp_cp": ("cp", "dp"),
    "tp_cp": ("tp", "cp"), "tp_dp_cp": ("tp", "cp", "dp"), "mp": ("tp", "pp"),
}  # fmt: skip
EXPERT = {"ep": ("ep",), "etp": ("tp",), "tp_ep": ("tp", "ep"), "expert_dp": ("dp",)}

SCRIPT = """
import json, random, sys
from types import SimpleNamespace
jobs = json.load(sys.stdin)
sys.modules["transformer_engine"] = None  # not needed for process groups
from primus_ext.emulate import virtual_cuda, virtual_world
virtual_cuda.install(virtual_cuda.DeviceProfile("h100", (9, 0), 2**36, 132, 8))
import torch.distributed as dist
from megatron.core import parallel_state
from primus_ext.frameworks.megatron import memory, roles
new_group = dist.new_group

def generated(job):
    def generator(tp, cp, ep, dp):
        return parallel_state.RankGenerator(
            tp=tp, ep=ep, dp=dp, pp=job["pp"], cp=cp, order=job["order"]
        )
    def holding(lists):
        (mine,) = [ranks for ranks in lists if job["rank"] in ranks]
        return mine
    dense = generator(job["tp"], job["cp"], 1, job["dp"])
    expert = generator(job["etp"], 1, job["ep"], job["expert_dp"])
    tokens = {"dp_cp": "dp-cp", "tp_cp": "tp-cp", "tp_dp_cp": "tp-dp-cp", "mp": "tp-pp"}
    found = {n: holding(dense.get_ranks(tokens.get(n, n))) for n in job["dense"]}
    tokens = {"etp": "tp", "tp_ep": "tp-ep", "expert_dp": "dp"}
    return found | {n: holding(expert.get_ranks(tokens.get(n, n))) for n in job["expert"]}

answers = []
for job in jobs:
    dist.new_group = new_group
    virtual_world.join(job["rank"], job["world"], 8)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job["tp"], pipeline_model_parallel_size=job["pp"],
        context_parallel_size=job["cp"], expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"], order=job["order"],
        create_gloo_process_groups=False,
    )
    args = SimpleNamespace(
        use_tp_pp_dp_mapping=job["order"].endswith("pp-dp"), world_size=job["world"],
        tensor_model_parallel_size=job["tp"], context_parallel_size=job["cp"],
        pipeline_model_parallel_size=job["pp"],
    )
    pp_rank = roles.pp_rank(job["rank"], args)
    answers.append({
        "emulated": memory.all_groups(), "generated": generated(job), "pp_rank": pp_rank,
        "first_of_stage": roles.global_rank(pp_rank, args),
        "true_pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
    })
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
print(json.dumps(answers))
"""


def layouts(seed: int, count: int, largest: int) -> list[dict]:
    """Random legal layouts, and a random rank of each."""
    import random

    draw, found = random.Random(seed), []
    while len(found) < count:
        tp, cp, pp = (draw.choice((1, 2, 3, 4, 8)) for _ in range(3))
        dp = draw.choice((1, 2, 4, 6, 16, 64, 128))
        world = tp * cp * pp * dp
        etp, ep = draw.choice((1, tp)), draw.choice((1, 2, 4, 8, 32))
        if world > largest or world % (etp * ep * pp):
            continue
        order = draw.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
        expert_dp = world // (etp * ep * pp)
        if order.endswith("pp-dp") and pp > 1 and (etp * ep) != (tp * cp):
            continue  # Megatron: the dense and the expert layout need the same pipelines
        found.append(
            {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "etp": etp, "ep": ep, "order": order,
             "expert_dp": expert_dp, "world": world, "rank": draw.randrange(world),
             "dense": list(DENSE), "expert": list(EXPERT)}
        )  # fmt: skip
    return found


def by_arithmetic(job: dict) -> dict[str, list[int]]:
    """A rank is a number whose digits, in the layout's order, are its places."""
    found = {}
    for names, sizes in (
        (DENSE, {"tp": job["tp"], "cp": job["cp"], "ep": 1, "dp": job["dp"], "pp": job["pp"]}),
        (EXPERT, {"tp": job["etp"], "cp": 1, "ep": job["ep"], "dp": job["expert_dp"],
                  "pp": job["pp"]}),
    ):  # fmt: skip
        stride, digits = 1, {}
        for name in job["order"].split("-"):
            digits[name] = (stride, sizes[name])
            stride *= sizes[name]
        for group, varying in names.items():
            ranks = {job["rank"]}
            for name in varying:
                step, size = digits[name]
                ranks = {
                    r + (i - r // step % size) * step for r in ranks for i in range(size)
                }
            found[group] = sorted(ranks)
    pipeline = found["pp"]
    if job["rank"] in (pipeline[0], pipeline[-1]):
        found["embd"] = sorted({pipeline[0], pipeline[-1]})
    return found


@pytest.mark.parametrize(
    ("seed", "count", "largest"),
    [(1, 30, 256), pytest.param(2, 170, 16384, marks=pytest.mark.slow)],
)
def test_groups_of_random_ranks(seed: int, count: int, largest: int) -> None:
    jobs = layouts(seed, count, largest)
    if largest == 16384:
        assert max(job["world"] for job in jobs) > 8192
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], input=json.dumps(jobs), text=True,
        capture_output=True, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    for job, answer in zip(jobs, json.loads(run.stdout), strict=True):
        expected = by_arithmetic(job)
        emulated = {name: answer["emulated"].get(name) for name in expected}
        assert emulated == expected, job
        assert answer["emulated"].get("embd") == expected.get("embd"), job  # first and last stage
        generated = {name: sorted(ranks) for name, ranks in answer["generated"].items()}
        assert generated == {name: expected[name] for name in generated}, job
        pipeline = expected["pp"]
        assert answer["pp_rank"] == answer["true_pp_rank"] == pipeline.index(job["rank"])
        first = by_arithmetic(job | {"rank": 0})["pp"][answer["pp_rank"]]
        assert answer["first_of_stage"] == first
