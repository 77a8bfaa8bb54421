"""Transformer Engine's cross entropy under a Megatron-LM that takes it (before 0.19).

Megatron-core up to 0.18 runs ``--cross-entropy-loss-fusion --cross-entropy-fusion-impl te``; the
argument validation of 0.19 refuses it for instabilities of training, while its model still has
the path.  Transformer Engine up to 2.17 wrote the gradient over the logits; later releases keep a
copy unless they are told otherwise.  A published run of those releases is emulated with both as
they were: name this module among the ``frameworks`` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_ext.emulate import registry

GROUP = "te_loss"
_CORE = "megatron-core 0.19"


def install(_request: Mapping[str, Any]) -> None:
    """Apply the patches, before the program imports Megatron-LM."""
    registry.apply_all(GROUP)


@registry.patch("megatron.training.arguments", "validate_args", group=GROUP, versions=_CORE,
                reason="0.19 refuses a loss that earlier releases ran; the model still has it")
def _allowed(module: Any) -> None:
    validate = module.validate_args

    def validate_other_than_loss(args: Any, *rest: Any, **named: Any) -> Any:
        wanted = args.cross_entropy_fusion_impl
        args.cross_entropy_fusion_impl = "native"
        try:
            return validate(args, *rest, **named)
        finally:
            args.cross_entropy_fusion_impl = wanted

    module.validate_args = validate_other_than_loss


@registry.patch("megatron.core.extensions.transformer_engine", "te_parallel_cross_entropy",
                group=GROUP, versions=_CORE,
                reason="the gradient went over the logits in the releases that are emulated")
def _in_place(module: Any) -> None:
    loss = module.parallel_cross_entropy

    def over_the_logits(
        logits: Any, labels: Any, tp_group: Any, is_cg_capturable: bool = False
    ) -> Any:
        return loss(logits, labels, 0.0, False, tp_group, overwrite_input=True)

    module.te_parallel_cross_entropy = over_the_logits
