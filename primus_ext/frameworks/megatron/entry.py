"""The training entry point: from here on the program is observed instead of trained."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from primus_ext.emulate import no_te, registry, releases, session, virtual_cuda
from primus_ext.frameworks.megatron import (  # noqa: F401  (declare)
    chunk_sort,
    fsdp_patches,
    offloading,
    packed,
    patches,
    routing,
    shapes,
    validation_gaps,
    world_patches,
)
from primus_ext.trace import RankTrace, to_plain


def install() -> None:
    """Hook ``megatron.training.pretrain`` before the program can import it."""
    registry.apply_all(world_patches.WORLD)
    registry.apply_all("megatron_entry")
    request = session.installed_for
    if "measure" in request:  # the program's own kernels and values: nothing else is replaced
        return
    registry.apply_all("megatron")
    if no_te.absent() and not virtual_cuda.is_host(request["device"]):
        no_te.install()


@registry.patch("megatron.training.training", "pretrain", group="megatron_entry",
                versions="megatron-core 0.19",
                reason="the entry point: arguments are validated, nothing has been built yet")
def _pretrain(module: Any) -> None:
    original = module.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> None:
        session.imported()
        unfit = releases.problem()
        if unfit is not None and not releases.allowed():
            session.current().fail(session.EXIT_CONFIG, unfit)
        if unfit is not None:
            session.current().warnings.append(unfit)
        project(original, inspect.signature(original).bind(*args, **kwargs))

    module.pretrain = pretrain


def project(original: Callable[..., Any], call: inspect.BoundArguments) -> None:
    """Trace every distinct pipeline rank of the job and finish the session.

    Args:
        original: Megatron's own ``pretrain``.
        call: The user's arguments to it.
    """
    from primus_ext.frameworks.megatron import (
        graphs,
        many_shapes,
        measuring,
        plans,
        rank,
        real_rank,
        roles,
        whole_rank,
    )

    active = session.current()
    try:
        if "shrunk" in active.request:
            call = shapes.reshaped(call, active.request["shrunk"])
        arguments = plans.arguments()
        plans.refuse_unsupported(arguments)
        graphed = graphs.set_aside(arguments, call.arguments["cfg_container"])
        config = plans.transformer_config(call.arguments["cfg_container"])
        plan = plans.read(arguments, config)
        plan = dataclasses.replace(plan, flags=plan.flags | graphed)
        plans.require_format(plan, active.request)
        members = [(stage, None) for stage in roles.distinct_stages(arguments, config)]
        if "ranks" in active.request:  # these instead of one of each kind
            members = [
                ((roles.pp_rank(r, arguments),), r) for r in active.request["ranks"]
            ]
        if "shapes" in active.request:
            active.finish(to_plain(plan), None, many_shapes.record_all(original, call, active))
        if "measure" in active.request:
            measured = measuring.ranks(original, call, members)
            active.finish(to_plain(plan), None, [to_plain(one) for one in measured])
        if active.request.get("whole"):
            real = active.request.get("storage") == "real"
            peak = real_rank.peak if real else whole_rank.peak
            wholes = [
                active.in_fork(lambda r=r: peak(original, call, r))
                for r in active.request["ranks"]
            ]
            active.finish(to_plain(plan), None, wholes)
        traces: list[RankTrace] = []
        for number, (pp_ranks, member) in enumerate(members):
            active.progress(number, len(members), f"pipeline stage {pp_ranks[0]}")
            traces.append(
                active.in_fork(
                    lambda pp_ranks=pp_ranks, member=member: rank.trace(
                        original, call, pp_ranks, member
                    )
                )
            )
        active.progress(len(members), len(members), "composing")
        program = plans.program(active.request)
    except session.ProgramError as error:
        active.fail(session.EXIT_CONFIG, str(error))
        return
    except Exception as error:  # not through the user's program, which would handle it
        traceback.print_exc()
        active.fail(session.EXIT_INTERNAL, f"the job could not be traced: {error}")
        return
    active.finish(to_plain(plan), to_plain(program), [to_plain(t) for t in traces])
