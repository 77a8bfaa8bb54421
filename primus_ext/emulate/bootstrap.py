"""Start the user's program inside the virtual world: ``python -m ... REQUEST.json``.

Frameworks decide at import what they are (Transformer Engine present? torch.compile?), so
everything is installed here, before the first import of the user's program.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from primus_ext.emulate import releases
from primus_ext.emulate import session as sessions


def main(request_path: str) -> None:
    """Run the program named in the request up to its training entry point.

    Args:
        request_path: JSON.  ``script`` or ``module``, ``args`` and ``cwd``: the program.
            ``device``: name, compute_capability, total_memory, multi_processor_count, warp_size.
            ``world_size``, ``gpus_per_node`` and ``formats`` (numbers it computes in): the target.
            ``frameworks``: modules that hook entry points.  ``result``: where the answer goes.
            Optional: ``name`` of the model; ``ranks``, global ranks to run instead of one of each
            kind; ``routing``, recorded token counts of experts, as a table or the path of one (see
            ``expert_load``); ``expert_skew``, tokens of each layer's busiest expert-parallel rank
            over the mean; ``routing_out``, path where the counts of real tensors go; ``whole``,
            run Megatron's own loop for them and report its peak; ``storage``,
            ``real`` for tensors with data (small jobs); ``rendezvous``, the file over which real
            processes meet that are the ranks (gloo; with ``whole`` and ``storage=real``);
            ``origins``, False to leave out where dimensions come from, half of the time;
            ``memory``, False to leave out what memory alone needs (microbatches beside others),
            half of the time of experts in a pipeline (``RankTrace.only_timed``);
            ``every_chunk``, record also those model chunks that equal another one; ``shapes``,
            record these parallel shapes at several points instead
            (:mod:`primus_ext.frameworks.megatron.layer_space`); ``measure``, time the program on
            the device at hand instead (:class:`primus_ext.frameworks.megatron.pace.Asked`);
            ``shrunk``, other values of Megatron's arguments by name, those of a smaller world.
    """
    answer(json.loads(Path(request_path).read_text()))


def answer(request: dict[str, Any], installed: bool = False) -> NoReturn:
    """Answer one request and leave the process.

    Args:
        request: See :func:`main`.
        installed: The virtual world stands already (:mod:`primus_ext.emulate.batch`).
    """
    session = sessions.Session(request)
    try:
        if not installed:
            install(request)
        run_program(request)
    except sessions.ProgramError as error:
        session.fail(sessions.EXIT_CONFIG, str(error))
    except SystemExit as leaving:
        _left(session, leaving)
    except BaseException as error:
        from primus_ext.emulate.tripwire import TrainingAttempted

        if isinstance(error, TrainingAttempted):
            session.fail(sessions.EXIT_CONFIG, str(error))
        traceback.print_exc()
        _judge_releases(session, error)
        judgement = sessions.judgement_of(error)
        if judgement is not None:
            session.fail(sessions.EXIT_CONFIG, judgement)
        session.fail(
            sessions.EXIT_INTERNAL,
            f"the program stopped before its training entry point: {type(error).__name__}: {error}",
        )
    session.fail(
        sessions.EXIT_CONFIG,
        "the program ended without reaching a training entry point that primus_ext knows "
        "(megatron.training.pretrain), so there is nothing to project",
    )


def _judge_releases(session: sessions.Session, error: BaseException) -> None:
    """Leave with the reason behind ``error`` where a framework is missing or another release."""
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    missing = any(isinstance(one, ImportError) for one in chain)
    unfit = releases.problem(missing=missing)
    if unfit is not None and not releases.allowed():
        session.fail(sessions.EXIT_CONFIG, unfit)


def _left(session: sessions.Session, leaving: SystemExit) -> None:
    code = leaving.code
    if code in (0, None):
        return
    _judge_releases(session, leaving)
    if isinstance(code, str):
        session.fail(sessions.EXIT_CONFIG, code)
    if code == sessions.EXIT_CONFIG and leaving.__cause__ is not None:
        session.fail(sessions.EXIT_CONFIG, str(leaving.__cause__))  # the program's own judgement
    session.fail(
        int(code) if code in (1, 2) else sessions.EXIT_INTERNAL,
        f"the program left with exit code {code} before its training entry point",
    )


def install(request: dict[str, Any]) -> None:
    """Put the virtual world in place; before anything of the frameworks is imported.

    No garbage is collected until the program reaches its entry point
    (:func:`primus_ext.emulate.session.imported`): what is imported stays, and looking through it
    again and again is a fifth of the time that it takes.
    """
    gc.disable()
    from primus_ext.emulate import (
        apex_wgrad,
        deep_ep,
        mamba,
        program_arguments,
        registry,
        te,
        tripwire,
        triton_kernels,
        virtual_cuda,
    )

    world, local = int(request["world_size"]), int(request["gpus_per_node"])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local),
        MASTER_ADDR="localhost", MASTER_PORT="0",
    )  # fmt: skip
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        sessions.chosen.add("CUDA_DEVICE_MAX_CONNECTIONS")
    device = dict(request["device"])
    if virtual_cuda.is_host(device):
        virtual_cuda.enable_cpu_training()
    elif "measure" not in request:
        device["compute_capability"] = tuple(device["compute_capability"])
        virtual_cuda.install(virtual_cuda.DeviceProfile(device_count=local, **device))
        te.install(compute_capability=device["compute_capability"])
        apex_wgrad.install()
        deep_ep.install()
        mamba.install()
        registry.apply_all(triton_kernels.GROUP)
    registry.apply_all(program_arguments.GROUP)
    tripwire.arm()
    for framework in request["frameworks"]:
        importlib.import_module(framework).install(request)


def run_program(request: dict[str, Any]) -> None:
    """Run the program of the request as ``__main__``."""
    os.chdir(request["cwd"])
    if request.get("module"):
        sys.argv = [request["module"], *request["args"]]
        sys.path.insert(0, request["cwd"])
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        return
    script = request["script"]
    sys.argv = [script, *request["args"]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
