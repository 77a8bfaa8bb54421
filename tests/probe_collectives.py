"""One rank of a real multi-process run over gloo: which collectives its second step issues.

``RANK=0 WORLD_SIZE=2 ... python tests/probe_collectives.py OUT MEGATRON-ARGUMENTS``: Megatron's own
``pretrain`` with real tensors, on the CPU kernels of the stand-in for Transformer Engine.  What is
counted comes from the methods of torch's process groups, which every collective of Python goes
through; nothing of ``primus_ext.observe`` takes part.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

SINGLE = {
    # method -> (kind, which argument holds the whole buffer)
    "allreduce": ("all_reduce", 0), "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0), "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0), "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1), "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall_base": ("all_to_all", 1), "all_to_all_single": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1), "reduce": ("reduce", 0), "gather": ("gather", 0),
    "scatter": ("scatter", 0), "send": ("send", 0), "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}  # fmt: skip
OTHERS = {"barrier", "monitored_barrier"}
counting = False
found = []


def tensors(value):
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def count_everything():
    """Wrap the methods of the process group; one that is not known is an error when called."""
    import torch.distributed as dist

    owner = dist.ProcessGroup
    for name, original in list(vars(owner).items()):
        if name in SINGLE:
            setattr(owner, name, counted(original, *SINGLE[name], name))
    missing = {n for n in vars(owner) if "all" in n or "reduce" in n or "scatter" in n}
    missing -= set(SINGLE) | OTHERS
    for name in missing:
        setattr(owner, name, refused(name))


def refused(name):
    def call(*_args, **_kwargs):
        raise RuntimeError(f"the probe does not know the collective {name}")

    return call


def counted(original, kind, position, name):
    import functools

    import torch.distributed as dist

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        ranks = sorted(dist.get_process_group_ranks(self))
        if counting and len(ranks) > 1:
            buffers = tensors(args[position])
            size = sum(t.numel() * t.element_size() for t in buffers)
            row = {"kind": kind, "ranks": ranks, "bytes": size, "method": name}
            if kind in ("send", "recv"):
                row["peer"] = dist.get_global_rank(self, args[1])
            found.append(row)
        work = original(self, *args, **kwargs)
        return Once(work) if kind in ("send", "recv") else work

    return call


class Once:
    """A transfer that may be waited for again, as Transformer Engine's ring does in its backward.

    gloo's own would wait for another message; NCCL's returns.
    """

    def __init__(self, work):
        self.work, self.done = work, False

    def wait(self, *args):
        self.done = self.done or self.work.wait(*args)
        return self.done

    def __getattr__(self, name):
        return getattr(self.work, name)


def batches(args):
    import torch

    shape = (args.micro_batch_size, args.seq_length)
    while True:
        yield {
            "tokens": torch.randint(0, args.vocab_size, shape),
            "labels": torch.randint(0, args.vocab_size, shape),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(args.seq_length).expand(shape).contiguous(),
        }


def balance():
    """Every expert gets the same number of tokens; the probabilities are the router's."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def balanced(self, *args, **kwargs):
        probabilities, chosen = forward(self, *args, **kwargs)
        count, experts = chosen.shape
        turn = torch.arange(count * self.topk).remainder(experts).view(count, self.topk)
        chosen.zero_().scatter_(1, turn, True)
        return probabilities, chosen

    TopKRouter.forward = balanced


def train(out):
    """Two steps of Megatron's own loop; the second one is counted."""
    global counting
    import megatron.training.initialize as initialization
    import megatron.training.training as training
    from megatron.core.rerun_state_machine import RerunDataIterator

    from primus_ext.frameworks.megatron import gpt_program

    args = None

    def data(*_args, **_kwargs):
        nonlocal args
        from megatron.training import get_args

        args = get_args()
        args.do_train, args.do_valid, args.do_test = True, False, False
        return RerunDataIterator(batches(args)), None, None

    step, log, done = training.train_step, training.training_log, []

    def counted_step(*a, **k):
        global counting
        counting = len(done) == 1
        return step(*a, **k)

    def logged(*a, **k):
        global counting
        result = log(*a, **k)
        counting = False
        done.append(1)
        if len(done) == 2:
            Path(out).write_text(json.dumps(found))
            training.torch.distributed.barrier()
            os._exit(0)
        return result

    initialize = training.initialize_megatron
    initialization._compile_dependencies = lambda: None
    training.initialize_megatron = lambda *a, **k: initialize(*a, **{**k, "allow_no_cuda": True})
    training.set_jit_fusion_options = lambda *a, **k: None
    training.build_train_valid_test_data_iterators = data
    training.train_step, training.training_log = counted_step, logged
    balance()
    gpt_program.main()


def main():
    out, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]
    sharded = any("fsdp" in word for word in sys.argv)  # Megatron then refuses 1
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if sharded else "1"
    from primus_ext.emulate import apex_wgrad, registry, te, triton_kernels, virtual_cuda

    faulthandler.dump_traceback_later(300, exit=True)  # a run that hangs says where
    count_everything()
    virtual_cuda.install(virtual_cuda.DeviceProfile("h100", (9, 0), 80 * 2**30, 132, 8))
    te.install(compute_capability=(9, 0))
    apex_wgrad.install()
    registry.apply_all(triton_kernels.GROUP)
    from primus_ext.emulate import shims_cpu  # noqa: F401

    for item in registry.registered("cpu_training"):
        if item.name.endswith("splits"):  # gloo takes lists of split sizes
            import megatron.core.transformer.moe.moe_utils as module

            item.apply(module)
    train(out)


if __name__ == "__main__":
    main()
