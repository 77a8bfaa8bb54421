"""DeepEP's kernels (namespace ``primus_deep_ep``): an all-to-all of their own, and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_iter

from primus_ext.observe.classify_te import arguments
from primus_ext.observe.specs import dtype_name, moved_bytes, spec
from primus_ext.trace import Collective, CollectiveKind, Family, Op

if TYPE_CHECKING:
    from primus_ext.observe.recorder import Recorder


def classify(
    name: str, func: Any, args: tuple, kwargs: dict, produced: list[torch.Tensor],
    recorder: Recorder,
) -> Op:  # fmt: skip
    """The kernel behind one call.

    A dispatch or combine is an all-to-all, whose ``bytes`` are those of the tokens that this rank
    sends, each once to every rank that needs it.  Its attributes: ``backend`` (deepep, hybridep),
    ``direction``, ``node_bytes`` (what leaves the node: each token once for every other node),
    ``row_bytes`` (of one token on the wire) and ``sms`` that the kernel takes.
    """
    by_name = arguments(func, args, kwargs)
    kernel = name.split(".")[1]
    read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    own = name.replace("primus_deep_ep", "deep_ep")
    if "row_bytes" not in by_name:
        return Op(
            name=own, family=Family.MEMORY, inputs=tuple(spec(t) for t in read),
            outputs=tuple(spec(t) for t in produced), flops=0,
            bytes=moved_bytes(read) + moved_bytes(produced),
        )  # fmt: skip
    row = by_name["row_bytes"]
    return Op(
        name=own,
        family=Family.COLLECTIVE,
        inputs=tuple(spec(t) for t in read),
        outputs=tuple(spec(t) for t in produced),
        flops=0,
        bytes=0,
        attrs=(
            ("backend", "hybridep" if kernel.startswith("hybrid") else "deepep"),
            ("direction", "dispatch" if "dispatch" in kernel else "combine"),
            ("node_bytes", by_name["node_sent"] * row),
            ("row_bytes", row),
            ("sms", by_name["sms"]),
        ),
        collective=Collective(
            kind=CollectiveKind.ALL_TO_ALL,
            group=_group(by_name["group"], recorder),
            bytes=by_name["sent"] * row,
            dtype=dtype_name(read[0].dtype),
        ),
    )


def _group(torch_name: str, recorder: Recorder) -> str:
    """Short name of the group; notes its ranks."""
    group = _resolve_process_group(torch_name)  # type: ignore[arg-type]
    name = recorder.group_names.get(torch_name) or group.group_desc.lower()
    if name not in recorder.groups_seen:
        recorder.groups_seen[name] = tuple(dist.get_process_group_ranks(group))
    return name
