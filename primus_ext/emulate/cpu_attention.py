"""The core attention of Megatron-Core's local layers on the CPU, also under context parallelism.

Causal softmax attention over torch's ``scaled_dot_product_attention``.  Under context parallelism
each rank holds two chunks of the sequence, one from each end (Megatron's balanced order); keys and
values are gathered along the context-parallel group, and the mask compares real positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention


def chunk_positions(seq: int, cp: int, rank: int) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that a context-parallel rank holds.

    Args:
        seq: Length of the whole sequence, divisible by ``2 * cp``.
        cp: Context-parallel degree.
        rank: Rank in the context-parallel group.

    Returns:
        int64 tensor of ``seq // cp`` positions.
    """
    chunk = seq // (2 * cp)
    starts = (rank * chunk, (2 * cp - rank - 1) * chunk)
    return torch.cat([torch.arange(start, start + chunk) for start in starts])


class HostAttention(DotProductAttention):
    """Stands for ``DotProductAttention``, which refuses context parallelism."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        """Build the attention of one layer; the arguments are those of ``DotProductAttention``.

        Raises:
            ValueError: If the mask is not causal.
        """
        MegatronModule.__init__(self, config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"attention mask {attn_mask_type} is not supported; use causal")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group: Any = groups.tp
        self.cp_group: Any = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.scale /= max(1, layer_number)
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size if windowed else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            offset = torch.empty(heads, dtype=config.params_dtype)
            if config.perform_initialization:
                config.init_method(offset)
            self.softmax_offset = torch.nn.Parameter(offset)
        elif config.softmax_type != "vanilla":
            raise ValueError(
                f"softmax_type={config.softmax_type!r} is not supported on CPUs; "
                "use vanilla or learnable"
            )

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_unused: Any,
        packed_seq_params: Any = None,
        **_unused_too: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[seq / cp, batch, heads, dim_qk]``.
            key: ``[seq / cp, batch, groups, dim_qk]``.
            value: ``[seq / cp, batch, groups, dim_v]``.
            attention_mask: Ignored: the mask is causal.
            packed_seq_params: Must be None.

        Returns:
            ``[seq / cp, batch, heads * dim_v]``.

        Raises:
            ValueError: For packed sequences.
        """
        if packed_seq_params is not None:
            raise ValueError("packed sequences are not supported by the local layers on CPUs")
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        seq = query.shape[0] * cp
        query_at = chunk_positions(seq, cp, rank) if cp > 1 else torch.arange(seq)
        key_at = query_at
        if cp > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
            key_at = torch.cat([chunk_positions(seq, cp, r) for r in range(cp)])
        mask = self._mask(query_at, key_at, query.dtype)
        # [seq, batch, heads, dim] -> [batch, heads, seq, dim]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.softmax_offset is not None:
            key, value, mask = self._add_sink(key, value, mask)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[2], query.shape[0], -1)

    def _mask(
        self, query_at: torch.Tensor, key_at: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Additive mask ``[queries, keys]``: 0 where a query may look, -inf elsewhere."""
        distance = query_at[:, None] - key_at[None, :]
        hidden = distance < 0
        if self.window is not None and self.window[0] >= 0:
            hidden |= distance > self.window[0]
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)

    def _add_sink(
        self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A key that scores ``softmax_offset`` for every query and brings a zero value."""
        offset = self.softmax_offset
        assert offset is not None
        sink = offset.to(mask.dtype).view(1, -1, 1, 1).expand(1, -1, mask.shape[0], 1)
        wide = mask.expand(1, sink.shape[1], -1, -1)
        return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), torch.cat([wide, sink], -1)
