"""Published runs of earlier releases: what those kept otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import emulation

HIDDEN, FFN, KV, VOCAB = 256, 704, 128, 1024
MODEL = (
    f"--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 8 "
    f"--group-query-attention --num-query-groups 4 --seq-length 128 --micro-batch-size 2 "
    f"--max-position-embeddings 128 --vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 128 "
    "--global-batch-size 4"
)


@pytest.mark.slow
def test_old_engines_keep_no_dummy_gradients(tmp_path: Path) -> None:
    """One of each shape, as pull request 1651 of Transformer Engine has them: BF16."""
    frameworks = ["primus_ext.frameworks.megatron", "primus_ext.frameworks.megatron.te_2024"]
    new, old = (
        emulation.traces(tmp_path, 1, MODEL, frameworks=frameworks[:count])[0] for count in (1, 2)
    )
    shapes = {(HIDDEN + 2 * KV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN),
              (VOCAB, HIDDEN)}  # fmt: skip
    kept = sum(2 * rows * columns for rows, columns in shapes)
    assert new["static"]["workspaces"] - old["static"]["workspaces"] == kept
    assert new["static"]["gradients"] == old["static"]["gradients"]
