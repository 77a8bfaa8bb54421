"""Programs for the stand-in's tests, run in a process apart that prints JSON.

The stand-in and the virtual device must be installed before Transformer Engine and Megatron are
imported, and stay installed; so tests start ``python -m tests.te_world CAPABILITY PROGRAM...``.
The process imports everything once and forks for each program (``attention:mla`` is function
``attention`` with argument ``mla``), which leaves each one its own process groups and caches.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run(capability: str, *programs: str) -> dict[str, Any]:
    """What the programs answered, by program."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.te_world", capability, *programs],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def install(capability: tuple[int, int]) -> None:
    from primus_ext.emulate import te, virtual_cuda

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    warnings.filterwarnings("ignore")
    virtual_cuda.install(
        virtual_cuda.DeviceProfile("device", capability, 80 * 2**30, 132, 8))
    te.install(compute_capability=capability)


def _fork(program: str, folder: Path) -> Any:
    """Answer of a program that ran in a copy of this process."""
    path = folder / "answer.json"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            name, *arguments = program.split(":")
            path.write_text(json.dumps(globals()[name](*arguments)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"{program} failed with status {status}"
    return json.loads(path.read_text())


def main(capability: str, *programs: str) -> None:
    install(_capability(capability))
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    import transformer_engine.pytorch  # noqa: F401

    from primus_ext.frameworks.megatron import patches  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        answers = {program: _fork(program, Path(folder)) for program in programs}
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


class Recorder:
    """Operators with the shapes of their tensors, and bytes of tensors allocated and alive."""

    def __init__(self) -> None:
        import weakref

        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        recorder = self
        self.ops: list[tuple[str, list, dict]] = []
        self.live, self.peak, self._known = 0, 0, {}

        def track(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in recorder._known:
                return
            recorder._known[key] = size
            recorder.live += size
            recorder.peak = max(recorder.peak, recorder.live)

            def freed() -> None:
                recorder.live -= recorder._known.pop(key)

            weakref.finalize(storage, freed)

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
                out = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(out):
                    if isinstance(leaf, torch.Tensor):
                        track(leaf)
                if func.namespace in ("primus_te", "c10d"):
                    shapes = [
                        list(t.shape) for t in tree_leaves(args) if isinstance(t, torch.Tensor)
                    ]
                    keep = {k: v for k, v in (kwargs or {}).items() if _plain(v)}
                    recorder.ops.append((func.name(), shapes, keep))
                return out

        self.mode = Mode()


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain(v) for v in value)
    return isinstance(value, (int, float, str, bool))


def _join(rank: int, world: int, **degrees: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from primus_ext.emulate import registry, virtual_world
    from primus_ext.frameworks.megatron import patches  # noqa: F401

    registry.apply_all("megatron")
    virtual_world.join(rank, world, 8)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **degrees)
    model_parallel_cuda_manual_seed(1)


def _config(kind: str = "TransformerConfig", **changes: Any) -> Any:
    import torch
    from megatron.core.transformer import transformer_config

    base = {
        "num_layers": 1, "params_dtype": torch.bfloat16, "bf16": True, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False, "bias_dropout_fusion": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "perform_initialization": False, "masked_softmax_fusion": False,
    }  # fmt: skip
    return getattr(transformer_config, kind)(**{**base, **changes})


def _one_layer(config: Any, spec: Any, tokens: int, seq: int, rope_dim: int | None) -> Recorder:
    """Forward and backward of one transformer layer on tensors without storage."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.transformer_block import TransformerBlock

    from primus_ext.emulate import virtual_world

    recorder = Recorder()
    with virtual_world.no_storage():
        block = TransformerBlock(config, spec, pre_process=False, post_layer_norm=False)
        angles = None if rope_dim is None else RotaryEmbedding(rope_dim, 1.0)(seq)
        x = torch.empty(tokens, 1, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        block.set_input_tensor(x)
        with recorder.mode:
            out = block(x, None, rotary_pos_emb=angles)
            recorder.ops.append(("backward", [], {}))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    return recorder


def dense() -> Any:
    """One layer of rank 0 of Llama-70B on 1,024 ranks: tp 8 with sequence parallelism, pp 8."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    _join(0, 1024, tensor_model_parallel_size=8, pipeline_model_parallel_size=8)
    import torch

    config = _config(
        num_layers=8, hidden_size=8192, num_attention_heads=64, num_query_groups=8,
        ffn_hidden_size=28672, tensor_model_parallel_size=8, pipeline_model_parallel_size=8,
        sequence_parallel=True, apply_rope_fusion=True, pipeline_dtype=torch.bfloat16,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    return _one_layer(config, spec, 1024, 8192, 128).ops


def attention(kind: str) -> Any:
    """One layer with a special attention: qk_norm, mla, sink, or cp_p2p, cp_all_gather, cp_a2a."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    cp = 4 if kind.startswith("cp_") else 1
    _join(0, 8, context_parallel_size=cp)
    options: dict[str, Any] = {}
    if kind == "mla":
        config = _config(
            "MLATransformerConfig", hidden_size=512, num_attention_heads=16, ffn_hidden_size=512,
            q_lora_rank=96, kv_lora_rank=64, qk_head_dim=128, qk_pos_emb_head_dim=64,
            v_head_dim=128, multi_latent_attention=True, qk_layernorm=True, rope_type="rope",
        )  # fmt: skip
        options = {"multi_latent_attention": True, "qk_layernorm": True}
    elif kind == "sink":
        config = _config(
            hidden_size=288, num_attention_heads=8, num_query_groups=2, kv_channels=64,
            ffn_hidden_size=288, softmax_type="learnable", window_size=(128, 0),
            add_bias_linear=True,
        )  # fmt: skip
    else:
        config = _config(
            hidden_size=512, num_attention_heads=8, num_query_groups=4, kv_channels=128,
            ffn_hidden_size=512, qk_layernorm=kind == "qk_norm", context_parallel_size=cp,
            cp_comm_type=kind.removeprefix("cp_") if cp > 1 else None,
        )  # fmt: skip
        options = {"qk_layernorm": kind == "qk_norm"}
    spec = get_gpt_layer_with_transformer_engine_spec(**options)
    rope = None if kind == "mla" else config.kv_channels
    return _one_layer(config, spec, 1024 // cp, 1024, rope).ops


def isolated(kind: str) -> Any:
    """Ops of one real layer (dense or experts) that microbenchmarks run: do they run the same?

    By the op's name: whether the signature is that which was asked, or why it can't be run.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlock
    from transformer_engine.pytorch.optimizers import FusedAdam

    from primus_ext.cost.latency_db import signature
    from primus_ext.observe.microbench import te_kernels
    from primus_ext.observe.microbench.tensors import CannotRun
    from primus_ext.observe.recorder import Recorder as Traced

    _join(0, 1)
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True,
               "moe_ffn_hidden_size": 48, "moe_token_dispatcher_type": "alltoall"}  # fmt: skip
    config = _config(
        hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=64,
        ffn_hidden_size=96, apply_rope_fusion=True, normalization="LayerNorm" if kind == "dense"
        else "RMSNorm", perform_initialization=True, **(experts if kind == "experts" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    options = {"num_experts": 4, "moe_grouped_gemm": True} if kind == "experts" else {}
    spec = get_gpt_layer_with_transformer_engine_spec(**options)
    block = TransformerBlock(config, spec, pre_process=False, post_layer_norm=False)
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    angles = RotaryEmbedding(64, 1.0)(128)
    x = torch.randn(128, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    block.set_input_tensor(x)
    optimizer = FusedAdam([p for p in block.parameters()], lr=1e-3)

    def calls(run: Any) -> list:
        traced = Traced({})
        with traced, traced.collect("forward") as made:
            run()
        return [traced.ops[call.op] for _, _, call in made]

    def step() -> None:
        out = block(x, None, rotary_pos_emb=angles)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        optimizer.step()

    found: dict[str, Any] = {}
    for op in dict.fromkeys(calls(step)):
        if op.name.startswith("primus_te."):
            try:
                run, _ = te_kernels.build(op, torch.device("cpu"))
                keys = {signature.key(one) for one in calls(run) if one.name == op.name}
                told = signature.key(op) in keys or [repr(op), repr(calls(run))]
            except CannotRun as error:
                told = str(error)
            found.setdefault(op.name, []).append(told)
    return found


def parity(dtype_name: str) -> Any:
    """Loss and gradients of one small GPT in both layer specs, same weights, real tensors."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    dtype = getattr(torch, dtype_name)
    shared = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
        "ffn_hidden_size": 128, "params_dtype": dtype, "bf16": dtype == torch.bfloat16,
        "perform_initialization": True, "persist_layer_norm": False, "qk_layernorm": True,
        "attention_softmax_in_fp32": True,
    }  # fmt: skip
    models = []
    for engine in (True, False):
        spec = (
            specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True) if engine
            else specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        )  # fmt: skip
        config = _config(**shared, apply_rope_fusion=engine)
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope",
                         share_embeddings_and_output_weights=False)  # fmt: skip
        models.append(model.bfloat16() if dtype == torch.bfloat16 else model)
    renamed = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    torch.manual_seed(0)
    local = dict(models[1].named_parameters())
    pairs = {}
    for name, ours in models[0].named_parameters():
        other = name
        for old, new in renamed.items():
            other = other.replace(old, new)
        with torch.no_grad():
            ours.add_(torch.randn_like(ours) * 0.1 if "norm" in name else 0)
            local[other].copy_(ours)
        pairs[name] = (ours, local[other])
    assert len(pairs) == len(local)
    tokens, labels = torch.randint(0, 128, (2, 2, 32))
    positions = torch.arange(32).expand(2, -1)
    mask = torch.ones(32, 32).triu(1).bool()[None, None]
    losses = []
    for model, given in zip(models, (None, mask), strict=True):
        loss = model(tokens, positions, given, labels=labels).float().mean()
        loss.backward()
        losses.append(float(loss.detach()))
    errors = {
        name: float((a.grad.float() - b.grad.float()).norm() / b.grad.float().norm())
        for name, (a, b) in pairs.items()
    }
    return {"losses": losses, "errors": errors}


ROWS, INNER, OUTER = 256, 256, 384
SPLITS = (128, 0, 128)


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    return None if name == "none" else getattr(recipe, name)()


def _module(kind: str) -> Any:
    import torch
    import transformer_engine.pytorch as te

    options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16}
    if kind == "linear":
        return te.Linear(INNER, OUTER, **options)
    if kind == "layernorm_linear":
        return te.LayerNormLinear(INNER, OUTER, normalization="RMSNorm", **options)
    return te.GroupedLinear(len(SPLITS), INNER, OUTER, **options)


def recipes(name: str, kind: str) -> Any:
    """One module under one recipe, on real and on fake tensors: saved bytes, peak, errors."""
    import torch
    import transformer_engine.pytorch as te

    from primus_ext.emulate import te as stand_in
    from primus_ext.emulate import virtual_world

    recipe, answer = recipe_of(name), {}
    for world in ("fake", "real"):
        stand_in.reset()
        space = virtual_world.no_storage() if world == "fake" else contextlib.nullcontext()
        with space:
            torch.manual_seed(0)
            module, recorder = _module(kind), Recorder()
            x = torch.randn(ROWS, INNER, dtype=torch.bfloat16, requires_grad=True)
            outputs, saved = [], []
            for run_recipe in (None, recipe, recipe):
                module.zero_grad(set_to_none=True)
                x.grad = None
                packed: dict[int, tuple] = {}

                def pack(tensor: torch.Tensor, packed: dict = packed) -> torch.Tensor:
                    storage = tensor.untyped_storage()
                    packed[storage._cdata] = (
                        storage.nbytes(), list(tensor.shape), str(tensor.dtype)[6:])
                    return tensor

                hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
                recorder = Recorder()
                with recorder.mode:
                    autocast = te.fp8_autocast(run_recipe is not None, fp8_recipe=run_recipe)
                    with autocast, hooks:
                        y = module(x, list(SPLITS)) if kind == "grouped" else module(x)
                    seed = torch.Generator().manual_seed(1)
                    y.backward(torch.randn(y.shape, generator=seed, dtype=torch.float32).bfloat16())
                saved = sorted(packed.values())
                outputs.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
            answer[world] = {"saved": saved, "peak": recorder.peak, "ops": recorder.ops}
            if world == "real":
                answer["errors"] = [
                    float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9))
                    for a, b in zip(outputs[-1], outputs[0], strict=True)
                ]
    return answer


def nvfp4_reference() -> Any:
    """Both copies of a matrix by Transformer Engine's reference in Python, without random signs."""
    import torch
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    torch.manual_seed(0)
    x = torch.randn(32, 48) * torch.logspace(-2, 1, 48)
    quantizer = reference_nvfp4.NVFP4QuantizerRef(
        reference_utils.Fp4Formats.E2M1, with_rht=True, with_random_sign_mask=False)
    row, row_scales, col, col_scales, row_amax, col_amax = quantizer._quantize(x)[:6]
    return {
        "x": x.tolist(), "row": row.tolist(), "col": col.tolist(),
        "row_scales": row_scales.view(torch.uint8).tolist(),
        "col_scales": col_scales.view(torch.uint8).tolist(),
        "row_amax": row_amax.item(), "col_amax": col_amax.item(),
    }


def surface() -> Any:
    """Names, enumerations and scale shapes that Transformer Engine's Python itself knows."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    from primus_ext.emulate.te import quantizers

    made = {
        "Float8BlockQuantizer_1": te.Float8BlockQuantizer(
            DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
        "Float8BlockQuantizer_2": te.Float8BlockQuantizer(
            DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
        "MXFP8Quantizer": te.MXFP8Quantizer(DType.kFloat8E4M3),
        "NVFP4Quantizer": te.NVFP4Quantizer(),
    }
    shapes = {}
    for name, quantizer in made.items():
        for shape in ((64, 96), (256, 384), (3, 160, 1056), (2, 16, 4096), (4096, 32)):
            for columnwise in (False, True):
                ours = tuple(quantizers.scale_shape(quantizer, shape, columnwise))
                theirs = tuple(quantizer.get_scale_shape(shape, columnwise))
                shapes[f"{name} {shape} {columnwise}"] = (ours, theirs)
    return {
        "dtype": {m.name: (int(m), int(tex.DType[m.name])) for m in DType},
        "backend": {
            m.name: (int(m), int(tex.NVTE_Fused_Attn_Backend[f"NVTE_{m.name}"]))
            for m in FusedAttnBackend
        },
        "have": sorted(dir(tex)),
        "scale_shapes": shapes,
        **_refusals(),
    }


def _refusals() -> dict[str, str]:
    """What ``install`` says where it cannot."""
    from primus_ext.emulate import te

    answers = {}
    for key, capability in (("same", (10, 0)), ("other_target", (9, 0)), ("too_late", (10, 0))):
        if key == "too_late":
            del sys.modules["transformer_engine_torch"]
        try:
            te.install(compute_capability=capability)
        except RuntimeError as error:
            answers[key] = str(error)
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
