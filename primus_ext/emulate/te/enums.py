"""Enumerations of the stand-in extension, value for value those of Transformer Engine's C headers.

Source: ``transformer_engine/common/include/transformer_engine/{transformer_engine,fused_attn,
comm_gemm_overlap,fused_router}.h`` and ``pytorch/csrc/common.h`` of Transformer Engine 2.20.  The
Python code of Transformer Engine mirrors ``DType`` and ``NVTE_Fused_Attn_Backend`` and asserts that
the names agree; the members are ``IntEnum`` because it also compares them by integer value.
"""

from __future__ import annotations

import enum


class DType(enum.IntEnum):
    """Data types of tensors; only the members that the real binding exports."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[int]]:
        """Pickle as ``(class, (int,))``, as the real binding does."""
        return type(self), (int(self),)


def _integers(name: str, members: dict[str, int]) -> type[enum.IntEnum]:
    """An integer enumeration from a table (functional form keeps the long tables readable)."""
    return enum.IntEnum(name, members, module=__name__)  # type: ignore[return-value]


def _numbered(*names: str) -> dict[str, int]:
    """Members with consecutive values from 0."""
    return {name: value for value, name in enumerate(names)}


NVTE_QKV_Layout = _integers(
    "NVTE_QKV_Layout",
    _numbered(
        "NVTE_SB3HD",
        "NVTE_SBH3D",
        "NVTE_SBHD_SB2HD",
        "NVTE_SBHD_SBH2D",
        "NVTE_SBHD_SBHD_SBHD",
        "NVTE_BS3HD",
        "NVTE_BSH3D",
        "NVTE_BSHD_BS2HD",
        "NVTE_BSHD_BSH2D",
        "NVTE_BSHD_BSHD_BSHD",
        "NVTE_T3HD",
        "NVTE_TH3D",
        "NVTE_THD_T2HD",
        "NVTE_THD_TH2D",
        "NVTE_THD_THD_THD",
        "NVTE_SBHD_BSHD_BSHD",
        "NVTE_BSHD_SBHD_SBHD",
        "NVTE_THD_BSHD_BSHD",
        "NVTE_THD_SBHD_SBHD",
        "NVTE_Paged_KV_BSHD_BSHD_BSHD",
        "NVTE_Paged_KV_BSHD_SBHD_SBHD",
        "NVTE_Paged_KV_SBHD_BSHD_BSHD",
        "NVTE_Paged_KV_SBHD_SBHD_SBHD",
        "NVTE_Paged_KV_THD_BSHD_BSHD",
        "NVTE_Paged_KV_THD_SBHD_SBHD",
        "NVTE_BHSD_BHSD_BHSD",
        "NVTE_QKV_Layout_NOT_SET",
    ),
)

NVTE_QKV_Format = _integers(
    "NVTE_QKV_Format",
    _numbered(
        "NVTE_SBHD",
        "NVTE_BSHD",
        "NVTE_THD",
        "NVTE_BSHD_2SBHD",
        "NVTE_SBHD_2BSHD",
        "NVTE_THD_2BSHD",
        "NVTE_THD_2SBHD",
        "NVTE_BHSD",
        "NVTE_QKV_Format_NOT_SET",
    ),
)

NVTE_Bias_Type = _integers(
    "NVTE_Bias_Type",
    _numbered("NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"),
)

NVTE_Mask_Type = _integers(
    "NVTE_Mask_Type",
    _numbered(
        "NVTE_NO_MASK",
        "NVTE_PADDING_MASK",
        "NVTE_CAUSAL_MASK",
        "NVTE_PADDING_CAUSAL_MASK",
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK",
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
)

NVTE_Softmax_Type = _integers(
    "NVTE_Softmax_Type",
    _numbered("NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"),
)

NVTE_Fused_Attn_Backend = _integers(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)

NVTEScalingMode = _integers(
    "NVTEScalingMode",
    {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
)

Float8BlockScaleTensorFormat = _integers(
    "Float8BlockScaleTensorFormat", {"GEMM_READY": 0, "COMPACT": 1, "INVALID": 2}
)

CommOverlapType = _integers("CommOverlapType", _numbered("RS", "AG"))

CommOverlapAlgo = _integers(
    "CommOverlapAlgo",
    _numbered(
        "BULK_OVERLAP_AG",
        "BULK_OVERLAP_RS",
        "SPLIT_PIPELINED_AG_P2P",
        "SPLIT_PIPELINED_RS",
        "SPLIT_PIPELINED_RS_P2P",
        "ATOMIC_GEMM_RS",
        "ATOMIC_GEMM_AG_P2P",
        "ATOMIC_GEMM_RS_P2P",
        "EXTERNAL_BULK_OVERLAP_AG",
    ),
)

FP8FwdTensors = _integers(
    "FP8FwdTensors",
    _numbered(
        *(f"GEMM{i}_{role}" for i in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")),
    ),
)

FP8BwdTensors = _integers(
    "FP8BwdTensors",
    _numbered(*(f"GRAD_{role}{i}" for i in (1, 2, 3) for role in ("OUTPUT", "INPUT"))),
)

NVTERoutingMapFormat = _integers("NVTERoutingMapFormat", _numbered("BYTEMAP", "BITMAP_U8"))

NVTEQBHistogramMode = _integers("NVTEQBHistogramMode", _numbered("TWO_KERNEL", "FUSED_ATOMIC"))

ENUMS: dict[str, type[enum.IntEnum]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, enum.IntEnum)
}
"""Every enumeration by its name in the extension."""
