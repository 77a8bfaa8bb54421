"""Parts of published runs as Megatron arguments, against the launchers that ran them."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest

from primus_ext.frameworks import published
from primus_ext.frameworks.megatron import torchtitan_blocks
from primus_ext.frameworks.published import moe_layer, parallel, torchtitan


def run(**changes: dict[str, Any]) -> dict[str, Any]:
    """SimuMax' truncated DeepSeek-V3 on 8 B200, with changes to its parts."""
    base: dict[str, dict[str, Any]] = {
        "source": {"name": "SimuMax v1.2 B200 formal results"},
        "software": {"framework": "Megatron-LM"},
        "hardware": {"gpu": "B200-180GB", "num_gpus": 8, "gpus_per_node": 8},
        "model": {
            "num_layers": 4, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_heads": 128,
            "num_kv_heads": 128, "head_dim": 192, "vocab_size": 129280, "gated_mlp": True,
            "activation": "swiglu", "num_experts": 256, "topk": 8, "moe_ffn_hidden_size": 2048,
            "num_dense_layers": 1, "shared_expert_ffn_hidden_size": 2048,
            "mla": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64, "v_head_dim": 128},
            "arch_key": "deepseek-v3",
        },
        "parallelism": {"tp": 1, "pp": 2, "vpp": 1, "cp": 1, "ep": 4, "etp": 1,
                        "sequence_parallel": True, "distributed_optimizer": True},
        "batch": {"mbs": 1, "gbs": 16, "seq_len": 4096},
        "precision": {"compute": "bf16", "label": "bf16", "grad_reduce": "fp32"},
        "recompute": {"granularity": "none"},
        "flags": {"cross_entropy_fusion": "TE", "overlap_grad_reduce": False,
                  "moe": "alltoall dispatcher, capacity factor 1 with pad-to-capacity, grouped "
                         "GEMM, permute fusion, group-limited routing"},
    }  # fmt: skip
    return {part: {**base[part], **changes.get(part, {})} for part in base}


def options(argv: tuple[str, ...]) -> dict[str, list[str]]:
    """Options with their values."""
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_simumax_deepseek_is_the_command_of_its_launcher() -> None:
    """simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh of SimuMax 4dcaae5."""
    nearest = published.program(run())
    found = options(nearest.argv)
    launcher = (
        "--moe-router-num-groups 4 --moe-router-group-topk 3 --moe-router-topk 8 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-router-pre-softmax "
        "--moe-router-topk-scaling-factor 16 --moe-aux-loss-coeff 3e-3 "
        "--moe-expert-capacity-factor 1.0 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*1+[1]*3) "
        "--moe-grouped-gemm --moe-permute-fusion --moe-pad-expert-input-to-capacity "
        "--moe-token-dispatcher-type alltoall --num-experts 256 "
        "--expert-model-parallel-size 4 --multi-latent-attention --qk-layernorm "
        "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --rotary-scaling-factor 1 --use-distributed-optimizer --bf16 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        "--ffn-hidden-size 18432"
    )
    for name, value in options(tuple(launcher.split())).items():
        assert found[name] == value, name
    assert found["--cross-entropy-fusion-impl"] == ["te"]
    assert nearest.emulations == ("primus_ext.frameworks.megatron.te_loss",)
    assert "--overlap-grad-reduce" not in found and "--sequence-parallel" not in found
    assert any("Transformer Engine's cross entropy" in note for note in nearest.approximations)


@pytest.mark.parametrize(
    ("changes", "expected", "absent"),
    [
        ({"flags": {"moe_dispatcher_backend": "hybridep"}},
         ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"], []),
        ({"model": {"mtp_layers": 1}}, ["--mtp-num-layers 1"], []),
        ({"recompute": {"granularity": "selective", "modules": ["mla_up_proj", "mlp"]}},
         ["--recompute-granularity selective --recompute-modules mla_up_proj mlp"], []),
        ({"recompute": {"granularity": "full", "method": "block", "num_layers": 3}},
         ["--recompute-method block --recompute-num-layers 3"], []),
        ({"recompute": {"granularity": "full", "method": "block", "num_layers": 0}},
         [], ["--recompute-granularity"]),
        ({"precision": {"compute": "fp8", "recipe": "mxfp8", "grad_reduce": "bf16"},
          "software": {"framework": "Megatron-Bridge / Megatron-Core"},
          "flags": {"overlap_grad_reduce": None}},
         ["--fp8-format e4m3 --fp8-recipe mxfp8", "--fp8-param-gather", "--grad-reduce-in-bf16",
          "--reuse-grad-buf-for-mxfp8-param-ag"], []),
        ({"precision": {"compute": "fp4"}}, ["--fp4-format e2m1 --fp4-recipe nvfp4"], []),
        ({"precision": {"compute": "fp16"}}, ["--fp16"], ["--bf16"]),
        ({"parallelism": {"tp": 2, "sequence_parallel": False}}, ["--sequence-parallel"], []),
        ({"flags": {"flash_attention": False}},
         ["--attention-backend unfused"], ["--cross-entropy-loss-fusion"]),
        ({"model": {"position": "alibi", "embedding_layernorm": True}},
         ["--position-embedding-type none"], []),
        ({"model": {"activation": "squared_relu", "gated_mlp": False, "mla": None}},
         ["--squared-relu", "--kv-channels 192", "--normalization LayerNorm"], ["--swiglu"]),
        ({"parallelism": {"vpp": 2, "pp": 2}}, ["--num-virtual-stages-per-pipeline-rank 2"], []),
        ({"flags": {"TP_PP_DP_MAPPING": "True"}}, ["--use-tp-pp-dp-mapping"], []),
    ],
)  # fmt: skip
def test_each_knob_reaches_the_command(
    changes: dict[str, dict[str, Any]], expected: list[str], absent: list[str]
) -> None:
    text = " ".join(published.program(run(**changes)).argv)
    for words in expected:
        assert words in text
    for words in absent:
        assert words not in text


@pytest.mark.parametrize(
    ("layers", "stages", "mtp"), [(61, 16, 1), (61, 32, 1), (94, 48, 0), (4, 4, 0), (7, 8, 0)]
)
def test_a_layout_holds_every_layer_once(layers: int, stages: int, mtp: int) -> None:
    words = parallel.layout(layers, stages, mtp).split("|")
    assert len(words) == stages
    assert sum(word.count("t") for word in words) == layers
    assert max(word.count("t") for word in words) == -(-layers // stages)
    assert words[0].startswith("E") and words[-1].endswith("m" * mtp + "L")
    assert all(re.fullmatch("E?t*m*L?", word) for word in words)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "option"),
    [
        (126, 8, 8, "--account-for-embedding-in-pipeline-split"),  # Llama-3.1-405B: 128 of 64
        (94, 4, 12, "--account-for-embedding-in-pipeline-split"),  # Qwen3-235B: 96 of 48
        (61, 4, 4, "--pipeline-model-parallel-layout"),
    ],
)
def test_layers_that_do_not_divide(layers: int, pp: int, vpp: int, option: str) -> None:
    changes = {"model": {"num_layers": layers}, "parallelism": {"pp": pp, "vpp": vpp}}
    nearest = published.program(run(**changes))
    assert option in nearest.argv
    assert any("the split" in note for note in nearest.approximations)


def test_what_is_left_out_is_named() -> None:
    flags = {"cuda_graph_impl": "full_iteration", "moe_a2a_overlap": True,
             "activation_offload_layers": 20, "TP_COMM_OVERLAP": "False"}  # fmt: skip
    nearest = published.program(run(flags=flags))
    notes = nearest.approximations
    assert not any("left out" in note for note in notes)
    assert nearest.conditions == {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ""}
    assert options(nearest.argv)["--cpu-offloading-num-layers"] == ["20"]
    assert not any("tensor-parallel" in note for note in notes)


def test_the_layer_benchmark_passes_what_it_passes() -> None:
    """moe_perf/__main__.py of Megatron-LM d98e8a6: no shared expert, no gate."""
    row = {
        "model": {"seq_len": 4096, "mbs": 1, "hidden_size": 7168, "moe_ffn_hidden_size": 2048,
                  "num_experts": 32, "topk": 8, "shared_expert_ffn_hidden_size": 2048,
                  "num_attention_heads": 8, "router": "sigmoid, 8 groups, group-topk 4"},
        "parallelism": {"tp": 1, "ep": 8, "etp": 1}, "precision": "fp8 blockwise",
        "dispatcher": "deepep",
    }  # fmt: skip
    config = moe_layer.case(row)["config"]
    assert config["moe_token_dispatcher_type"] == "flex"
    assert (config["fp8_recipe"], config["moe_router_group_topk"]) == ("blockwise", 4)
    assert not {"moe_shared_expert_intermediate_size", "gated_linear_unit"} & set(config)
    with pytest.raises(published.NotProjectable, match="nccl in fp8 blockwise"):
        moe_layer.case({**row, "dispatcher": "nccl"})


def torchtitan_run(**changes: dict[str, Any]) -> dict[str, Any]:
    """Llama 3 8B on 8 H100 as benchmarks/llama3_h100_202412_torchtitan.md has it."""
    base: dict[str, dict[str, Any]] = {
        "source": {"name": "torchtitan benchmarks"},
        "software": {"framework": "torchtitan 9dec370"},
        "hardware": {"gpu": "H100-96GB-HBM2e-500W", "num_gpus": 8, "gpus_per_node": 8},
        "model": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336,
                  "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "vocab_size": 128256,
                  "gated_mlp": True, "num_experts": 0, "mla": None, "arch_key": "llama3-8b"},
        "parallelism": {"tp": 1, "pp": 1, "ep": 1, "dp": 8, "zero_stage": 3,
                        "distributed_optimizer": False, "sequence_parallel": False},
        "recompute": {"granularity": "selective", "detail": "per-op selective AC"},
        "flags": {"torch_compile": True, "cross_entropy_fusion": None, "moe": None},
    }  # fmt: skip
    return run(**{part: {**base.get(part, {}), **changes.get(part, {})} for part in base})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {torchtitan.LOSS, torchtitan.BLOCKS}),
        ({"flags": {"torch_compile": False}}, {torchtitan.LOSS, torchtitan.EAGER_BLOCKS}),
        ({"software": {"framework": "torchtitan 820504e"}}, {torchtitan.BLOCKS}),  # June 2025
        ({"recompute": {"granularity": "full"}}, {torchtitan.LOSS}),
        ({"parallelism": {"tp": 8, "dp": 1, "zero_stage": 0}}, {torchtitan.BLOCKS}),
        ({"software": {"framework": "Megatron-LM"}}, set()),
    ],
)
def test_torchtitan_runs_its_own_loss_and_checkpointing(
    changes: dict[str, dict[str, Any]], expected: set[str]
) -> None:
    nearest = published.program(torchtitan_run(**changes))
    assert set(nearest.emulations) == expected
    notes = " ".join(nearest.approximations)
    assert ("torchtitan's loss as it ran" in notes) == (torchtitan.LOSS in expected)


def test_every_second_layer_recomputed() -> None:
    every = {"detail": "per-layer selective AC (every 2nd layer default)"}
    text = " ".join(published.program(torchtitan_run(recompute=every)).argv)
    assert "--recompute-method block --recompute-num-layers 16" in text


@pytest.mark.parametrize(("eager", "expected"), [(True, 9216), (False, 5120)])
def test_bytes_that_selective_checkpointing_keeps_beyond(eager: bool, expected: int) -> None:
    """Llama 3 8B: input, query, value, attention, gate and down, less what Megatron keeps."""
    h, values, ffn = 4096, 1024, 14336
    kept = [h, h, values, h, ffn] + ([h] if eager else [])
    nearest = [h, h, h, values, values, h, h]  # with the MLP recomputed
    assert sum(kept) - sum(nearest) == expected
    config = types.SimpleNamespace(
        hidden_size=h, ffn_hidden_size=ffn, num_query_groups=8, num_attention_heads=32,
        kv_channels=128, tensor_model_parallel_size=1,
    )  # fmt: skip
    assert torchtitan_blocks.elements(config, eager) == expected


def test_automodel_keeps_adam_in_bf16() -> None:
    """NVIDIA-NeMo/Automodel examples/benchmark/configs: torch.optim.Adam of BF16 parameters."""
    software = {"framework": "NeMo AutoModel (PyTorch FSDP2)"}
    nearest = published.program(run(software=software, precision={"grad_reduce": None}))
    found = options(nearest.argv)
    assert found["--exp-avg-dtype"] == found["--exp-avg-sq-dtype"] == ["bf16"]
    assert found["--main-grads-dtype"] == ["bf16"] and "--grad-reduce-in-bf16" in found
    assert any("without masters" in note for note in nearest.approximations)
    assert "--exp-avg-dtype" not in published.program(run()).argv


@pytest.mark.parametrize(
    ("words", "nics", "gigabits"),
    [
        ("Jean Zay: NVLink in node, 4x 100 Gb/s Omni-Path per node", 4, 100),
        ("Selene: NVLink/NVSwitch in node, 8x HDR 200 Gb/s InfiniBand per node", 8, 200),
        ("8x A100 per node, 800 Gb/s per node (vTrain config)", 8, 100),
        ("1600 Gbps node-node interconnect (RoCE)", 8, 200),
        ("NVLink in node, 400 Gb/s CX-7 per GPU", 8, 400),
    ],
)
def test_a_stated_network_is_the_targets(words: str, nics: int, gigabits: int) -> None:
    hardware = {**run()["hardware"], "interconnect": words, "interconnect_stated": True}
    nearest = published.program(run(hardware=hardware))
    assert nearest.network == {"nics_per_node": nics, "nic_bandwidth": gigabits * 1e9 / 8}
    hardware["interconnect_stated"] = False
    assert published.program(run(hardware=hardware)).network == {}


def test_kernels_of_their_time_are_named() -> None:
    assert published.program(torchtitan_run()).conditions["attention_kernel"] == "flash2"
    older = published.program(run(flags={"attention": "flash attention (triton or flash2)"}))
    assert older.conditions["attention_kernel"] == "triton"
    assert any("Triton" in note for note in older.approximations)


def test_nemo_1_shards_experts_over_tp_and_overlaps_what_its_recipe_says() -> None:
    model = {"num_experts": 8, "topk": 2, "moe_ffn_hidden_size": 1024, "arch_key": "grok1"}
    grok = run(model=model, parallelism={"tp": 4, "ep": 2, "etp": 1, "sequence_parallel": True},
               software={"framework": "NeMo 1.x (Megatron)"})  # fmt: skip
    nearest = published.program(grok)
    assert options(nearest.argv)["--expert-tensor-parallel-size"] == ["4"]
    assert "--moe-permute-fusion" not in nearest.argv
    assert "tp_comm_overlap" not in nearest.conditions  # ub_tp_comm_overlap: false
    dense = run(model={"arch_key": "nemotron4-15b"}, software={"framework": "NeMo 1.x"},
                parallelism={"tp": 4, "sequence_parallel": True})  # fmt: skip
    assert published.program(dense).conditions["tp_comm_overlap"] == "1"


def test_automodel_shards_what_is_no_expert() -> None:
    """parallelize_model of NeMo AutoModel: FSDP2 over all ranks, experts by expert parallelism."""
    sharded = {"tp": 1, "pp": 1, "ep": 8, "dp": 8, "fsdp": True, "distributed_optimizer": None}
    software = {"framework": "NeMo AutoModel (PyTorch FSDP2)"}
    nearest = published.program(run(software=software, parallelism=sharded))
    found = options(nearest.argv)
    assert found["--data-parallel-sharding-strategy"] == ["optim_grads_params"]
    assert found["--megatron-fsdp-main-params-dtype"] == ["auto"]  # Adam of the BF16 parameters
    assert not any("masters of 16 more bits" in note for note in nearest.approximations)
    assert any("no expert parallelism in Megatron" in note for note in nearest.approximations)
    staged = published.program(run(software=software, parallelism={**sharded, "pp": 2, "dp": 4}))
    assert "--use-megatron-fsdp" not in staged.argv  # Megatron-FSDP has no stages


@pytest.mark.parametrize(
    ("framework", "family", "in_bf16", "old"),
    [
        ("NeMo / Megatron-Core", "llama3-8b", True, False),  # MLPerf 5.1: pretrain.py
        ("NeMo / Megatron-Core", "gpt3-175b", False, True),  # MLPerf 3.1 and 4.1
        ("NeMo 1.x (Megatron)", "llama3-8b", False, True),  # nemo:24.09
        ("NeMo 2.0", "llama3-8b", True, False),
    ],
)
def test_what_nvidias_launchers_set(framework: str, family: str, in_bf16: bool, old: bool) -> None:
    model = {"num_experts": 0, "mla": None, "arch_key": family}
    nearest = published.program(
        run(software={"framework": framework}, model=model, precision={"grad_reduce": None})
    )
    assert ("--grad-reduce-in-bf16" in nearest.argv) == in_bf16
    assert ("primus_ext.frameworks.megatron.te_2024" in nearest.emulations) == old
