"""A real rank of a training job whose steps begin when the benchmark says so, and are timed.

``python scripts/bench/measured_cpu_worker.py ADDRESS scripts/train.py OVERRIDE...`` with the
variables of torchrun; see ``scripts/bench/measured_cpu.py``.
"""

from __future__ import annotations

import functools
import runpy
import sys
import time
from typing import Any

from primus_ext.emulate import registry
from primus_ext.frameworks.megatron.pace import Led

WAIT_S = 900.0
ADDRESS = sys.argv[1]


@registry.patch("megatron.training.training", "train_step", group="bench_steps",
                versions="megatron-core 0.19", reason="steps begin together and are timed")
def _steps(module: Any) -> None:
    step, gate = module.train_step, Led(ADDRESS, WAIT_S)

    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        gate.pass_()
        begin = time.perf_counter()
        try:
            return step(*args, **kwargs)
        finally:
            gate.done(time.perf_counter() - begin)

    module.train_step = timed


def main() -> None:
    """Run the program with the patch."""
    registry.apply_all("bench_steps")
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
