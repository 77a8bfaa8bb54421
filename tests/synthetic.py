"""Plans and traces of Llama-like jobs, made by arithmetic alone.

They are what a recording should look like, built without any recording, so that pricing and
composition are tested against numbers that can be checked by hand.
"""

from __future__ import annotations

import dataclasses

from primus_ext.plan import Batch, Model, Parallelism, Plan, Precision, Recompute
from primus_ext.trace import (
    Bucket,
    Call,
    ChunkMemory,
    ChunkTrace,
    Collective,
    CollectiveKind,
    Family,
    Op,
    RankTrace,
    ScopeKind,
    Segment,
    StaticMemory,
)

BUCKETS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A dense decoder and how it is spread."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    microbatches: int = 4
    mbs: int = 1
    seq: int = 4096
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32
    vocab: int = 128256
    dtype: str = "bf16"
    distributed_optimizer: bool = True
    overlap: bool = True
    sequence_parallel: bool = True
    recompute: bool = False
    asynchronous: bool = False
    overlap_p2p: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.mbs * self.seq

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_matrix(self) -> int:
        """Matrix elements of one layer over all tp ranks."""
        qkv = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        return qkv + self.hidden**2 + 3 * self.hidden * self.ffn

    @property
    def layers_here(self) -> int:
        """Layers of one model chunk."""
        return self.layers // (self.pp * self.vpp)

    @property
    def activation(self) -> int:
        """Bytes of the tensor between two layers on one rank."""
        return 2 * self.tokens * self.hidden // (self.tp if self.sequence_parallel else 1)


def plan(job: Job) -> Plan:
    """The plan of a job."""
    held = tuple(tuple(job.layers_here for _ in range(job.vpp)) for _ in range(job.pp))
    fp8 = job.dtype.startswith("fp8")
    return Plan(
        model=Model(
            name="synthetic", num_layers=job.layers, hidden_size=job.hidden,
            ffn_hidden_size=job.ffn, num_heads=job.heads, num_kv_heads=job.kv_heads,
            head_dim=job.head_dim, vocab_size=job.vocab,
        ),
        parallelism=Parallelism(
            world_size=job.world, tp=job.tp, pp=job.pp, vpp=job.vpp,
            sequence_parallel=job.sequence_parallel,
            distributed_optimizer=job.distributed_optimizer, overlap_grad_reduce=job.overlap,
            overlap_param_gather=job.overlap and job.distributed_optimizer,
            overlap_p2p=job.overlap_p2p, layers_per_stage=held,
        ),
        batch=Batch(
            mbs=job.mbs, gbs=job.mbs * job.dp * job.microbatches, seq=job.seq, dp=job.dp
        ),
        precision=Precision(
            compute="fp8" if fp8 else job.dtype, recipe="tensorwise" if fp8 else ""
        ),
        recompute=Recompute(granularity="full" if job.recompute else "none"),
        schedule="interleaved" if job.vpp > 1 else "1f1b",
    )  # fmt: skip


def gemm(m: int, n: int, k: int, dtype: str = "bf16", layout: str = "tn") -> Op:
    """A matrix product whose operands and result are moved once, 2 bytes an element."""
    return Op(
        name="te.gemm", family=Family.GEMM, inputs=(), outputs=(), flops=2 * m * n * k,
        bytes=2 * (m * k + n * k + m * n),
        attrs=(("accumulate", False), ("batch", 1), ("dtype", dtype), ("k", k),
               ("layout", layout), ("m", m), ("n", n), ("out_dtype", "bf16")),
    )  # fmt: skip


def attention(job: Job, direction: str) -> Op:
    """Causal attention; backward is 2.5 forwards."""
    heads, dim = job.heads // job.tp, job.head_dim
    forward = 2 * job.mbs * heads * job.seq * (job.seq + 1) // 2 * 2 * dim
    return Op(
        name=f"te.attention_{direction}", family=Family.ATTENTION, inputs=(), outputs=(),
        flops=forward if direction == "forward" else forward * 5 // 2,
        bytes=8 * job.tokens * heads * dim,
        attrs=(("batch", job.mbs), ("causal", True), ("dim_qk", dim), ("dim_v", dim),
               ("direction", direction), ("dtype", "bf16"), ("fused", True), ("heads", heads),
               ("kv_heads", max(1, job.kv_heads // job.tp)), ("seq_kv", job.seq),
               ("seq_q", job.seq), ("window", (-1, -1))),
    )  # fmt: skip


def traffic(name: str, size: int, family: Family = Family.MEMORY) -> Op:
    """A kernel that moves ``size`` bytes."""
    return Op(name=f"fused.{name}", family=family, inputs=(), outputs=(), flops=0, bytes=size)


def collective(
    kind: CollectiveKind, group: str, size: int, asynchronous: bool = False
) -> Op:
    """One collective."""
    return Op(
        name=f"c10d.{kind}", family=Family.COLLECTIVE, inputs=(), outputs=(), flops=0, bytes=0,
        collective=Collective(kind=kind, group=group, bytes=size, dtype="bf16",
                              asynchronous=asynchronous),
    )  # fmt: skip


class Ops:
    """Interns ops as a recorder does."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def call(self, op: Op, phase: str) -> Call:
        if op not in self.ops:
            self.ops.append(op)
        return Call(op=self.ops.index(op), phase=phase, module="")

    def calls(self, ops: list[Op], phase: str) -> tuple[Call, ...]:
        return tuple(self.call(op, phase) for op in ops)


def _layer(job: Job, ops: Ops) -> Segment:
    t, h, f, d = job.tokens, job.hidden, job.ffn // job.tp, job.dtype
    qkv = job.head_dim * (job.heads + 2 * job.kv_heads) // job.tp
    gather = collective(CollectiveKind.ALL_GATHER, "tp", 2 * t * h, job.asynchronous)
    scatter = collective(CollectiveKind.REDUCE_SCATTER, "tp", 2 * t * h, job.asynchronous)
    talk = ([gather], [scatter]) if job.tp > 1 else ([], [])
    forward = [
        traffic("norm", 2 * job.activation), *talk[0], gemm(t, qkv, h, d),
        attention(job, "forward"), gemm(t, h, h // job.tp, d), *talk[1],
        traffic("norm", 2 * job.activation), *talk[0], gemm(t, 2 * f, h, d),
        traffic("swiglu", 6 * t * f), gemm(t, h, f, d), *talk[1],
    ]  # fmt: skip
    backward: list[Op] = []
    for op in reversed(forward):
        if op.family is Family.GEMM:
            a = dict(op.attrs)
            backward += [gemm(a["m"], a["k"], a["n"], d, "nn"), gemm(a["n"], a["k"], a["m"], d,
                                                                      "nt")]  # fmt: skip
        elif op.family is Family.ATTENTION:
            backward.append(attention(job, "backward"))
        else:
            backward.append(op)
    again = ops.calls(forward, "recompute") if job.recompute else ()
    return Segment(
        kind=ScopeKind.DENSE_LAYER, name="decoder.layers.0", count=job.layers_here,
        forward=ops.calls(forward, "forward"), backward=again + ops.calls(backward, "backward"),
    )  # fmt: skip


def _edges(job: Job, ops: Ops, first: bool, last: bool) -> list[Segment]:
    found = []
    if first:
        look_up = ops.calls([traffic("embedding", 2 * job.activation)], "forward")
        found.append(Segment(ScopeKind.EMBEDDING, "embedding", 1, look_up, look_up))
    if last:
        t, h, v = job.tokens, job.hidden, job.vocab // job.tp
        ahead = ops.calls([gemm(t, v, h), traffic("loss", 6 * t * v)], "forward")
        back = ops.calls(
            [traffic("loss", 6 * t * v), gemm(t, h, v, layout="nn"), gemm(v, h, t, layout="nt")],
            "backward",
        )
        found.append(Segment(ScopeKind.OUTPUT, "output_layer", 1, ahead, back))
    return found


def groups(job: Job, pp_rank: int) -> dict[str, tuple[int, ...]]:
    """Groups of the first rank of a stage, ranks in Megatron's order tp, dp, pp."""
    stage = job.tp * job.dp
    base = pp_rank * stage
    return {
        "tp": tuple(range(base, base + job.tp)),
        "dp": tuple(range(base, base + stage, job.tp)),
        "pp": tuple(range(0, job.world, stage)),
    }


def trace(job: Job, pp_rank: int) -> RankTrace:
    """One rank of a pipeline stage."""
    ops, chunks, buckets = Ops(), [], []
    params = 0
    for vpp_stage in range(job.vpp):
        first = pp_rank == 0 and vpp_stage == 0
        last = pp_rank == job.pp - 1 and vpp_stage == job.vpp - 1
        edges = _edges(job, ops, first, last)
        segments = [*edges[: 1 if first else 0], _layer(job, ops), *edges[1 if first else 0 :]]
        here = job.layer_matrix * job.layers_here // job.tp
        here += (first + last) * job.vocab * job.hidden // job.tp
        params += here
        saved = 17 * job.activation * job.layers_here
        if job.recompute:
            saved = job.activation * job.layers_here
        chunks.append(
            ChunkTrace(
                vpp_stage=vpp_stage, segments=tuple(segments),
                memory=ChunkMemory(saved_bytes=saved,
                                   forward_peak_bytes=saved + 2 * job.activation,
                                   backward_peak_bytes=saved + 4 * job.activation),
                boundary_bytes=0 if last else job.activation,
            )
        )  # fmt: skip
        for _ in range(BUCKETS):
            size = here // BUCKETS
            buckets.append(Bucket(parameters=size, group="dp", grad_bytes=4 * size,
                                  param_bytes=2 * size, chunk=vpp_stage))  # fmt: skip
    shards = job.dp if job.distributed_optimizer else 1
    step = ops.calls([traffic("adam", 28 * params // shards)], "step")
    return RankTrace(
        rank=pp_rank * job.tp * job.dp, pp_ranks=(pp_rank,), groups=groups(job, pp_rank),
        ops=tuple(ops.ops), chunks=tuple(chunks), step=step, buckets=tuple(buckets),
        parameters=params, global_parameters=params * job.tp,
        active_parameters=params * job.tp,
        static=StaticMemory(parameters=2 * params, gradients=4 * params,
                            optimizer=12 * params // shards, workspaces=64 * 2**20,
                            step_peak_bytes=4 * params // shards),
    )  # fmt: skip


def traces(job: Job) -> list[RankTrace]:
    """One trace for every distinct stage: first, middle ones, last."""
    if job.pp < 4:
        return [trace(job, rank) for rank in range(job.pp)]
    middle = dataclasses.replace(trace(job, 1), pp_ranks=tuple(range(1, job.pp - 1)))
    return [trace(job, 0), middle, trace(job, job.pp - 1)]
