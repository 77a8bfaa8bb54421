"""What a projection leaves out, said in the projection."""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cluster_files import assumptions
from primus_ext.plan import Plan, is_packed, is_sharded
from primus_ext.project import allocator_config, stage
from primus_ext.project.footprint import replayable
from primus_ext.project.memory import SLACK
from primus_ext.trace import Family, RankTrace

_ALWAYS = (
    "synchronisations of host and device inside a layer: the host is late only over a whole layer",
    "compute slowed down by collectives that run beside it, and the reverse",
    "collectives of different kinds at the same time: each has the links to itself",
    "contention between nodes beyond the oversubscription that the target states",
    "data loading, logging, evaluation, checkpoints, stragglers and jitter",
)


def not_modelled(plan: Plan, stages: Sequence[RankTrace], cluster: Cluster) -> tuple[str, ...]:
    """Lines about this job on this target, the general ones last.

    Args:
        plan: The job.
        stages: Trace of every pipeline rank.
        cluster: The target.
    """
    lines = []
    if plan.flags.get("transformer_engine_absent") and (
        plan.flags.get("transformer_impl") == "transformer_engine"
    ):
        lines.append(
            "Transformer Engine is not installed here: its layers are those of a stand-in, "
            "Megatron's linear layers with this package's norm, attention and grouped experts"
        )
    uneven = any(trace.experts is not None for trace in stages)
    if plan.model.num_experts:
        lines.append(
            "tokens of experts on other ranks: every rank routes as the recorded one"
            if uneven
            else "imbalance between experts: every expert gets the same number of tokens"
        )
    if uneven and is_sharded(plan.flags):
        lines.append(
            "waiting for each layer's busiest expert rank: with sharded parameters the layers are "
            "those of the rank with most tokens over all of them"
        )
    if is_packed(plan.flags):
        lines.append(
            "lengths of packed documents: each fills its sequence, shorter ones need less attention"
        )
    if plan.flags.get("moe_shared_expert_overlap"):
        lines.append("the backward of shared experts beside the dispatch: counted as not hidden")
    if plan.flags.get("overlap_moe_expert_parallel_comm"):
        lines.append(
            "overlap of expert communication with other layers' work: sharded parameters"
            if any(stage.parts_overlap(trace, c) for trace in stages for c in trace.chunks)
            else "combined 1F1B: temporaries of both microbatches at once"
        )
    if plan.flags.get("delay_wgrad_compute"):
        lines.append("delay_wgrad_compute: memory that delayed weight gradients hold")
    if plan.flags.get("tp_comm_overlap"):
        lines.append("tp_comm_overlap: products that are cut in pieces are slower")
    instances = int(plan.flags.get("num_distributed_optimizer_instances", 1) or 1)
    if instances > 1 and not is_sharded(plan.flags):
        lines.append("several distributed-optimizer instances: priced as one")
    if plan.flags.get("cuda_graph_impl") not in (None, "", "none"):
        lines.append("CUDA graphs: the memory of their pools")
    if any(op.family is Family.TRANSFER for trace in stages for op in trace.ops):
        lines.append(
            "time of copies between host and device memory, and of what the host computes on them"
        )
    if plan.optimizer == "soap":
        lines.append("soap: time of its eigenvectors beyond their memory traffic")
    cores = cluster.accelerator.host_cores
    if cores is not None and not cluster.hides_communication:
        lines.append(
            f"communication beside computation: {cluster.gpus_per_node} processes have "
            f"{cores.value:.0f} core(s), so what of it takes a core is not hidden, and of "
            "overlapped pipeline transfers nothing"
        )
    if cluster.accelerator.vendor == "amd":
        lines.append("ROCm's own Transformer Engine kernels: the ops are those of NVIDIA's wheel")
    lines += _allocator(plan, stages)
    return (*lines, *_ALWAYS)


def assumed(cluster: Cluster) -> tuple[str, ...]:
    """One line on the accelerator's figures that no file states, if there are any.

    That a GPU has a NIC of its own is said in the provenance alone.
    """
    found = assumptions(cluster)
    names = sorted(name for name in found if name != "nics_per_node")
    if not names:
        return ()
    return (
        f"{cluster.accelerator.name}: {len(names)} figure(s) assumed, not stated "
        f"(provenance.assumed says from what): {', '.join(names)}",
    )


def _allocator(plan: Plan, stages: Sequence[RankTrace]) -> list[str]:
    """What is said of PyTorch's caching allocator."""
    if not all(replayable(trace) for trace in stages):
        return [f"allocator fragmentation: {SLACK:.1%} of the peak (median of published runs)"]
    variable = allocator_config.variable(plan.flags)
    lines = [
        "allocator: side streams are not told apart, and new segments lie at rising addresses"
    ]
    if variable:
        lines.append(f"allocator settings are {variable}={plan.flags[variable]}")
    return lines
