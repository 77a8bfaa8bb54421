"""The oracle of memory: a rank's whole step, run by Megatron's own training loop.

Every microbatch of the schedule runs, with the other ranks virtual.  Composition must give the
same peak, to the byte; it does so for any number of microbatches in the time of one.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

from primus_ext.emulate import session
from primus_ext.frameworks.megatron import microbatch, plans, rank
from primus_ext.observe.recorder import Recorder


def peak(
    original: Callable[..., Any], call: inspect.BoundArguments, member: int
) -> dict[str, int]:
    """Run two steps of one rank and report the second; meant to run in a fork.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        member: Global rank.

    Returns:
        ``rank``, and in bytes ``peak_bytes`` during the second step, ``live_bytes`` before it and
        ``host_peak_bytes`` in host memory.
    """
    return rank.run(original, call, member, two_steps)


def two_steps(
    recorder: Recorder, member: int, training: inspect.BoundArguments
) -> dict[str, int]:
    """Megatron's own loop over two steps, in place of training; see :func:`peak`."""
    import megatron.training.training as module
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        get_rerun_state_machine,
    )

    _answer_shapes(training.arguments["model"])
    # A rerun's copies of the batches lie in host memory; the virtual device would count them.
    get_rerun_state_machine().mode = RerunMode.DISABLED
    args = plans.arguments()
    args.train_iters, args.eval_iters, args.log_interval = 2, 0, 1000
    chunks = len(training.arguments["model"])
    streams = [RerunDataIterator(microbatch.batches(args)) for _ in range(chunks)]
    training.arguments["train_data_iterator"] = streams if chunks > 1 else streams[0]
    step, live = module.train_step, [0]

    def second_from_here(*a: Any, **k: Any) -> Any:
        gc.collect()
        live[0] = recorder.memory.live
        recorder.memory.reset_peak()
        recorder.host.reset_peak()
        return step(*a, **k)

    module.train_step = second_from_here
    module.training_log = lambda *_, **__: False
    module.train(*training.args, **training.kwargs)
    return {
        "rank": member,
        "peak_bytes": recorder.memory.peak,
        "live_bytes": live[0],
        "host_peak_bytes": recorder.host.peak,
    }


def _answer_shapes(model: list[Any]) -> None:
    """What neighbours say of the shapes that they send, where these differ between stages.

    Raises:
        ProgramError: it depends on the chunk.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.utils import get_model_config

    config, request = get_model_config(model[0]), session.current().request
    if not config.mtp_standalone or "rendezvous" in request:
        return
    if len(model) > 1:
        raise session.ProgramError(
            f"whole=True can't be combined with {len(model)} model chunks and a stage of "
            "multi-token predictions: its neighbours' shapes are not known; legal: one chunk"
        )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    asked = P2PCommunicator._communicate_shapes

    def answered(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked(self, *args, **kwargs)
        return [microbatch.received_shape(config, stage + behind) for behind in (0, 1)]

    P2PCommunicator._communicate_shapes = answered
