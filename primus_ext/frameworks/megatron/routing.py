"""Routing of the mixture of experts: token counts are known, tokens have no values.

A router's choice cannot be read from tensors without storage.  Megatron's own dispatchers compute
splits and counts from the counts of :mod:`expert_load`; the virtual peers send what this rank
sends.  With real tensors the router's own choice counts, and is noted.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.deep_ep import load
from primus_ext.emulate.host_tensor import host_values, keep
from primus_ext.emulate.registry import patch
from primus_ext.emulate.selection import selecting
from primus_ext.frameworks.megatron import expert_load

_CORE = "megatron-core 0.19"
_MOE = "megatron.core.transformer.moe"
_SPLITS = ("input_splits", "output_splits", "output_splits_tp")

observed: dict[int, dict[str, list[int]]] = {}
"""What routers chose with real tensors: tokens, layer, copies of each expert; the latest."""
observed_ranks: dict[int, dict[str, list[int]]] = {}
"""The same, distinct tokens for each expert-parallel rank."""


def map_of(counts: tuple[int, ...], tokens: int) -> torch.Tensor:
    """A routing map ``[tokens, experts]`` (bool) in which every expert has its number of tokens.

    No token has more experts than the average, rounded up.

    Args:
        counts: Tokens of each expert, each at most ``tokens``.
        tokens: Local tokens.
    """
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    rows = torch.arange(experts.numel()) % tokens
    chosen = torch.zeros(tokens, len(counts), dtype=torch.bool)
    chosen[rows, experts] = True
    return chosen


class CountedMap:
    """A routing map ``[tokens, experts]`` of which no more is known than its sums.

    That is all that an all-to-all dispatcher asks of it.  A map with values, summed up again for
    every layer and microbatch, took most of the time of models with many experts.
    """

    def __init__(self, counts: tuple[int, ...], tokens: int) -> None:
        """Every expert has its number of tokens.

        Args:
            counts: Tokens of each expert.
            tokens: Local tokens.
        """
        self.shape = (tokens, len(counts))
        self._counts = counts

    def size(self, dim: int) -> int:
        """As of a tensor."""
        return self.shape[dim]

    def sum(self, dim: int) -> torch.Tensor:
        """Tokens of each expert, int64.

        Raises:
            ValueError: Another dimension than the tokens' was asked for.
        """
        if dim != 0:
            raise ValueError(f"dim={dim} of a routing map is not known; legal: 0")
        return torch.tensor(self._counts)


@patch(
    f"{_MOE}.moe_layer",
    "MoELayer.__init__",
    group="megatron",
    versions=_CORE,
    reason="a dispatcher does not know which layer it belongs to; recorded counts go by layer",
)
def _owner(module: ModuleType) -> None:
    initialize = module.MoELayer.__init__

    def initialize_known(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        dispatcher = self.token_dispatcher
        dispatcher.primus_layer = weakref.ref(self)
        manager = getattr(dispatcher, "_comm_manager", None)
        if manager is not None:
            manager.primus_layer = weakref.ref(self)
            manager.primus_etp = dispatcher.tp_size

    module.MoELayer.__init__ = initialize_known


def _layer(dispatcher: Any) -> str:
    """Key of the dispatcher's layer in a table of counts."""
    layer = dispatcher.primus_layer()
    return f"mtp.{layer.layer_number}" if layer.is_mtp_layer else str(layer.layer_number)


def _note(dispatcher: Any, chosen: torch.Tensor) -> None:
    """Remember a real routing map ``[tokens, experts]``."""
    with host_values():
        tokens, ep = chosen.shape[0], dispatcher.config.expert_model_parallel_size
        layer, ranks = _layer(dispatcher), chosen.view(tokens, ep, -1).any(-1)
        observed.setdefault(tokens, {})[layer] = chosen.sum(0).tolist()
        observed_ranks.setdefault(tokens, {})[layer] = ranks.sum(0).tolist()


def save(path: str | None) -> None:
    """Write what was observed, as a request's ``routing`` takes it; later layers are added.

    Args:
        path: Of the JSON file; None: nothing is written.
    """
    if path is None or not observed:
        return
    tokens = min(observed)  # dimensions are probed with larger microbatches
    target = Path(path)
    before = json.loads(target.read_text()) if target.exists() else {"layers": {}, "ranks": {}}
    found = {
        "tokens": tokens,
        "layers": {**before["layers"], **observed[tokens]},
        "ranks": {**before["ranks"], **observed_ranks[tokens]},
    }
    target.write_text(json.dumps(found))


def on_the_host(
    dispatcher: Any, preprocess: Callable[..., torch.Tensor], routing_map: torch.Tensor | CountedMap
) -> torch.Tensor:
    """What an all-to-all dispatcher counts, as the host reads it; call it where values exist.

    Args:
        dispatcher: Megatron's.
        preprocess: Its own method of that name.
        routing_map: ``[tokens, experts]`` bool, or its sums.

    Returns:
        Tokens of each local expert.
    """
    counts = preprocess(dispatcher, routing_map)
    for name in _SPLITS:
        value = getattr(dispatcher, name, None)
        if isinstance(value, torch.Tensor):
            setattr(dispatcher, name, value.numpy())
    if isinstance(dispatcher.num_out_tokens, torch.Tensor):
        dispatcher.num_out_tokens = int(dispatcher.num_out_tokens)
    by_expert = getattr(dispatcher, "num_global_tokens_per_local_expert", None)
    if by_expert is not None:
        dispatcher.num_global_tokens_per_local_expert = keep(by_expert)
    return keep(counts)


@patch(
    f"{_MOE}.token_dispatcher",
    "MoEAlltoAllTokenDispatcher.__init__",
    "MoEAlltoAllTokenDispatcher.preprocess",
    group="megatron",
    versions=_CORE,
    reason="token counts steer shapes and are read by the host: they need values",
)
def _all_to_all(module: ModuleType) -> None:
    dispatcher = module.MoEAlltoAllTokenDispatcher
    initialize, preprocess = dispatcher.__init__, dispatcher.preprocess

    def initialize_with_values(self: Any, *args: Any, **kwargs: Any) -> None:
        with host_values():
            initialize(self, *args, **kwargs)

    def preprocess_known(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        if not isinstance(routing_map, FakeTensor):
            _note(self, routing_map)
        with host_values():
            chosen: torch.Tensor | CountedMap = routing_map
            if isinstance(routing_map, FakeTensor):
                tokens = routing_map.shape[0]
                chosen = CountedMap(expert_load.copies(_layer(self), tokens, self.config), tokens)
            return on_the_host(self, preprocess, chosen)

    dispatcher.__init__ = initialize_with_values
    dispatcher.preprocess = preprocess_known


@patch(
    f"{_MOE}.token_dispatcher",
    "MoEAllGatherTokenDispatcher.dispatch_postprocess",
    group="megatron",
    versions=_CORE,
    reason="token counts steer shapes and are read by the host: they need values",
)
def _all_gather(module: ModuleType) -> None:
    dispatcher = module.MoEAllGatherTokenDispatcher
    postprocess = dispatcher.dispatch_postprocess

    def postprocess_known(self: Any, hidden_states: torch.Tensor, probs: Any) -> Any:
        if not isinstance(hidden_states, FakeTensor):
            own = self.routing_map[: self.routing_map.shape[0] // self.tp_ep_group.size()]
            _note(self, own)
            permuted, counts, local_probs = postprocess(self, hidden_states, probs)
            with host_values():  # a device's counts are copied to the host
                return permuted, keep(counts.clone()), local_probs
        peers = self.tp_ep_group.size()
        tokens = hidden_states.shape[0] // peers
        counts = expert_load.copies(_layer(self), tokens, self.config)
        local = [peers * counts[e] for e in self.local_expert_indices]
        with selecting(sum(local)):
            permuted, _, local_probs = postprocess(self, hidden_states, probs)
        with host_values():
            return permuted, keep(torch.tensor(local)), local_probs

    dispatcher.dispatch_postprocess = postprocess_known


def _expect(manager: Any, routing_map: torch.Tensor, per_node: int) -> None:
    """Tell the stand-in of DeepEP what the next dispatch carries."""
    tokens, size = routing_map.shape[0], manager.group.size()
    if not isinstance(routing_map, FakeTensor):
        copies = manager.config.expert_model_parallel_size
        own = routing_map.reshape(tokens, copies, manager.primus_etp, -1)[:, :, 0].reshape(
            tokens, -1
        )
        _note(manager, own)
        load.expect(None)
        return
    load.expect(
        expert_load.group_load(
            _layer(manager), tokens, manager.config, rank=manager.group.rank(),
            etp=manager.primus_etp, per_node=min(size, per_node),
        )
    )  # fmt: skip


@patch(
    f"{_MOE}.token_dispatcher",
    "_DeepepManager.setup_metadata",
    "_DeepepManager.dispatch",
    "_DeepepManager._indices_to_multihot",
    group="megatron",
    versions=_CORE,
    reason="token counts steer shapes and are read by the host: they need values",
)
def _deepep(module: ModuleType) -> None:
    from primus_ext.emulate.deep_ep.config import NVLINK_PEERS

    manager = module._DeepepManager
    setup, dispatch, multihot = (
        manager.setup_metadata, manager.dispatch, manager._indices_to_multihot
    )  # fmt: skip

    def setup_known(self: Any, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        _expect(self, routing_map, NVLINK_PEERS)
        setup(self, routing_map, probs)

    def dispatch_known(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden_states = dispatch(self, *args, **kwargs)
        with host_values():  # a tensor on the host, made from a list
            counts = torch.tensor(self.handle.load.per_local_expert)
            self.tokens_per_expert = keep(counts)
        return hidden_states

    def multihot_known(self: Any, indices: torch.Tensor, probs: torch.Tensor) -> Any:
        with selecting(int(self.tokens_per_expert.sum())):
            return multihot(self, indices, probs)

    manager.setup_metadata, manager.dispatch = setup_known, dispatch_known
    manager._indices_to_multihot = multihot_known


@patch(
    f"{_MOE}.token_dispatcher",
    "_HybridEPManager.setup_metadata",
    group="megatron",
    versions=_CORE,
    reason="token counts steer shapes and are read by the host: they need values",
)
def _hybridep(module: ModuleType) -> None:
    from primus_ext.emulate.deep_ep.hybrid import ranks_per_node

    setup = module._HybridEPManager.setup_metadata

    def setup_known(self: Any, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        _expect(self, routing_map, ranks_per_node(self.group))
        setup(self, routing_map, probs)
        if self.drop_and_pad:
            with host_values():
                rows = self.capacity * self.group.size()
                self.tokens_per_expert = keep(torch.full((self.num_local_experts,), rows))

    module._HybridEPManager.setup_metadata = setup_known


@patch(
    f"{_MOE}.token_dispatcher",
    "_NCCLEPManager.__init__",
    group="megatron",
    versions=_CORE,
    reason="Transformer Engine's NCCL EP has no stand-in",
)
def _ncclep(module: ModuleType) -> None:
    from primus_ext.emulate.session import ProgramError

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise ProgramError(
            "moe_flex_dispatcher_backend=ncclep can't be projected by this version; "
            "legal: deepep, hybridep"
        )

    module._NCCLEPManager.__init__ = refuse
