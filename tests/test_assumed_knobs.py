"""What is assumed of partial rows: legal, read by the mapping, and never against a row."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from primus_ext.frameworks import published
from primus_ext.frameworks.published import assumed

FILE = yaml.safe_load(assumed.FILE.read_text())
ENTRIES = assumed.entries()
MIXTRAL: dict[str, Any] = {
    "num_layers": 56, "hidden_size": 6144, "num_heads": 48, "num_kv_heads": 8, "head_dim": 128,
    "vocab_size": 32768, "gated_mlp": True, "num_experts": 8, "topk": 2,
    "moe_ffn_hidden_size": 16384, "arch_key": "mixtral-8x22b",
}  # fmt: skip
DENSE: dict[str, Any] = {
    "num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_heads": 16,
    "num_kv_heads": 16, "head_dim": 64, "gated_mlp": False, "activation": "gelu",
    "position": "learned", "tied_embeddings": True,
}  # fmt: skip


class Read(dict[str, Any]):
    """A part of a row that notes which of its knobs are read."""

    def __init__(self, part: str, knobs: dict[str, Any], read: set[str]) -> None:
        super().__init__(knobs)
        self.part, self.read = part, read

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.read.add(f"{self.part}.{key}")
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(f"{self.part}.{key}")
        return super().__getitem__(key)


def mixtral(**changes: dict[str, Any]) -> dict[str, Any]:
    """A row of the Mixtral sweep that states what its table does, with changes to its parts."""
    base: dict[str, dict[str, Any]] = {
        "source": {"name": "Primus Projection paper"},
        "software": {"framework": "Primus Megatron"},
        "hardware": {"gpu": "MI355X", "num_gpus": 32, "gpus_per_node": 8},
        "model": MIXTRAL,
        "parallelism": {},
        "batch": {"mbs": 2},
        "precision": {"compute": "fp8", "label": "fp8"},
        "recompute": {"granularity": "full", "method": "block", "num_layers": 9},
        "flags": {},
    }
    return {part: {**base[part], **changes.get(part, {})} for part in base}


def vtrain() -> dict[str, Any]:
    """A row of vTrain's tables with the knobs of their columns alone."""
    return {
        "source": {"name": "vTrain measured validation data (single node)"},
        "software": {"framework": "Megatron-DeepSpeed"},
        "hardware": {"gpu": "A100-SXM", "num_gpus": 8, "gpus_per_node": 8},
        "model": DENSE,
        "parallelism": {"tp": 2, "pp": 2, "dp": 2},
        "batch": {"mbs": 4, "gbs": 32, "seq_len": 1024},
        "precision": {},
        "recompute": {},
        "flags": {},
    }


def _rows() -> Iterator[dict[str, Any]]:
    yield vtrain()
    batches: tuple[tuple[str, int, str, dict[str, int | None]], ...] = (
        ("mixtral-8x22b", 32, "fp8", {}), ("qwen3-235b-a22b", 256, "fp8", {"mbs": None}),
        ("qwen3-235b-a22b", 32, "fp8", {"gbs": 2048}), ("gpt-oss-120b", 64, "bf16", {"mbs": None}),
    )  # fmt: skip
    for arch, gpus, compute, batch in batches:
        changes = {
            "hardware": {"num_gpus": gpus},
            "model": {"arch_key": arch, "shared_expert_ffn_hidden_size": 2048},
            "precision": {"compute": compute}, "batch": batch,
            "recompute": {"granularity": None, "method": None, "num_layers": None},
        }  # fmt: skip
        yield mixtral(**changes)
    for arch in ("llama3-70b", "llama3-8b"):
        row = vtrain()
        row["model"] = {**DENSE, "vocab_size": 128256, "gated_mlp": True, "arch_key": arch}
        row["source"] = {"name": "Primus Projection paper"}
        row["hardware"] = {"gpu": "MI325X", "num_gpus": 64, "gpus_per_node": 8}
        row["precision"] = {"compute": "fp8"}
        row["parallelism"] |= {"distributed_optimizer": True}
        yield row


def test_every_assumed_knob_is_read_by_the_mapping() -> None:
    seen: set[str] = set()
    for row in _rows():
        filled = published.completed(row)
        read: set[str] = set()
        watched = {part: Read(part, knobs, read) if isinstance(knobs, dict) else knobs
                   for part, knobs in filled.items()}  # fmt: skip
        published.program(watched)
        for entry in (one for one in ENTRIES if one.holds_for(row)):
            wanted = {f"{a.part}.{a.key}" for a in entry.assumptions}
            missing = wanted - read
            assert not missing, (row["model"].get("arch_key"), missing)
            seen |= wanted
    assert {"batch.gbs", "flags.dropout", "flags.pp_layout", "recompute.num_layers"} <= seen


@pytest.mark.parametrize(
    ("path", "told", "words"),
    [
        ("batch.gsb", {"is": 1, "from": "vtrain", "why": "x"}, "batch.gsb is no knob"),
        ("measured.step", {"is": 1, "from": "vtrain", "why": "x"}, "measured.step is no knob"),
        ("batch.gbs", {"is": 1, "from": "hearsay", "why": "x"}, "hearsay, which is no document"),
        ("batch.gbs", {"is": 1, "from": "vtrain", "why": ""}, "without a value or a reason"),
        ("batch.gbs", {"is": None, "from": "vtrain", "why": "x"}, "without a value or a reason"),
    ],
)
def test_an_assumption_without_a_knob_document_or_reason_is_refused(
    path: str, told: dict[str, Any], words: str
) -> None:
    file = copy.deepcopy(FILE)
    file["entries"][0]["assume"][path] = told
    with pytest.raises(ValueError, match=words):
        assumed.read(file)


def test_every_document_is_used_and_names_a_revision_or_a_paper() -> None:
    used = {one.document for entry in ENTRIES for one in entry.assumptions}
    assert used == set(FILE["documents"])
    for text in FILE["documents"].values():
        assert any(c.isdigit() for c in text), text


@pytest.mark.parametrize("entry", ENTRIES, ids=range(len(ENTRIES)))
def test_what_a_row_states_is_never_overridden(entry: assumed.Entry) -> None:
    row: dict[str, Any] = {"source": {"name": entry.source}}
    for one in entry.assumptions:
        row.setdefault(one.part, {})[one.key] = "as stated"
    for path, value in entry.where.items():
        part, key = path.split(".")
        row.setdefault(part, {})[key] = value.strip("*") if isinstance(value, str) else value
    assert entry.holds_for(row)
    filled = published.completed(row)
    for one in entry.assumptions:
        if f"{one.part}.{one.key}" not in entry.where:
            assert filled[one.part][one.key] == "as stated" != one.value
            assert not any(note.startswith(f"{one.part}.{one.key} ") for note in filled["assumed"])


def test_a_source_of_which_nothing_is_assumed_is_named() -> None:
    unknown = mixtral(source={"name": "some table"}, parallelism={"tp": 1, "pp": 4, "ep": 8})
    assert published.completed(unknown) == unknown
    words = "seq_len is not stated, and nothing is assumed for some table"
    with pytest.raises(published.NotProjectable, match=words):
        published.program(unknown)


def test_the_mixtral_sweep_is_what_its_documents_say() -> None:
    """mixtral_8x22B_v0.1-FP8-pretrain.yaml of AMD-AGI/Primus, and its command for four nodes."""
    text = " ".join(published.program(mixtral()).argv)
    for words in (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4",
        "--expert-model-parallel-size 8", "--micro-batch-size 2 --global-batch-size 512",
        "--seq-length 8192", "--fp8-recipe delayed", "--recompute-num-layers 9",
        "--moe-token-dispatcher-type alltoall", "--no-gradient-accumulation-fusion",
        "--cross-entropy-fusion-impl te", "--moe-router-force-load-balancing",
    ):  # fmt: skip
        assert words in text, words
    assert "--moe-permute-fusion" not in text and "--num-virtual-stages" not in text


def test_vtrains_runs_are_megatron_deepspeed_with_its_defaults() -> None:
    text = " ".join(published.program(vtrain()).argv)
    for words in (
        "--fp16", "--vocab-size 50257", "--attention-dropout 0.1 --hidden-dropout 0.1",
        "--attention-backend unfused", "--recompute-granularity full --recompute-method uniform",
    ):  # fmt: skip
        assert words in text, words
    assert not {"--use-distributed-optimizer", "--sequence-parallel"} & set(text.split())


def test_sync_free_experts_are_fused_and_padded_where_they_are_quantized() -> None:
    fused = {"--moe-router-fusion", "--moe-permute-fusion"}
    stage = {"flags": {"sync_free_moe_stage": 1, "moe_permute_fusion": False}}
    argv = set(published.program(mixtral(**stage)).argv)
    assert fused | {"--moe-router-padding-for-quantization"} <= argv
    argv = set(published.program(mixtral(**stage, precision={"compute": "bf16"})).argv)
    assert fused <= argv and "--moe-router-padding-for-quantization" not in argv
