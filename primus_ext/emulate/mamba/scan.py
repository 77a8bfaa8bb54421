"""The chunked scan of Mamba 2 (SSD), forward and backward, as the kernels of ``mamba_ssm`` do it.

Shapes: x ``[batch, seq, heads, head_dim]``, dt ``[batch, seq, heads]``, A and D ``[heads]``, B and
C ``[batch, seq, groups, state]``.  Algorithm: Dao and Gu, "Transformers are SSMs", section 6
(arXiv 2405.21060).  Which intermediates exist at the same time follows the Python code of
mamba_ssm 2.3 (``ops/triton/ssd_combined.py`` and the ``ssd_*`` files beside it); each is allocated
here at its place, and one operator stands for the kernels of each direction.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from primus_ext.emulate.mamba.ops import define, gradients

Maybe = torch.Tensor | None
_FP32 = torch.float32


def reference(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: Maybe, z: Maybe, dt_bias: Maybe, softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The scan as a masked product over the whole sequence (the dual form); fp32.

    Returns:
        The result, gated by ``silu(z)`` where given, and the result without the gate.
    """
    x, dt, b, c = x.float(), dt.float(), b.float(), c.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    dt = F.softplus(dt) if softplus else dt
    decay = torch.cumsum(dt * a.float(), dim=1)
    ratio = a.shape[0] // b.shape[2]
    b, c = (t.repeat_interleave(ratio, dim=2) for t in (b, c))
    # [batch, heads, l, s]: what step s still weighs at step l
    length = decay[:, :, None] - decay[:, None]
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    weights = length.masked_fill(~causal[None, :, :, None], -math.inf).exp()
    scores = torch.einsum("blhn,bshn->blsh", c, b) * weights * dt[:, None]
    out = torch.einsum("blsh,bshp->blhp", scores, x)
    if d is not None:
        out = out + x * d.float()[:, None]
    return (out if z is None else out * F.silu(z.float())), out


@define("scan_fwd(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z,"
        " Tensor? dt_bias, bool softplus, int chunk, int flops, Tensor(a!) out,"
        " Tensor(b!)? out_x, Tensor(c!)[] workspace) -> ()")
def _scan_fwd(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, dt_bias: Any,
              softplus: bool, chunk: int, flops: int, out: Any, out_x: Any,
              workspace: Any) -> None:  # fmt: skip
    gated, plain = reference(x, dt, a, b, c, d, z, dt_bias, softplus)
    out.copy_(gated)
    if out_x is not None:
        out_x.copy_(plain)


@define("scan_bwd(Tensor dout, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d,"
        " Tensor? z, Tensor? dt_bias, Tensor out, bool softplus, int chunk, int flops,"
        " Tensor(a!) dx, Tensor(b!) ddt, Tensor(c!) da, Tensor(d!) db, Tensor(e!) dc,"
        " Tensor(f!)? dd, Tensor(g!)? dz, Tensor(h!)? ddt_bias, Tensor(i!)[] workspace) -> ()")
def _scan_bwd(dout: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, dt_bias: Any,
              out: Any, softplus: bool, chunk: int, flops: int, dx: Any, ddt: Any, da: Any,
              db: Any, dc: Any, dd: Any, dz: Any, ddt_bias: Any,
              workspace: Any) -> None:  # fmt: skip
    def gated(*inputs: Any) -> torch.Tensor:
        (x, dt, a, b, c, d, z, dt_bias) = inputs
        return reference(x, dt, a, b, c, d, z, dt_bias, softplus)[0]

    found = gradients(gated, [x, dt, a, b, c, d, z, dt_bias], dout)
    for into, grad in zip((dx, ddt, da, db, dc, dd, dz, ddt_bias), found, strict=True):
        if into is not None and grad is not None:
            into.copy_(grad)


class Sizes:
    """Sizes of one scan, and its FLOPs."""

    def __init__(self, x: torch.Tensor, b: torch.Tensor, chunk: int) -> None:
        """From x and B."""
        self.batch, self.seq, self.heads, self.dim = x.shape
        self.groups, self.state = b.shape[2:]
        self.chunk, self.chunks = chunk, math.ceil(self.seq / chunk)

    def empty(self, *shape: int, dtype: torch.dtype = _FP32) -> torch.Tensor:
        """A new intermediate; fp32 unless said otherwise."""
        return torch.empty(shape, dtype=dtype)

    def per_step(self) -> torch.Tensor:
        """One fp32 value for each step and head."""
        return self.empty(self.batch, self.heads, self.chunks, self.chunk)

    def states(self, dtype: torch.dtype = _FP32) -> torch.Tensor:
        """The state of every chunk."""
        return self.empty(
            self.batch, self.chunks, self.heads, self.dim, self.state, dtype=dtype
        )

    def scores(self) -> torch.Tensor:
        """C B^T of every chunk and group."""
        return self.empty(self.batch, self.chunks, self.groups, self.chunk, self.chunk)

    def splits(self) -> int:
        """Partial sums over the heads of a group in the kernels of dB, dC and dCB."""
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        ratio = self.heads // self.groups
        each = max(min(math.ceil(self.batch * self.chunks * self.heads / processors), ratio), 1)
        return math.ceil(ratio / each)

    def flops(self, states: int, causal: int, scores: int) -> int:
        """FLOPs of products with the states, within chunks (causal half), and for the scores.

        Args:
            states: Products ``[chunk, head_dim] x [chunk, state]`` or alike, one a head.
            causal: Products ``[chunk, chunk] x [chunk, head_dim]``, one a head, causal half.
            scores: Products ``[chunk, state] x [chunk, state]``, one a group.
        """
        tokens = self.batch * self.chunks * self.chunk
        head = states * 2 * self.dim * self.state + causal * (self.chunk + 1) * self.dim
        return tokens * (self.heads * head + self.groups * scores * 2 * self.chunk * self.state)


def forward(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    chunk: int, d: Maybe, z: Maybe, dt_bias: Maybe, softplus: bool, state_dtype: Any = None,
) -> tuple[torch.Tensor, Maybe, torch.Tensor]:  # fmt: skip
    """Result; with a gate, the result before the gate; the decay summed over each chunk."""
    size = Sizes(x, b, chunk)
    dt_out, decay = size.per_step(), size.per_step()
    states = size.states()
    passed = size.states(state_dtype or c.dtype)
    final = size.empty(size.batch, size.heads, size.dim * size.state)
    states = passed  # the chunks' own states are free from here on
    scores = size.scores()
    out = torch.empty(x.shape, dtype=x.dtype)
    out_x = None if z is None else torch.empty(x.shape, dtype=x.dtype)
    _scan_fwd(
        x, dt, a, b, c, d, z, dt_bias, softplus, chunk, size.flops(2, 1, 1), out, out_x,
        [decay, dt_out, states, final, scores],
    )  # fmt: skip
    return out, out_x, decay


def backward(
    dout: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    c: torch.Tensor, out: torch.Tensor, chunk: int, d: Maybe, z: Maybe, dt_bias: Maybe,
    softplus: bool, into: dict[str, torch.Tensor], state_dtype: Any = None,
) -> dict[str, Maybe]:  # fmt: skip
    """Gradients by name: those in ``into`` (dx, ddt, db, dc, dz) are written there."""
    size = Sizes(x, b, chunk)
    grads: dict[str, Maybe] = {
        name: into[name] if name in into else torch.empty_like(like)
        for name, like in (("db", b), ("dc", c), ("ddt", dt))
    }
    dt_in = dt.clone()
    decay, dt_out = size.per_step(), size.per_step()
    scores = size.scores()
    own = size.states()
    states, final = size.states(), size.empty(size.batch, size.heads, size.dim * size.state)
    del own
    if z is not None:
        blocks = math.ceil(chunk / 32)
        partial = None if d is None else size.empty(blocks, size.batch, size.chunks, size.heads)
        grads["dz"] = into["dz"] if "dz" in into else torch.empty_like(z)
        dout_x = torch.empty_like(dout)
        grads["dd"] = None if d is None else torch.empty_like(d)
        del partial
    else:
        grads["dz"], dout_x = None, dout
    kept = _state_gradients(size, x, state_dtype)
    del states
    grads["dx"] = into["dx"] if "dx" in into else torch.empty_like(x)
    kept += _input_gradients(size, d)
    if z is None:
        grads["dd"] = None if d is None else torch.empty_like(d)
    grads["da"] = torch.empty_like(a, dtype=_FP32)
    grads["ddt_bias"] = None if dt_bias is None else torch.empty_like(dt_bias, dtype=_FP32)
    _scan_bwd(
        dout, x, dt, a, b, c, d, z, dt_bias, out, softplus, chunk, size.flops(5, 3, 3),
        *(grads[n] for n in ("dx", "ddt", "da", "db", "dc", "dd", "dz", "ddt_bias")),
        [dt_in, decay, dt_out, scores, final, *kept, *([] if z is None else [dout_x])],
    )  # fmt: skip
    return grads


def _state_gradients(size: Sizes, x: torch.Tensor, state_dtype: Any) -> list[torch.Tensor]:
    """Gradients of the states, then both cast for the products that follow."""
    own = size.states()
    dstates = size.states(state_dtype or x.dtype)
    states = size.states(state_dtype or x.dtype)
    blocks = math.ceil(size.dim * size.state / 64)
    partial = size.empty(size.batch, size.heads, size.chunks, blocks)
    chunk_decay = size.empty(size.batch, size.heads, size.chunks)
    del own, partial
    return [dstates, states, chunk_decay]


def _input_gradients(size: Sizes, d: Maybe) -> list[torch.Tensor]:
    """What the kernels of dx, dB, dC, dCB and of the decay leave, in their order."""
    rows, splits = math.ceil(size.chunk / 32), size.splits()
    partial = None if d is None else size.empty(rows, size.batch, size.chunks, size.heads, 1)
    ddt = size.per_step()
    del partial
    kept = [ddt]
    for _ in ("dB", "dC"):
        decay = size.per_step()
        split = size.empty(size.batch, size.seq, splits, size.groups, size.state)
        total = size.empty(size.batch, size.seq, size.groups, size.state)
        kept += [decay, total]
        del split
    split = size.empty(size.batch, size.chunks, splits, size.groups, size.chunk, size.chunk)
    kept.append(size.scores())
    del split
    flipped = size.per_step()
    summed = size.per_step()
    del flipped
    kept.append(size.per_step())  # the decay's gradient from later chunks
    del summed
    partial = size.empty(size.batch, size.heads, size.chunks, rows, size.chunk)
    kept.append(size.per_step())
    del partial
    return kept
