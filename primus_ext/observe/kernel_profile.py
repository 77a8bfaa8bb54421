"""Which kernels the time of one step goes to, by PyTorch's profiler."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from primus_ext.measurement import KernelTime

MOST = 200
"""Kinds of kernels that are kept, those with the most seconds."""
_PROFILER = ("ProfilerStep", "Optimizer.")
"""How the profiler's own ranges begin; they hold operators that count by themselves."""


class Profile:
    """A step under the profiler."""

    def __init__(self, on_gpu: bool) -> None:
        """Nothing is profiled yet.

        Args:
            on_gpu: Whether kernels of a CUDA or ROCm device are asked about, or operators of the
                CPU.
        """
        from torch.profiler import ProfilerActivity, profile

        device = [ProfilerActivity.CUDA] if on_gpu else []
        self._on_gpu = on_gpu
        self._profile: Any = profile(activities=[ProfilerActivity.CPU, *device])
        self._ran = False

    def __enter__(self) -> Profile:
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.__exit__(kind, error, trace)
        self._ran = True

    def kernels(self) -> tuple[KernelTime, ...]:
        """Kernels by name, the most seconds first; empty where nothing was profiled."""
        if not self._ran:
            return ()
        found = []
        for event in self._profile.key_averages():
            if str(event.key).startswith(_PROFILER):
                continue
            own = event.self_device_time_total if self._on_gpu else event.self_cpu_time_total
            if own > 0:
                found.append(
                    KernelTime(name=str(event.key), calls=int(event.count), seconds=own * 1e-6)
                )
        return tuple(sorted(found, key=lambda kernel: -kernel.seconds)[:MOST])
