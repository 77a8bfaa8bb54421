"""Parallel degrees, the split of layers over stages, data parallelism."""

from __future__ import annotations

from typing import Any

from primus_ext.frameworks import published_fsdp
from primus_ext.frameworks.published import launchers
from primus_ext.frameworks.published.draft import Draft, NotProjectable

_ONE_F_ONE_B = ("1f1b", "interleaved")
"""Schedules that Megatron-LM runs; others (zero-bubble, V schedules) are skipped."""


def write(draft: Draft) -> None:
    """Arguments of the parallel layout.

    Raises:
        NotProjectable: a schedule that Megatron-LM lacks, or a degree that is not stated.
    """
    parallelism = draft.run["parallelism"]
    tp, pp = draft.stated(parallelism, "tp"), draft.stated(parallelism, "pp")
    vpp = parallelism.get("vpp") or 1
    _schedule(parallelism)
    draft.add(
        "--tensor-model-parallel-size", tp,
        "--pipeline-model-parallel-size", pp,
        "--context-parallel-size", parallelism.get("cp") or 1,
    )  # fmt: skip
    if parallelism.get("cp_comm"):
        draft.add("--cp-comm-type", parallelism["cp_comm"])
    _split(draft, pp, vpp)
    if parallelism.get("sequence_parallel") and tp > 1:
        draft.add("--sequence-parallel")
    if draft.run["model"].get("num_experts"):
        draft.add(
            "--expert-model-parallel-size", draft.stated(parallelism, "ep"),
            "--expert-tensor-parallel-size", launchers.expert_tensor_parallel(draft),
        )  # fmt: skip
        if tp > 1 and "--sequence-parallel" not in draft.argv:
            draft.add("--sequence-parallel")
            draft.note("sequence parallelism: Megatron-LM wants it for experts under tp")
    if draft.is_on("TP_PP_DP_MAPPING"):
        draft.add("--use-tp-pp-dp-mapping")
    _data_parallel(draft, parallelism)


def _schedule(parallelism: dict[str, Any]) -> None:
    schedule = str(parallelism.get("pp_schedule") or "1f1b").lower()
    if not any(name in schedule for name in _ONE_F_ONE_B):
        raise NotProjectable(f"schedule {parallelism['pp_schedule']} is none of Megatron-LM's")


def _split(draft: Draft, pp: int, vpp: int) -> None:
    """Layers over stages: as stated, evenly, or as evenly as Megatron-LM's options allow."""
    layers, stages = draft.run["model"]["num_layers"], pp * vpp
    told = draft.flag("pp_layout")
    asymmetric = draft.is_on("ASYM_PP_EMBED")
    partition = str(draft.run["parallelism"].get("pp_partition") or "")
    if told is not None:
        draft.add("--pipeline-model-parallel-layout", told)
        return
    if pp > 1 and (asymmetric or "embed" in partition):
        draft.add(*_BOTH_ENDS)
    elif pp > 1 and layers % stages and not (layers + 2) % stages:
        draft.add(*_BOTH_ENDS)
        draft.note("embedding and loss count as layers of the split (it is not stated)")
    elif layers % stages:
        mtp = draft.run["model"].get("mtp_layers") or 0
        draft.add("--pipeline-model-parallel-layout", layout(layers, stages, mtp))
        draft.note("the split of layers is not stated: full stages first")
        return
    if vpp > 1:
        draft.add("--num-virtual-stages-per-pipeline-rank", vpp)


_BOTH_ENDS = (
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip


def layout(layers: int, stages: int, mtp_layers: int) -> str:
    """A layout in Megatron-LM's notation with the least largest stage, full stages first.

    Args:
        layers: Transformer layers.
        stages: Virtual stages.
        mtp_layers: Multi-token prediction layers, kept beside the loss.
    """
    full, left, words = -(-layers // stages), layers, []
    for _ in range(stages):
        here = min(full, left)
        left -= here
        words.append("t" * here)
    words[0] = "E" + words[0]
    words[-1] += "m" * mtp_layers + "L"
    return "|".join(words)


def _data_parallel(draft: Draft, parallelism: dict[str, Any]) -> None:
    sharded = published_fsdp.arguments(draft.run, draft.notes) if draft.fsdp else None
    if sharded is not None:
        draft.add(*sharded)
        return
    if not (parallelism.get("distributed_optimizer") or draft.fsdp):
        return
    draft.add("--use-distributed-optimizer")
    overlap = draft.is_on("overlap_grad_reduce", "OVERLAP_GRAD_REDUCE")
    gather = draft.is_on("overlap_param_gather", "OVERLAP_PARAM_GATHER")
    if "DeepSpeed" in draft.framework:
        overlap = gather = False  # its pipeline engine reduces after the last backward
    elif overlap is None:
        overlap = True
        draft.note("overlap of data-parallel communication not stated: assumed")
    if overlap:
        draft.add("--overlap-grad-reduce")
        if gather is not False:
            draft.add("--overlap-param-gather")
