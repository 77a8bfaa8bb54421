"""What the virtual ranks send, where tensors have values: the same as this rank.

The fake process group leaves the outputs of collectives as they were allocated.  Uninitialised
memory would send a router anywhere and make norms not-a-number, so outputs get this rank's own
data.  Sums stay this rank's own share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class EchoingPeers(TorchDispatchMode):
    """Every other rank of a group holds what this rank holds."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Fill a collective's outputs; pass everything on."""
        result = func(*args, **(kwargs or {}))
        answer = _ANSWERS.get(func)
        if answer is not None:
            answer(args)
        return result


def _in_place(args: tuple) -> bool:
    """Whether this rank's part lies in the whole buffer, as for parameters and gradients."""
    return args[0].untyped_storage()._cdata == args[1].untyped_storage()._cdata


def _gathered(args: tuple) -> None:
    if _in_place(args):  # the others' parts have values already
        return
    args[0].view(-1, args[1].numel()).copy_(args[1].reshape(1, -1))


def _gathered_list(args: tuple) -> None:
    for outputs, own in zip(args[0], args[1], strict=True):
        for output in outputs:
            output.copy_(own)


def _scattered(args: tuple) -> None:
    if _in_place(args):
        return
    args[0].view(-1).copy_(args[1].reshape(-1)[: args[0].numel()])


def _exchanged(args: tuple) -> None:
    output, own = args[0], args[1]
    if output.shape[0] and own.shape[0]:
        output.copy_(own[torch.arange(output.shape[0]) % own.shape[0]])


def _received(args: tuple) -> None:
    for tensor in args[0]:
        tensor.fill_(0.5)


_c10d = torch.ops.c10d
_ANSWERS = {
    _c10d._allgather_base_.default: _gathered,
    _c10d.allgather_.default: _gathered_list,
    _c10d._reduce_scatter_base_.default: _scattered,
    _c10d.alltoall_base_.default: _exchanged,
    _c10d.recv_.default: _received,
}
