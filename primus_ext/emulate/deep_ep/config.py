"""Sizes of DeepEP's communication buffers, as its ``Config`` states them.

Source: deepseek-ai/DeepEP, branch hybrid-ep, commit 94a9f8f: ``csrc/config.hpp``,
``csrc/kernels/configs.cuh``, ``deep_ep/buffer.py``.
"""

from __future__ import annotations

import dataclasses

from primus_ext.emulate.session import ProgramError

NVLINK_PEERS = 8
"""Ranks that DeepEP takes for one node (``NUM_MAX_NVL_PEERS``)."""
SOURCE_META_BYTES = 8
"""Per token that crosses nodes: source node, and a bit per GPU (``SourceMeta``)."""
WORKSPACE_BYTES = 32 * 2**20
"""``NUM_WORKSPACE_BYTES``: allocated by every ``Buffer``."""
SIGNAL_BYTES = NVLINK_PEERS * (4 + 8 + 8)
"""Barrier signals and the tables of pointers behind the NVLink buffer."""
NVSHMEM_GRANULARITY = 2**29
"""``NVSHMEM_CUMEM_GRANULARITY`` that ``Buffer`` sets: the symmetric heap grows by it."""
_MAX_TOPK = _MAX_SCALES = 128
_BUFFER_ALIGNMENT = 128

_DISPATCH = {
    2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128),
    24: (8, 288, 32, 128), 32: (32, 288, 32, 128), 64: (20, 288, 28, 128),
    128: (20, 560, 32, 128), 144: (32, 720, 12, 128), 160: (28, 720, 12, 128),
}  # fmt: skip
_COMBINE = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128),
    24: (1, 288, 8, 128), 32: (1, 288, 8, 128), 64: (1, 288, 20, 128),
    128: (1, 560, 12, 128), 144: (2, 720, 8, 128), 160: (2, 720, 8, 128),
}  # fmt: skip


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Chunk sizes of the kernels, in tokens."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int

    @property
    def channels(self) -> int:
        """Channels of the kernels: two SMs each."""
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the buffer that the GPUs of a node write into.

        Args:
            hidden_bytes: Bytes of one token's hidden state.
            num_ranks: Ranks of the group.
        """
        nodes, peers = max(num_ranks // NVLINK_PEERS, 1), min(num_ranks, NVLINK_PEERS)
        slots = self.channels * peers
        tokens = slots * self.num_max_nvl_chunked_recv_tokens
        per_token = hidden_bytes + SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        return _up(slots * (2 * nodes + 3) * 4 + tokens * per_token, _BUFFER_ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the buffer that GPUs of other nodes write into; 0 within one node.

        Args:
            hidden_bytes: Bytes of one token's hidden state.
            num_ranks: Ranks of the group.
        """
        if num_ranks <= NVLINK_PEERS:
            return 0
        slots = self.channels * (num_ranks // NVLINK_PEERS)
        received = _up(self.num_max_rdma_chunked_recv_tokens, self.num_max_rdma_chunked_send_tokens)
        per_token = hidden_bytes + SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4 + 16
        size = slots * (NVLINK_PEERS * 2 + 2) * 2 * 4 + slots * received * per_token * 2
        return _up(size, _BUFFER_ALIGNMENT)


def _recommended(table: dict[int, tuple[int, int, int, int]], ranks: int, sms: int) -> Config:
    if ranks not in table:  # DeepEP's own judgement
        legal = ", ".join(str(n) for n in table)
        raise ProgramError(
            f"expert_model_parallel_size x expert_tensor_parallel_size={ranks} is not supported by "
            f"DeepEP; legal: {legal}"
        )
    return Config(sms, *table[ranks])


def dispatch_config(ranks: int, sms: int) -> Config:
    """The configuration that DeepEP recommends for a dispatch among ``ranks``.

    Raises:
        ProgramError: DeepEP has none.
    """
    return _recommended(_DISPATCH, ranks, sms)


def combine_config(ranks: int, sms: int) -> Config:
    """The configuration that DeepEP recommends for a combine among ``ranks``.

    Raises:
        ProgramError: DeepEP has none.
    """
    return _recommended(_COMBINE, ranks, sms)


def buffer_bytes(nvlink_bytes: int, rdma_bytes: int) -> int:
    """Device memory of one ``Buffer``: its two buffers, signals and workspace.

    Args:
        nvlink_bytes: Requested size of the NVLink buffer.
        rdma_bytes: Requested size of the RDMA buffer, which lies in NVSHMEM's heap.
    """
    nvlink = nvlink_bytes + SIGNAL_BYTES if nvlink_bytes else 0
    return nvlink + WORKSPACE_BYTES + _up(rdma_bytes, NVSHMEM_GRANULARITY)
