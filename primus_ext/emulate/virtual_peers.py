"""What virtual ranks send where tensors are real: the fake backend leaves outputs as they were.

Whatever stood in that memory may be NaN, which Megatron refuses, or a token count, which steers
shapes.  Virtual ranks hold what this rank holds; activations and gradients that they send are
random.  Filling is in place, so that it costs no tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

Around = Callable[[], contextlib.AbstractContextManager[Any]]

_library: torch.library.Library | None = None
_around: Around = contextlib.nullcontext


def answer(around: Around = contextlib.nullcontext) -> None:
    """Fill the outputs of collectives on real tensors from now on.  Idempotent.

    Args:
        around: Makes what every answer runs inside of, for instance to know what it takes.
    """
    global _library, _around
    _around = around
    if _library is not None:
        return
    _library = torch.library.Library("c10d", "IMPL")
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    for name, fill in _FILLED.items():
        _library.impl(name, _answered(name, fill), key, allow_override=True)


def _answered(name: str, fill: Callable[..., None]) -> Callable[..., Any]:
    schema = torch._C._get_schema(f"c10d::{name}", "")
    with_output = len(schema.returns) == 2

    def run(output: Any, *args: Any, **_: Any) -> Any:
        from torch._C._distributed_c10d import FakeWork

        with torch.no_grad(), _around():
            fill(output, args[0] if args else None)
        work = FakeWork().boxed()
        return (output, work) if with_output else work

    return run


def _same_everywhere(output: torch.Tensor, mine: torch.Tensor) -> None:
    for part in output.view(-1, mine.numel()):
        if part.data_ptr() != mine.data_ptr():  # a shard is often gathered in place
            part.copy_(mine.reshape(-1))


def _each_same_everywhere(outputs: Iterable[torch.Tensor], mine: Iterable[torch.Tensor]) -> None:
    for output, sent in zip(outputs, mine, strict=True):
        _same_everywhere(output, sent)


def _my_share(output: torch.Tensor, mine: torch.Tensor) -> None:
    if output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr():
        output.copy_(mine.reshape(-1)[: output.numel()].view_as(output))


def _each_my_share(outputs: Iterable[torch.Tensor], mine: Iterable[torch.Tensor]) -> None:
    for output, sent in zip(outputs, mine, strict=True):
        _my_share(output, sent)


def random_values(tensor: torch.Tensor) -> None:
    """Overwrite a tensor: floating-point numbers around 0, zeros where they have 8 bits or none."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.normal_()
    else:
        tensor.zero_()


def _random(output: torch.Tensor, _: Any) -> None:
    random_values(output)


def _each_random(outputs: Iterable[torch.Tensor], _: Any) -> None:
    for output in outputs:
        random_values(output)


_FILLED: dict[str, Callable[..., None]] = {
    "_allgather_base_": _same_everywhere,
    "allgather_into_tensor_coalesced_": _each_same_everywhere,
    "_reduce_scatter_base_": _my_share,
    "reduce_scatter_tensor_coalesced_": _each_my_share,
    "alltoall_base_": _random,
    "alltoall_": _each_random,
    "recv_": _each_random,
}
"""Collectives as torch's dispatcher names them, whose outputs other ranks would write.

Reductions keep what this rank has, broadcasts come from this rank."""
