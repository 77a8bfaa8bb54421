"""What can't be projected is refused by name, before anything is traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation import emulate

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --vocab-size 127 "
)


@pytest.mark.parametrize(
    ("args", "request_keys", "words"),
    [
        ("--optimizer-cuda-graph", {}, "optimizer_cuda_graph=True can't be projected"),
        ("--attention-backend flash --context-parallel-size 2", {},
         "attention_backend=flash with context_parallel_size=2 can't be projected"),
        ("--attention-backend local", {}, "attention_backend=local is no choice"),
        ("--sft --hybrid-layer-pattern M*M*", {},
         "sft=True with hybrid_layer_pattern=M*M* can't be projected"),
        ("--position-embedding-type mrope --mrope-section 2 3 3", {},
         "position_embedding_type=mrope can't be projected"),
        ("--optimizer sgd", {}, "Only Adam"),
        ("--position-embedding-type alibi", {}, "invalid choice: 'alibi'"),
        ("--fp8-format hybrid", {"formats": ["bf16"]}, "precision=fp8 is not available on h100"),
        ("--pipeline-model-parallel-size 3", {}, "world size"),
        (
            "--use-megatron-fsdp --ckpt-format fsdp_dtensor --pipeline-model-parallel-size 2",
            {},
            "pipeline_model_parallel_size=2 is not legal with use_megatron_fsdp=True",
        ),
    ],
)
def test_refused_with_exit_code_2(
    tmp_path: Path, args: str, request_keys: dict, words: str
) -> None:
    answer = emulate(tmp_path, 8, MODEL + args, **request_keys)
    assert (answer["status"], answer["exit_code"]) == ("error", 2), answer
    assert words in answer["message"]
    assert "\n" not in answer["message"]
