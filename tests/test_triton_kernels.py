"""What a Triton kernel reads and writes, from its source."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

from primus_ext.emulate.triton_kernels import pointer_uses

KERNEL = '''
@triton.jit
def kernel(x_ptr, index_ptr, y_ptr, both_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(index_ptr + offsets)
    address = x_ptr + rows * n
    for i in range(4):
        address += n
        value = tl.load(address, mask=offsets < n)
        tl.store(y_ptr + offsets, value)
    old = tl.load(both_ptr)
    tl.store(both_ptr, old + 1)
'''


def test_reads_and_writes_are_told_apart() -> None:
    read, written = pointer_uses(KERNEL)
    assert {"x_ptr", "index_ptr", "both_ptr"} <= read
    assert "y_ptr" not in read
    assert {n for n in written if n.endswith("_ptr")} == {"y_ptr", "both_ptr"}


def test_megatron_rope_for_queries_works_in_place() -> None:
    path = importlib.metadata.distribution("megatron-core").locate_file(
        "megatron/core/fusions/fused_mla_yarn_rope_apply.py"
    )
    source = Path(str(path)).read_text()
    kernel = next(
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.FunctionDef) and n.name == "rotary_fwd_q_kernel"
    )
    read, written = pointer_uses(ast.unparse(kernel))
    assert {"Q", "COS", "SIN"} <= read
    assert "Q" in written and "COS" not in written
