"""Device memory of ``HybridEPBuffer``'s own buffers.

Source: deepseek-ai/DeepEP, branch hybrid-ep, commit 94a9f8f: ``csrc/hybrid_ep/config.cuh``
(defaults), ``buffer/intranode.cu``, ``buffer/internode_doca.cu``, ``extension/allgather.cu``.  The
flags of a few bytes each, and the granularity of the driver's allocations, are left out.
"""

from __future__ import annotations

import dataclasses

CHUNK = 64
"""Default tokens of a chunk of dispatch and combine."""
_LEAST_TOKENS = 512
_SCAN_STATE = 8
"""``tmp_state_t``: an enum and an int32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What the buffers are sized for."""

    hidden: int
    tokens: int
    """Most tokens of a rank, before rounding."""
    local_experts: int
    ranks_per_node: int
    nodes: int
    scan_blocks: int = 108

    @property
    def rounded_tokens(self) -> int:
        """Tokens of a rank that there is room for."""
        return -(-max(self.tokens, _LEAST_TOKENS) // CHUNK) * CHUNK

    @property
    def node_experts(self) -> int:
        """Experts of a node."""
        return self.local_experts * self.ranks_per_node


def buffer_bytes(shape: Shape) -> int:
    """All buffers of one rank: within the node, across nodes, and the gathered routing map."""
    everybody = shape.rounded_tokens * shape.ranks_per_node * shape.nodes
    chunks = shape.rounded_tokens // CHUNK * shape.ranks_per_node * shape.nodes
    per_token = 2 * shape.hidden + 4 * shape.node_experts
    # dispatch and combine share the buffers of tokens and weights
    within = everybody * (per_token + 4 * (shape.hidden // 128)) + 2 * 4 * chunks
    scan = _SCAN_STATE * shape.scan_blocks * (shape.ranks_per_node + shape.local_experts)
    gathered = shape.node_experts * shape.nodes * everybody
    return within + scan + gathered + _across_nodes(shape, per_token)


def _across_nodes(shape: Shape, per_token: int) -> int:
    if shape.nodes == 1:
        return 0
    tokens, others = shape.rounded_tokens, shape.nodes - 1
    scales = 4 * (shape.hidden // 128)
    own = tokens * (2 * shape.hidden + 4 * shape.node_experts * shape.nodes + scales)
    dispatch = own + tokens * others * (per_token + scales)
    combine = 2 * tokens * others * per_token
    flags = 2 * 2 * 8 * (tokens // CHUNK * others + 2 * others)
    return dispatch + combine + flags
