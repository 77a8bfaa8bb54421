"""A measured neighbour beats a formula: corrections of priced kernels where tables exist."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost import attention, attention_table, gemm, gemm_table, memory_bound
from primus_ext.cost.formats import format_of
from primus_ext.cost.gemm_table import Neighbour
from primus_ext.cost.priced import Priced
from primus_ext.trace import Family, Op

_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
"""Bytes of an operand's element; nvfp4 with a scale byte for 16 of them."""
_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3/tensor",
           "fp8_block": "fp8_e4m3/block2d", "nvfp4": "fp4_e2m1/nvfp4"}  # fmt: skip


def product(m: int, n: int, k: int, number_format: str) -> Op:
    """A forward product [m, k] x [k, n] with a bf16 output, as the tables hold it."""
    moved = _BYTES[number_format] * (m * k + n * k) + 2 * m * n
    attrs = {"m": m, "n": n, "k": k, "batch": 1, "layout": "tn", "accumulate": False,
             "dtype": _DTYPES[number_format], "out_dtype": "bf16"}  # fmt: skip
    return Op("table.gemm", Family.GEMM, (), (), 2 * m * n * k, int(moved),
              tuple(sorted(attrs.items())))  # fmt: skip


def cache_write(batch: int, seq: int, kv_heads: int, dim_qk: int, dim_v: int) -> Op:
    """The copy of keys and values to the serving framework's cache, in the tables' time too."""
    moved = 2 * 2 * batch * seq * kv_heads * (dim_qk + dim_v)
    return Op("table.cache_write", Family.MEMORY, (), (), 0, moved)


def prefill(batch: int, seq: int, heads: int, kv_heads: int, dim_qk: int, dim_v: int) -> Op:
    """A causal forward in bf16, as the tables hold it."""
    attrs = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq, "seq_kv": seq,
             "dim_qk": dim_qk, "dim_v": dim_v, "causal": True, "window": (-1, -1),
             "direction": "forward", "dtype": "bf16", "fused": True}  # fmt: skip
    pairs = seq * (seq + 1) // 2
    moved = 2 * batch * seq * (heads + kv_heads) * (dim_qk + dim_v)
    return Op("table.attention", Family.ATTENTION, (), (),
              2 * batch * heads * pairs * (dim_qk + dim_v), moved,
              tuple(sorted(attrs.items())))  # fmt: skip


class Measured:
    """Tables of one accelerator, each loaded when an op first asks for it."""

    def __init__(self, accelerator: Accelerator, without: tuple[str, ...] = ()) -> None:
        """Prepare to correct prices on ``accelerator``.

        Args:
            accelerator: One without ``measured_tables`` is never corrected.
            without: Frameworks whose measurements are left out, for validation.
        """
        self._system = accelerator.measured_tables
        self._accelerator = accelerator
        self._without = without
        self._gemm: dict[str, gemm_table.GemmTable | None] = {}
        self._attention: dict[tuple[int, int], attention_table.AttentionTable | None] = {}

    def correct(self, op: Op, priced: Priced) -> Priced:
        """``priced``, times measured over modelled near the op's shape where that is known."""
        near = self._near(op) if self._system else None
        if near is None:
            return priced
        evidence = f"table: {near.source}, {near.octaves:.1f} octaves away, x{near.ratio:.2f}"
        terms = {name: seconds * near.ratio for name, seconds in priced.terms.items()}
        return Priced(priced.seconds * near.ratio, evidence, terms)

    def _near(self, op: Op) -> Neighbour | None:
        attrs = dict(op.attrs)
        if op.family is Family.GEMM and attrs.get("batch", 1) == 1 and op.flops:
            return self._near_product(attrs["m"], attrs["n"], attrs["k"], format_of(attrs["dtype"]))
        if op.family is Family.ATTENTION and _as_measured(attrs):
            return self._near_attention(attrs)
        return None

    def _near_product(self, m: int, n: int, k: int, number_format: str) -> Neighbour | None:
        if number_format not in _BYTES:
            return None
        if number_format not in self._gemm:
            self._gemm[number_format] = gemm_table.load(
                self._system, number_format, self._without)
        table = self._gemm[number_format]

        def model(m: int, n: int, k: int) -> float:
            return gemm.price(self._accelerator, product(m, n, k, number_format)).seconds

        return table.near(m, n, k, model) if table else None

    def _near_attention(self, attrs: dict) -> Neighbour | None:
        dims = (attrs["dim_qk"], attrs["dim_v"])
        if dims not in self._attention:
            self._attention[dims] = attention_table.load(self._system, *dims, self._without)
        table = self._attention[dims]

        def model(batch: int, seq: int, heads: int, kv_heads: int) -> float:
            op = prefill(batch, seq, heads, kv_heads, *dims)
            write = cache_write(batch, seq, kv_heads, *dims)
            on = self._accelerator
            both = (attention.price(on, op), memory_bound.price(on, write))
            return sum(priced.seconds for priced in both)

        shape = (attrs["batch"], attrs["seq_q"], attrs["heads"], attrs["kv_heads"])
        return table.near(*shape, model) if table else None


def _as_measured(attrs: dict) -> bool:
    """Whether an attention kernel is of the kind that the tables hold."""
    return (
        attrs["direction"] == "forward"
        and bool(attrs["causal"])
        and attrs["seq_q"] == attrs["seq_kv"]
        and (attrs.get("window") or (-1, -1))[0] < 0
    )
