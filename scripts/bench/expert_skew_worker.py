"""Trains a tiny mixture of experts whose router is even and skewed in turn, and times the steps.

    torchrun --nproc-per-node 2 expert_skew_worker.py OUT.json [SKEW,...] OVERRIDES...

Run by ``expert_skew.py``.  Everything is ``scripts/train.py`` on CPUs over gloo, but for two
things.  The router's choice is replaced by one in which the busiest expert-parallel rank of each
layer gets SKEW times the mean: the first SKEW in the first step and so on, again and again.
Between the steps the rates of matrix products, of memory traffic and of an all-to-all are measured,
on both ranks at once.

Every rank writes OUT.json.RANK: for each counted step its skew, its seconds by the clock, and the
seconds of its core between one exchange of tokens and the next, without waiting: other programs on
the machine change the former and not the latter.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]

class Rates:
    """Work of known size between the steps, so that it meets the same neighbours as they do."""

    def __init__(self, exchange: Callable[..., Any]) -> None:
        """``exchange``: torch's all-to-all."""
        import torch
        from megatron.training import get_args

        args: Any = get_args()
        copies = args.seq_length * args.micro_batch_size * args.moe_router_topk
        rows = copies * args.world_size // args.num_experts
        hidden, ffn = args.hidden_size, args.moe_ffn_hidden_size
        layers = [
            (torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n))
            for k, n in ((hidden, 2 * ffn), (ffn, hidden))
        ]
        c, d = torch.randn(2**24), torch.randn(2**24)
        sent, received = torch.randn(2**18), torch.empty(2**18)
        cores, clock = time.thread_time, time.perf_counter
        self._kinds = {
            # forward, input and weight gradient of an expert whose load is even
            "flops": (18 * rows * hidden * ffn, 3, cores, lambda: [
                (torch.mm(x, w.T), torch.mm(y, w), torch.mm(y.T, x)) for x, w, y in layers
            ]),
            # two tensors beyond all caches into a new one
            "stream": (3 * c.nbytes, 3, cores, lambda: torch.mul(c, d)),
            "exchange": (sent.nbytes // 2, 3, clock, lambda: exchange(received, sent)),
        }  # fmt: skip
        self._seconds: dict[str, list[float]] = {name: [] for name in self._kinds}

    def sample(self) -> None:
        """Do all of it a few times."""
        for name, (_, repeats, clock, work) in self._kinds.items():
            for _ in range(repeats):
                start = clock()
                work()
                self._seconds[name].append(clock() - start)

    def medians(self) -> dict[str, float]:
        """FLOP/s and bytes/s."""
        return {
            name: work / statistics.median(self._seconds[name])
            for name, (work, *_) in self._kinds.items()
        }


class Worker:
    """Patches Megatron and keeps the times."""

    def __init__(self, skews: tuple[float, ...]) -> None:
        """``skews``: tokens of the busiest rank of a layer over the mean, in step after step."""
        import torch

        self.torch, self.skews = torch, skews
        self.step, self.current = 0, 1.0
        self.steps: list[dict[str, Any]] = []
        self._sections: list[float] = []
        self._mark = 0.0
        self.rates: Rates

    def install(self) -> None:
        """Patch the router, the exchange of tokens and the step."""
        import megatron.training.training as training
        from megatron.core.transformer.moe.router import TopKRouter

        from primus_ext.frameworks.megatron import expert_load, expert_skew
        from primus_ext.frameworks.megatron.routing import map_of

        torch, routing = self.torch, TopKRouter.routing
        exchange, train_step = torch.distributed.all_to_all_single, training.train_step

        def forced(router: Any, logits: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            routing(router, logits, *args, **kwargs)
            flat = logits.reshape(-1, router.config.num_moe_experts)
            tokens, config = flat.shape[0], router.config
            counts = (
                expert_skew.skewed(router.layer_number - 1, tokens, config, self.current)
                if self.current > 1
                else expert_load.balanced(tokens, config.num_moe_experts, config.moe_router_topk)
            )
            chosen = map_of(counts, tokens)
            return torch.softmax(flat.float(), -1).masked_fill(~chosen, 0.0).to(flat.dtype), chosen

        def marked(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("async_op"):
                raise RuntimeError("this worker does not overlap the exchange of tokens")
            self._section()
            exchange(*args, **kwargs)
            self._mark = time.thread_time()

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.step:
                self.rates = Rates(exchange)
            torch.distributed.barrier()
            self.rates.sample()
            self.current = self.skews[self.step % len(self.skews)]
            torch.distributed.barrier()
            self._sections, self._mark = [], time.thread_time()
            start = time.perf_counter()
            found = train_step(*args, **kwargs)
            self._section()
            torch.distributed.barrier()
            if self.step >= len(self.skews):  # the first of each kind allocates memory
                self.steps.append({
                    "skew": self.current, "seconds": time.perf_counter() - start,
                    "sections": self._sections,
                })  # fmt: skip
            self.step += 1
            return found

        setattr(TopKRouter, "routing", forced)
        torch.distributed.all_to_all_single = marked
        training.train_step = timed

    def _section(self) -> None:
        """An exchange of tokens begins, or the step has ended."""
        self._sections.append(time.thread_time() - self._mark)


def main(out: str, skews: tuple[float, ...], overrides: list[str]) -> None:
    """Train, and write what was measured."""
    from primus_ext.emulate import virtual_cuda

    on_cpu = virtual_cuda.enable_cpu_training()
    virtual_cuda.enable_cpu_training = lambda: on_cpu  # train.py asks again
    worker = Worker(skews)
    worker.install()
    sys.argv = [str(REPO / "scripts" / "train.py"), *overrides]
    runpy.run_path(sys.argv[0], run_name="__main__")
    text = json.dumps({"steps": worker.steps, "rates": worker.rates.medians()})
    Path(f"{out}.{os.environ['RANK']}").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], tuple(json.loads(sys.argv[2])), sys.argv[3:])
