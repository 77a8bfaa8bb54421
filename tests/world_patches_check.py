"""Compares our replacements with Megatron's own functions; run in a process apart, prints JSON.

Megatron can only be imported after the stand-in of Transformer Engine is installed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
from typing import Any

import torch

from primus_ext.emulate import registry
from tests.te_world import install


def groups() -> dict[str, int]:
    """How many splits of how many shapes agree."""
    from primus_ext.frameworks.megatron import world_patches

    original = importlib.import_module(
        "megatron.core.parallel_state"
    ).generate_masked_orthogonal_rank_groups
    random.seed(5)
    agree = checked = 0
    for _ in range(60):
        sizes = [random.randint(1, 4) for _ in range(random.randint(1, 5))]
        world = int(torch.tensor(sizes).prod())
        for mask in itertools.product([True, False], repeat=len(sizes)):
            ours = world_patches.orthogonal_groups(world, sizes, mask)
            agree += ours == original(world, sizes, list(mask))
            checked += 1
    return {"agree": agree, "checked": checked}


def shards() -> list[bool]:
    """For each shard, whether it is the same memory as Megatron's."""
    from primus_ext.frameworks.megatron.world_patches import Shards

    theirs = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    buffer = torch.arange(24)
    pairs = zip(Shards(buffer, 6), theirs.shard_buffer(buffer, 6), strict=True)
    return [a.data_ptr() == b.data_ptr() and a.tolist() == b.tolist() for a, b in pairs]


def missing() -> list[str]:
    """Patches of group ``megatron`` that replace a name which this release lacks."""
    from primus_ext.frameworks.megatron import entry  # noqa: F401  (declares)

    found = []
    for item in registry.registered("megatron"):
        try:
            registry.verify(item, importlib.import_module(item.module))
        except registry.PatchError as error:
            found.append(str(error))
    return [*found, *([] if registry.registered("megatron") else ["none is declared"])]


def main() -> None:
    install((9, 0))
    answers: dict[str, Any] = {f.__name__: f() for f in (groups, shards, missing)}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
