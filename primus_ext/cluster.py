"""Accelerators and target clusters, as pure data read from ``hydra_conf/accelerator/*.yaml``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with the place it comes from."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator product.  SI units: bytes, bytes/s, FLOP/s, seconds."""

    name: str
    vendor: str
    """nvidia, amd, or cpu: the processors of a host."""
    arch: str
    """sm_80, sm_90, sm_100, gfx942, gfx950, cpu: decides what precisions and kernels exist."""
    compute_capability: tuple[int, int]
    """What ``torch.cuda.get_device_capability`` returns there."""
    multi_processors: int
    """SMs or CUs."""
    peak_flops: dict[str, Figure]
    """Dense peak by number format of the operands: fp32, tf32, bf16, fp16, fp8 (per-tensor scales),
    fp8_block, mxfp8, nvfp4; what is absent is not supported."""
    gemm_efficiency: dict[str, Figure]
    """Share of the peak that the largest output tiles reach, by number format."""
    attention_efficiency: dict[str, Figure]
    """Share of the bf16 peak of fused attention: forward, backward (head dimension 128), and
    ``direction/n`` where another head dimension is known."""
    attention_kernels: dict[str, Figure]
    """Speed of other fused attention over that of ``attention_efficiency``: ``kernel/direction``,
    kernel being flash2 (flash-attn 2) or triton (FlashAttention in Triton, of 2022); what is absent
    is as fast."""
    memory_efficiency: dict[str, Figure]
    """Share of the memory bandwidth by kind of kernel; what is absent streams at
    ``hbm_efficiency``.  Kinds: norm, rope, permute, cross_entropy, quantize."""
    kernel_model: dict[str, Figure]
    """Constants of the kernel models, which hold for a generation (``cost/kernel_constants.py``
    names and explains them)."""
    sustained: dict[str, Figure]
    """Seconds in training over those of the short runs which the shares above come from, by kind of
    work, at the board power ``board_power_w`` of the table, and ``host_call_s``, the host's time
    for each call that it issues (:mod:`primus_ext.cost.sustained`)."""
    board_power_w: Figure
    """Power limit of the board as it is sold, watts."""
    measured_tables: str
    """Folder of this very product in the tables of aiconfigurator-core; '' if they have none."""
    hbm_bytes: Figure
    """Capacity that a process can allocate, in bytes."""
    hbm_bandwidth: Figure
    hbm_efficiency: Figure
    l2_bytes: Figure
    """Last cache before memory that all multiprocessors share (AMD: the Infinity Cache is not
    counted)."""
    boost_clock_hz: Figure
    """Highest clock; that behind ``peak_flops`` where the source tells them apart."""
    kernel_launch_s: Figure
    scale_up_bandwidth: Figure
    """Bytes/s per GPU and direction inside the scale-up domain."""
    scale_up_topology: str
    """switch; pcie (a switch without LL128); or mesh: every pair has a link of its own,
    1/(scale_up_gpus - 1) of the bandwidth."""
    scale_up_gpus: int
    """Most GPUs that one scale-up domain joins."""
    host_gpus: int
    """GPUs of a full host; fewer than ``scale_up_gpus`` where a domain is a rack."""
    collectives: dict[str, Figure]
    """Shares of it that algorithms reach however large the message: ring, direct (all-to-all),
    message (one pair) and, where switches add, nvls; ``name/n`` is for groups of n GPUs and fewer
    than the next n that is listed.  Also latency, a factor on the library's own latencies inside a
    node, and ramp, the part of a pipeline's filling that shows
    (:mod:`primus_ext.cost.collectives`)."""
    exchange: dict[str, Figure]
    """Expert dispatch and combine kernels (:mod:`primus_ext.cost.exchange`): share of
    ``scale_up_bandwidth``, dispatch_start_s, combine_start_s and, where SMs limit them, row_s and
    sm_bandwidth of one SM, and hybridep_speed, HybridEP's pace over DeepEP's."""
    context_bytes: Figure
    """Device memory that the driver context and libraries take outside the tensor allocator."""
    communicator_bytes: Figure
    """Device memory that the collective library takes for one process group."""
    communicator_pair_bytes: Figure
    """The same for a group of two."""
    all_to_all_peer_bytes: Figure
    """What an all-to-all takes besides, for every other member in the scale-up domain."""
    residuals: dict[str, Figure]
    """How far the model may be off, as the half width of the central 80 % of ln(measured/modelled),
    by kind of work (gemm, attention, memory, communication); where there are too few rows for a
    quantile, the source says what the width stands on."""
    host_cores: Figure | None = None
    """Cores of a host that its processes share, where they are what computes (``vendor`` cpu);
    None: every process has a device, with engines of its own for communication."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Switches between nodes, e.g. the leaves of one rail: above each lies the next tier."""

    nodes: int
    """Nodes below one switch (or one set of rail switches)."""
    oversubscription: Figure
    """Bandwidth of the NICs below a switch over that of its uplinks; 1 is non-blocking."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A target: ``nodes`` hosts of ``gpus_per_node`` accelerators."""

    name: str
    accelerator: Accelerator
    nodes: int
    gpus_per_node: int
    scale_up_domain: int
    """GPUs that reach each other over the scale-up fabric (>= gpus_per_node for rack scale)."""
    nic_bandwidth: Figure
    """Bytes/s of one NIC and direction."""
    nics_per_node: Figure
    """Of a host; its GPUs share them alike."""
    nic_efficiency: Figure
    """Share of a NIC's bandwidth that large messages reach."""
    nic_latency_s: Figure
    """What a step between nodes takes beyond the collective library's own figure for InfiniBand."""
    tiers: tuple[Tier, ...] = ()
    """From the NICs up; none: every NIC reaches every other at full speed."""

    @property
    def world_size(self) -> int:
        """GPUs in the target."""
        return self.nodes * self.gpus_per_node

    @property
    def hides_communication(self) -> bool:
        """Whether asynchronous communication runs beside computation and takes nothing from it.

        gloo's collectives are computed and copied by threads of the process: torch's
        ``ProcessGroupGloo`` runs each in one of two workers, and gloo's transport has a thread for
        its sockets (torch 2.14, ``torch/csrc/distributed/c10d/ProcessGroupGloo.hpp``).  Where every
        core computes already, they take turns with that: only what they wait is hidden.
        """
        cores = self.accelerator.host_cores
        return cores is None or self.gpus_per_node < cores.value
