"""What has to be replaced in Transformer Engine and torch (group ``transformer_engine``)."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from primus_ext.emulate import shims_host
from primus_ext.emulate.registry import patch

GROUP = "transformer_engine"
_TE = "transformer-engine 2.20"
_TORCH = "torch 2.4 to 2.14"


@patch("transformer_engine.common", "load_framework_extension", group=GROUP, versions=_TE,
       reason="the compiled extension is absent; the stand-in is in sys.modules already")
def _extension_is_loaded(module: types.ModuleType) -> None:
    def load_framework_extension(framework: str) -> None:
        """Only the torch extension has a stand-in."""
        if framework != "torch":
            # what the real function raises for an extension that is not installed
            raise ImportError(f"Transformer Engine's {framework} extension has no stand-in")

    module.load_framework_extension = load_framework_extension  # type: ignore[attr-defined]


@patch("torch", "Tensor.is_cuda", group=GROUP, versions=_TORCH,
       reason="Transformer Engine refuses tensors that are not on a CUDA device; here the CPU's "
              "tensors are the device's")
def _tensors_are_on_the_device(module: types.ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    def is_cuda(self: torch.Tensor) -> bool:
        # meta tensors stay what they are: deferred initialisation asks for them
        if self.device.type != "cpu":
            return False
        if shims_host.is_on_host(self):
            return False
        # while tensors have no storage, one that has some is a value on the host
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        return fake is None or isinstance(self, FakeTensor) or type(self) not in _PLAIN

    module.Tensor.is_cuda = property(is_cuda)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@patch("transformer_engine.pytorch.utils", "needs_quantized_gemm", group=GROUP, versions=_TE,
       reason="it goes by the exact type, and a tensor without storage has another: its bias would "
              "be cast to BF16 in an FP32 job")
def _fake_tensors_are_not_quantized(module: types.ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    original = module.needs_quantized_gemm

    @functools.wraps(original)
    def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
        return not isinstance(obj, FakeTensor) and original(obj, rowwise)

    module.needs_quantized_gemm = needs_quantized_gemm  # type: ignore[attr-defined]


def _address(storage: torch.UntypedStorage) -> int:
    return storage._cdata << 8  # distinct per live storage; as far apart as no offset reaches


@patch("torch", "UntypedStorage.data_ptr", group=GROUP, versions=_TORCH,
       reason="Transformer Engine recognises packed q, k, v by their storage's address, which is 0 "
              "for every fake tensor")
def _fake_storages_have_addresses(module: types.ModuleType) -> None:
    original = module.UntypedStorage.data_ptr

    def data_ptr(self: Any) -> int:
        return _address(self) if self.device.type == "meta" else original(self)

    module.UntypedStorage.data_ptr = data_ptr


@patch("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule.__init__",
       group=GROUP, versions=_TE,
       reason="modules refuse to be built where torch.cuda.is_available() is False")
def _modules_build_without_device(module: types.ModuleType) -> None:
    original = module.TransformerEngineBaseModule.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        answer = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            original(self, *args, **kwargs)
        finally:
            torch.cuda.is_available = answer

    module.TransformerEngineBaseModule.__init__ = __init__


@patch("transformer_engine.pytorch.attention.dot_product_attention.utils",
       "AttentionParams.__init__", group=GROUP, versions=_TE,
       reason="the choice of the attention backend compares the type of q with torch.Tensor")
def _fake_tensors_are_tensors(module: types.ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    original = module.AttentionParams.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(self.qkv_type, type) and issubclass(self.qkv_type, FakeTensor):
            object.__setattr__(self, "qkv_type", torch.Tensor)

    module.AttentionParams.__init__ = __init__


@patch("transformer_engine.pytorch.module.grouped_linear", "GroupedLinear.forward",
       group=GROUP, versions=_TE,
       reason="the rows of each expert become a tensor that is read back on the host")
def _splits_keep_their_values(module: types.ModuleType) -> None:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    original = module.GroupedLinear.forward

    @functools.wraps(original)
    def forward(self: Any, inp: Any, m_splits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(m_splits, torch.Tensor):
            with unset_fake_temporarily():
                m_splits = torch.tensor(m_splits, dtype=torch.int64)
        return original(self, inp, m_splits, *args, **kwargs)

    module.GroupedLinear.forward = forward


@patch("transformer_engine.pytorch.tensor.nvfp4_tensor", "get_random_sign_mask_for_rht",
       group=GROUP, versions=_TE,
       reason="the sign mask of the Hadamard transform is read from a tensor on the host")
def _sign_mask_keeps_its_value(module: types.ModuleType) -> None:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    original = module.get_random_sign_mask_for_rht

    def get_random_sign_mask_for_rht(with_random_sign_mask: bool, device: Any) -> int:
        with unset_fake_temporarily():
            return original(with_random_sign_mask, device)

    setattr(module, "get_random_sign_mask_for_rht", get_random_sign_mask_for_rht)
