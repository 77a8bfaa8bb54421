"""Replacements in torch for a CUDA device that is not there (group ``accelerator``).

Used through :func:`primus_ext.emulate.virtual_cuda.install`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from primus_ext.emulate import shims_host
from primus_ext.emulate.device_profile import require_device
from primus_ext.emulate.registry import patch
from primus_ext.emulate.shims_stream import (
    COMPUTE,
    ExternalHostStream,
    HostEvent,
    HostStream,
    current_stream,
    set_stream,
    stream_context,
)
from primus_ext.observe import recorder

_TORCH = "torch 2.4 to 2.14"
CPU = torch.device("cpu")


def _nothing() -> Callable[..., None]:
    """A new function that takes anything and does nothing.

    Every name needs its own: dynamo keeps rules by object and refuses one under two names.
    """
    return lambda *_args, **_kwargs: None


def _replace(module: types.ModuleType, **values: Any) -> None:
    for name, value in values.items():
        setattr(module, name, value)


_DEVICE = (
    "current_device", "device_count", "set_device", "init", "synchronize",
    "get_device_properties", "get_device_capability", "get_device_name", "_lazy_init",
    "_lazy_call", "device", "is_bf16_supported",
)


@patch("torch.cuda", *_DEVICE, group="accelerator", versions=_TORCH,
       reason="device queries reach for the driver; their answers decide what frameworks allow")
def _device_queries(module: Any) -> None:
    profile = require_device()
    major, minor = profile.compute_capability
    properties = types.SimpleNamespace(
        name=profile.name,
        major=major,
        minor=minor,
        total_memory=profile.total_memory,
        multi_processor_count=profile.multi_processor_count,
        warp_size=profile.warp_size,
    )
    _replace(
        module,
        current_device=lambda: CPU,
        device_count=lambda: require_device().device_count,  # a fork may be in another node
        set_device=_nothing(),
        init=_nothing(),
        synchronize=_nothing(),
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: profile.compute_capability,
        get_device_name=lambda device=None: profile.name,
        is_bf16_supported=lambda including_emulation=True: major >= 8,
        _lazy_init=_nothing(),
        _lazy_call=lambda callback, **_kwargs: callback(),
        device=lambda device: contextlib.nullcontext(),
    )


_STREAMS = (
    "Stream", "ExternalStream", "Event", "stream", "current_stream", "default_stream",
    "set_stream", "is_current_stream_capturing",
)


@patch("torch.cuda", *_STREAMS, group="accelerator", versions=_TORCH,
       reason="streams and events need a driver; on the host everything runs in order")
def _streams(module: Any) -> None:
    _replace(
        module,
        Stream=HostStream,
        ExternalStream=ExternalHostStream,
        Event=HostEvent,
        stream=stream_context,
        current_stream=current_stream,
        default_stream=lambda device=None: COMPUTE,
        set_stream=set_stream,
        is_current_stream_capturing=lambda: False,
    )


@patch("torch.nn.functional", "dropout", group="accelerator", versions=_TORCH,
       reason="on CUDA one kernel draws, scales and keeps a mask of one byte an element "
              "(aten/src/ATen/native/Dropout.cpp); the CPU runs three and keeps it in full")
def _dropout(module: Any) -> None:
    composite = module.dropout

    @functools.wraps(composite)
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if inplace or not training or not 0 < p < 1 or not input.numel():
            return composite(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    module.dropout = dropout


_MEMORY = (
    "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "mem_get_info", "empty_cache", "reset_peak_memory_stats",
    "device_memory_used",
)


@patch("torch.cuda", *_MEMORY, group="accelerator", versions=_TORCH,
       reason="there is no caching allocator: its statistics are zero")
def _memory(module: Any) -> None:
    total = require_device().total_memory
    zero = {name: (lambda device=None: 0) for name in _MEMORY if name != "memory_stats"}
    _replace(module, **zero)
    _replace(
        module,
        memory_stats=lambda device=None: collections.defaultdict(int),
        mem_get_info=lambda device=None: (total, total),
        empty_cache=_nothing(),
        reset_peak_memory_stats=_nothing(),
    )


_RANDOM = (
    "get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all", "manual_seed",
    "manual_seed_all", "initial_seed",
)


class _Generators:
    """``torch.cuda.default_generators``: every index is the CPU's generator."""

    def __getitem__(self, _index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return require_device().device_count


def _ignore(_value: object) -> None:
    """Turns an expression into one without a value."""


def _random_functions() -> dict[str, Callable[..., Any]]:
    """The random state of the device is the CPU's: that is where its tensors are filled."""
    generator = torch.default_generator

    return {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": lambda seed: _ignore(generator.manual_seed(int(seed))),
        "manual_seed_all": lambda seed: _ignore(generator.manual_seed(int(seed))),
        "initial_seed": lambda: generator.initial_seed(),
    }


@patch("torch.cuda.random", *_RANDOM, group="accelerator", versions=_TORCH,
       reason="tensors of the device are filled by the CPU's generator")
def _random(module: Any) -> None:
    _replace(module, **_random_functions())


@patch("torch.cuda", *_RANDOM, "default_generators", group="accelerator", versions=_TORCH,
       reason="torch.cuda re-exports the random functions")
def _random_exports(module: Any) -> None:
    _replace(module, **_random_functions(), default_generators=_Generators())


@patch("torch", "Tensor.cuda", "Tensor.cpu", "Tensor.pin_memory", "Tensor.record_stream",
       group="accelerator", versions=_TORCH,
       reason="methods that move a tensor to the device or tie it to a stream")
def _tensor_methods(module: Any) -> None:
    module.Tensor.cuda = shims_host.to_device
    module.Tensor.cpu = shims_host.to_host
    module.Tensor.pin_memory = shims_host.pinned
    module.Tensor.record_stream = _nothing()


@patch("torch.autograd", "_engine_run_backward", group="accelerator", versions=_TORCH,
       reason="a function mode is off while it handles Tensor.backward: on again for the backward")
def _backward(module: Any) -> None:
    run = module._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with _mode or contextlib.nullcontext():
            return run(*args, **kwargs)

    module._engine_run_backward = run_in_mode


@patch("torch", "compile", group="accelerator", versions=_TORCH,
       reason="nothing is compiled here (Megatron's jit_fuser would), and dynamo need not load")
def _compile(module: Any) -> None:
    def compile_nothing(model: Any = None, **_kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    module.compile = compile_nothing


@patch("torch", "UntypedStorage.resize_", group="accelerator", versions=_TORCH,
       reason="Megatron frees outputs that it will recompute by resizing their storage, which no "
              "operator tells of; nothing is replaced")
def _resized_storages(module: Any) -> None:
    original = module.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        result = original(self, size)
        active = recorder.current()
        if active is not None:
            active.memory.resized(self)
        return result

    module.UntypedStorage.resize_ = resize_


def _on_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


_BY_POSITION = frozenset({torch.Tensor.to, torch.device, torch.Tensor.type})
"""Functions that take a device, or tell of one, without its name."""


class DeviceMode(TorchFunctionMode):
    """Sends what is asked for on ``cuda`` (or on a device index) to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with ``cuda`` replaced in its device arguments."""
        if not kwargs and func not in _BY_POSITION:
            return func(*args)
        asked = kwargs or {}
        if kwargs:
            device = kwargs.get("device")
            if _on_device(device) or type(device) is int:
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            target = asked.get("device", args[1] if len(args) > 1 else None)
            # an integer in device position means a device index
            args = tuple(
                CPU if _on_device(a) or (i == 1 and type(a) is int) else a
                for i, a in enumerate(args)
            )
            if isinstance(target, (str, torch.device)):
                return shims_host.moved(func, args, kwargs or {}, target)
        elif func is torch.device and args[:1] == ("cuda:cpu",):
            return CPU  # f"cuda:{torch.cuda.current_device()}"
        elif func is torch.Tensor.type:
            return _tensor_type(func, args, kwargs or {})
        with shims_host.placed(asked):
            return func(*args, **(kwargs or {}))


def _tensor_type(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``Tensor.type``: Megatron's optimizers compare its string with torch.cuda.FloatTensor."""
    if len(args) == 1 and not kwargs:
        return func(*args).replace("torch.", "torch.cuda.", 1)
    plain = tuple(a.replace("torch.cuda.", "torch.") if isinstance(a, str) else a for a in args)
    return func(*plain, **kwargs)


_mode: DeviceMode | None = None


def enter_device_mode() -> None:
    """Switch :class:`DeviceMode` on for the rest of this thread.  Idempotent."""
    global _mode
    if _mode is None:
        _mode = DeviceMode()
        _mode.__enter__()
