"""The virtual CUDA device, the registry of patches, and the local layers for CPUs."""

import pytest

from tests.training import run_python

INSTALL = """
import sys
from primus_ext.emulate.virtual_cuda import DeviceProfile, install, installed_device
H100 = DeviceProfile("h100", (9, 0), 80 * 2**30, 132, 8)
install(H100)
import torch
"""


def test_answers_for_the_device_without_one():
    run_python(INSTALL + """
assert not torch.cuda.is_available() and torch.cuda.device_count() == 8
assert torch.cuda.get_device_capability() == (9, 0)
properties = torch.cuda.get_device_properties(0)
assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
assert properties.total_memory == 80 * 2**30 and torch.cuda.get_device_name() == "h100"
assert torch.cuda.current_device() == torch.device("cpu")
torch.cuda.set_device(3); torch.cuda.synchronize(); torch.cuda.empty_cache()
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
assert torch.cuda.max_memory_allocated() == 0
with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream()) as stream:
    stream.wait_stream(torch.cuda.current_stream())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(); end.record()
assert start.elapsed_time(end) >= 0 and end.query()
""")


def test_tensors_asked_for_on_cuda_live_on_the_cpu():
    run_python(INSTALL + """
import io
for tensor in (
    torch.zeros(2, device="cuda"), torch.ones(2, device=torch.device("cuda", 1)),
    torch.tensor([1.0], device="cuda:0"), torch.empty(2, device=0), torch.zeros(2).cuda(),
    torch.zeros(2).to("cuda"), torch.zeros(2).to(0), torch.rand(2, pin_memory=True).pin_memory(),
    torch.nn.Linear(2, 2).to("cuda").weight, torch.nn.Linear(2, 2, device="cuda").weight,
    torch.zeros(2).to("cuda", torch.float64), torch.arange(3, device="cuda"),
):
    assert tensor.device.type == "cpu"
assert torch.zeros(2).to(torch.float64).dtype == torch.float64
assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
assert torch.zeros(2).type(torch.float64).dtype == torch.float64
assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
""")


def test_cuda_literals_also_work_inside_backward():
    run_python(INSTALL + """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + torch.zeros(3, device="cuda")

for backward in (
    lambda y: y.sum().backward(),
    lambda y: y.backward(torch.ones(3)),
    lambda y: y.backward(gradient=torch.ones(3)),
    lambda y: torch.autograd.backward(y, torch.ones(3)),
):
    x = torch.ones(3, requires_grad=True)
    backward(Doubled.apply(x))
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
x = torch.ones(3, requires_grad=True)
assert torch.autograd.grad(Doubled.apply(x).sum(), x)[0].tolist() == [2.0, 2.0, 2.0]
""")


def test_random_state_of_the_device_is_the_one_that_fills_its_tensors():
    run_python(INSTALL + """
torch.cuda.manual_seed(5)
state = torch.cuda.get_rng_state()
first = torch.rand(4, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(4, device="cuda"))
torch.manual_seed(5)
assert torch.equal(first, torch.rand(4, device="cuda"))

sys.modules["transformer_engine"] = None
from megatron.core.tensor_parallel import random as mrandom
tracker = mrandom.CudaRNGStatesTracker()
tracker.add("a", 1); tracker.add("b", 2)
torch.manual_seed(9)
def draw(name):
    with tracker.fork(name):
        return torch.rand(3)
a1, b1, a2 = draw("a"), draw("b"), draw("a")
after = torch.rand(3)
torch.manual_seed(1); assert torch.equal(a1, torch.rand(3)) and torch.equal(a2, torch.rand(3))
torch.manual_seed(2); assert torch.equal(b1, torch.rand(3))
torch.manual_seed(9); assert torch.equal(after, torch.rand(3))
""")


def test_installing_is_idempotent_and_comes_first():
    run_python(INSTALL + """
install(H100)
assert installed_device() is H100
try:
    install(DeviceProfile("a100", (8, 0), 80 * 2**30, 108, 8))
except RuntimeError as error:
    assert "h100" in str(error) and "a100" in str(error)
else:
    raise SystemExit("a second device was accepted")
""")
    run_python("""
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
from primus_ext.emulate.virtual_cuda import DeviceProfile, install
try:
    install(DeviceProfile("h100", (9, 0), 1, 1, 1))
except RuntimeError as error:
    assert "before megatron" in str(error)
else:
    raise SystemExit("it was installed too late")
""")


def test_dynamo_still_loads():
    """It refuses two of its names that are one object, which replaced functions could be."""
    run_python(INSTALL + """
from torch._dynamo import trace_rules
trace_rules.get_torch_obj_rule_map()
""")


def test_cpu_training_leaves_gpus_and_virtual_devices_alone():
    run_python(INSTALL + """
import os
from primus_ext.emulate import registry, virtual_cuda
assert virtual_cuda.enable_cpu_training() is False
assert "MASTER_PORT" not in os.environ and installed_device() is H100
""")
    run_python("""
import os, torch
from primus_ext.emulate import virtual_cuda
torch.cuda.is_available = lambda: True
assert virtual_cuda.enable_cpu_training() is False
assert virtual_cuda.installed_device() is None and "RANK" not in os.environ
""")


def test_patches_are_applied_before_others_bind_the_name(tmp_path):
    (tmp_path / "victim.py").write_text("def answer():\n    return 1\n")
    (tmp_path / "user.py").write_text("from victim import answer\nvalue = answer()\n")
    run_python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from primus_ext.emulate import registry

@registry.patch("victim", "answer", group="mine", versions="any", reason="a test")
def _forty_two(module):
    calls.append(module.__name__)
    module.answer = lambda: 42

@registry.patch("victim", "question", group="wrong", versions="victim 2", reason="a test")
def _missing(module):
    raise AssertionError("applied")

calls = []
registry.apply_all("mine")
registry.apply_all("mine")
assert not registry.is_applied("__main__.forty_two")
import user
assert user.value == 42 and calls == ["victim"]
registry.apply_all("mine")
assert calls == ["victim"] and registry.is_applied("__main__.forty_two")
for group, error, words in (
    ("wrong", registry.PatchError, "victim.question"), ("none", ValueError, "'none'"),
):
    try:
        registry.apply_all(group)
    except error as caught:
        assert words in str(caught)
    else:
        raise SystemExit("no error for " + group)
""")


CPU = """
from primus_ext.emulate.virtual_cuda import enable_cpu_training
assert enable_cpu_training()
import torch
import torch.distributed as dist
from megatron.core import parallel_state
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(1)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
"""


@pytest.mark.parametrize(
    "options",
    ["", "num_query_groups=2", "num_query_groups=2, window_size=(3, 0)",
     "num_query_groups=2, softmax_type='learnable', window_size=(3, 0)"],
)  # fmt: skip
def test_attention_is_megatrons_own(options):
    """Same outputs and gradients as the class it stands for, which keeps all the scores."""
    run_python(CPU + f"""
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.process_groups_config import ProcessGroupCollection
original = DotProductAttention.__mro__[1]
assert original.__module__.startswith("megatron.")
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
    masked_softmax_fusion=False, {options})
groups = ProcessGroupCollection.use_mpu_process_groups()
common = dict(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal,
              attention_type="self", pg_collection=groups)
if config.softmax_type == "learnable":  # megatron's constructor loses the parameter
    config.init_method = lambda tensor: tensor
ours, theirs = DotProductAttention(**common), original(**common)
parameters = []
if config.softmax_type == "learnable":
    with torch.no_grad():
        for module in (ours, theirs):
            module.softmax_offset.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
            parameters.append(module.softmax_offset)
torch.manual_seed(3)
kv = config.num_query_groups
inputs = [torch.randn(10, 2, heads, 8, requires_grad=True) for heads in (4, kv, kv)]
weight = torch.randn(10, 2, 32)
results = []
for position, module in enumerate((ours, theirs)):
    out = module(*inputs, attention_mask=None)
    wanted = [*inputs, *parameters[position:position + 1]]
    results.append((out, *torch.autograd.grad((out * weight).sum(), wanted)))
for a, b in zip(*results, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
""")


def test_balanced_chunks_are_those_of_megatrons_batches():
    run_python(CPU + """
import megatron.core.transformer.dot_product_attention
from megatron.core.utils import get_batch_on_this_cp_rank
from primus_ext.emulate.cpu_attention import chunk_positions

class Ranks:
    pass

get_size, get_rank = dist.get_world_size, dist.get_rank
for cp in (2, 4):
    seen = []
    for rank in range(cp):
        dist.get_world_size = lambda group=None: cp
        dist.get_rank = lambda group=None: rank
        batch = {"tokens": torch.arange(32).view(1, 32)}
        mine = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=Ranks())["tokens"][0]
        dist.get_world_size, dist.get_rank = get_size, get_rank
        assert chunk_positions(32, cp, rank).tolist() == mine.tolist()
        seen += mine.tolist()
    assert sorted(seen) == list(range(32))
""")


def test_norm_marks_what_is_replicated_over_tensor_parallel_ranks():
    run_python(CPU + """
from megatron.core.transformer.torch_norm import WrappedTorchNorm
for sequence_parallel in (False, True):
    for kind, expected in (("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)):
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, normalization=kind,
            sequence_parallel=sequence_parallel,
            tensor_model_parallel_size=2 if sequence_parallel else 1)
        norm = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-6)
        assert isinstance(norm, expected) and norm.eps == 1e-6
        assert all(p.sequence_parallel is sequence_parallel for p in norm.parameters())
config.normalization = "L2Norm"
try:
    WrappedTorchNorm(config=config, hidden_size=8)
except ValueError as error:
    assert "L2Norm" in str(error)
else:
    raise SystemExit("accepted")
""")
