"""Functional collectives, which sharded tensors (DTensor) issue; they return a new tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from primus_ext.observe.specs import dtype_name, spec
from primus_ext.trace import Collective, CollectiveKind, Family, Op

if TYPE_CHECKING:
    from primus_ext.observe.recorder import Recorder

# op -> kind, and whether the whole buffer is the output (else the input)
_OPS = {
    "all_reduce": (CollectiveKind.ALL_REDUCE, False),
    "all_reduce_": (CollectiveKind.ALL_REDUCE, False),
    "all_gather_into_tensor": (CollectiveKind.ALL_GATHER, True),
    "reduce_scatter_tensor": (CollectiveKind.REDUCE_SCATTER, False),
    "all_to_all_single": (CollectiveKind.ALL_TO_ALL, False),
    "broadcast": (CollectiveKind.BROADCAST, False),
}
WAIT = "_c10d_functional.wait_tensor"


def classify(
    name: str, args: tuple, produced: list[torch.Tensor], recorder: Recorder
) -> Op | None:
    """The collective behind one dispatch; None for a wait and for a group of one rank.

    Raises:
        UnknownCollective: the op is not in the table.
    """
    from primus_ext.observe.classify_c10d import UnknownCollective, named_group

    if name == WAIT:
        return None
    short = name.rpartition(".")[2]
    if short not in _OPS:
        raise UnknownCollective(f"collective {name} is not known to the recorder")
    kind, gathered = _OPS[short]
    # the group's name is the last argument that is a string
    torch_name = next(a for a in reversed(args) if isinstance(a, str))
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    group = named_group(resolve(torch_name), recorder)
    if len(recorder.groups_seen[group]) == 1:
        return None
    whole: Any = produced[0] if gathered else args[0]
    return Op(
        name=name, family=Family.COLLECTIVE, inputs=(spec(args[0]),), outputs=(), flops=0, bytes=0,
        collective=Collective(
            kind=kind, group=group, bytes=whole.numel() * whole.element_size(),
            dtype=dtype_name(whole.dtype),
        ),
    )  # fmt: skip
