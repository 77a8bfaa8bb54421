"""What the user's job is: model, parallel degrees, batch, precision, recompute; pure data.

A :class:`Plan` is read from the framework's own objects after the framework validated them
(``frameworks/``); nothing in it is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Parallel degrees of the job; the one owner of what follows from them."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks per pipeline rank (1: not interleaved)."""
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_p2p: bool = False
    layers_per_stage: tuple[tuple[int, ...], ...] = ()
    """Transformer layers of each pipeline rank, one entry a chunk."""

    @property
    def dp(self) -> int:
        """Data-parallel degree (ranks that see different samples)."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel degree of the routed experts' parameters."""
        return self.world_size // (self.etp * self.ep * self.pp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch sizes in sequences, sequence length in tokens."""

    mbs: int
    gbs: int
    seq: int
    dp: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches each rank runs in one step."""
        return self.gbs // (self.mbs * self.dp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Numeric formats."""

    compute: str
    """fp32, bf16, fp16, fp8, fp4: what the big GEMMs run in."""
    recipe: str = ""
    """FP8/FP4 recipe: delayed, tensorwise, blockwise, mxfp8, nvfp4; '' otherwise."""
    params: str = "bf16"
    grads: str = "fp32"
    """dtype of the gradient buffers (and of their reduction)."""

    @property
    def number_format(self) -> str:
        """Format of the big matrix products, as accelerators name their rates.

        fp32, bf16, fp16; fp8 (a scale per tensor), fp8_block, mxfp8, nvfp4; the recipe itself
        where it is another one.
        """
        if self.compute not in ("fp8", "fp4"):
            return self.compute
        per_tensor = {"delayed": "fp8", "tensorwise": "fp8", "blockwise": "fp8_block"}
        return per_tensor.get(self.recipe, self.recipe)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation as Megatron names it."""

    granularity: str = "none"
    """none, selective or full."""
    method: str = ""
    num_layers: int = 0
    modules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Architecture facts that the report and the MFU need."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    topk: int = 0
    moe_ffn_hidden_size: int = 0
    mtp_layers: int = 0
    framework_class: str = ""


def is_sharded(flags: Mapping[str, Any]) -> bool:
    """Whether the framework's settings ask for fully sharded data parallelism.

    Args:
        flags: A plan's, or all of Megatron's arguments by name.
    """
    return bool(flags.get("use_torch_fsdp2") or flags.get("use_megatron_fsdp"))


def is_packed(flags: Mapping[str, Any]) -> bool:
    """Whether the batches of a job say where documents begin: several may share a sequence.

    Args:
        flags: A plan's, or all of Megatron's arguments by name.
    """
    return bool(flags.get("sft") or flags.get("dataloader_inter_document_masking"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job."""

    model: Model
    parallelism: Parallelism
    batch: Batch
    precision: Precision
    recompute: Recompute
    optimizer: str = "adam"
    schedule: str = "1f1b"
    """1f1b or interleaved: what the framework will run."""
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other settings that change time or memory, by the framework's own names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRef:
    """The program a plan came from."""

    argv: tuple[str, ...]
    cwd: str
    code_sha256: str
    """Hash of the user's script."""
    versions: dict[str, str]
    """Package name to version: torch, megatron-core, transformer-engine, primus-ext, ..."""
