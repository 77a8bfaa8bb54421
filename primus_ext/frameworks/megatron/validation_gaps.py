"""Values of attention_backend that don't get as far as a clear refusal."""

from __future__ import annotations

import functools
from typing import Any

from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError


@patch("megatron.training.arguments", "validate_args", group="megatron",
       versions="megatron-core 0.19",
       reason="attention_backend=local fails with a TypeError, and --spec local can't be resolved; "
              "flash needs a package whose kernels need a GPU")
def _attention_backend(module: Any) -> None:
    original = module.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        backend = getattr(args.attention_backend, "name", args.attention_backend)
        if backend == "flash":
            raise ProgramError(
                "attention_backend=flash can't be projected by this version, which has no "
                "stand-in of the package flash-attn; legal: auto, fused, unfused"
            )
        if backend == "local":
            raise ProgramError(
                "attention_backend=local is no choice of megatron-core 0.19: it wants --spec "
                "local, which it then can't resolve; legal: auto, fused, unfused"
            )
        return original(args, *rest, **kwargs)

    module.validate_args = validate_args
