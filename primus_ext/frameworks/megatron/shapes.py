"""The user's job with other arguments: Megatron validates them again, nothing is imported twice."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError, first_line
from primus_ext.frameworks.megatron.world_patches import WORLD

_raw: list[tuple[Any, Any]] = []
"""Arguments as the program parsed them, and its defaults, before Megatron validated them."""


@patch("megatron.training.arguments", "validate_args", group=WORLD,
       versions="megatron-core 0.19",
       reason="validation writes derived values into the arguments; other degrees start before it")
def _validate_args(module: Any) -> None:
    validate = module.validate_args

    def validate_args(args: Any, defaults: Any = None) -> Any:
        if not _raw:
            _raw.append((copy.deepcopy(args), defaults))
        return validate(args) if defaults is None else validate(args, defaults)

    module.validate_args = validate_args


def reshaped(
    call: inspect.BoundArguments, changes: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The user's call of ``pretrain`` with other arguments, which become the global ones.

    What the program itself changed in its model configuration is kept.

    Args:
        call: The user's arguments to ``pretrain``.
        changes: Value by Megatron's argument name, e.g. ``tensor_model_parallel_size``.

    Raises:
        ProgramError: Megatron refuses them, or the program does not come from its arguments.
    """
    from megatron.training import arguments, global_vars

    if not _raw:
        raise ProgramError("the program's arguments were not parsed by Megatron-LM")
    raw, defaults = copy.deepcopy(_raw[0])
    old, unknown = global_vars.get_args(), [name for name in changes if not hasattr(raw, name)]
    if unknown:
        raise ProgramError(f"{unknown[0]}={changes[unknown[0]]} is no argument of Megatron-LM")
    vars(raw).update(changes)
    try:
        new = arguments.validate_args(raw, {} if defaults is None else defaults) or raw
    except (AssertionError, ValueError) as error:
        words = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise ProgramError(f"the framework refuses {words}: {first_line(error)}") from error
    given = call.arguments["cfg_container"]
    before, after = _container(old, given.model), _container(new, given.model)
    arguments_of = {**call.arguments, "cfg_container": _carried(given, before, after)}
    _pad_vocabulary(new, old)
    global_vars.set_args(new)
    return inspect.BoundArguments(call.signature, arguments_of)


def _pad_vocabulary(new: Any, old: Any) -> None:
    """Pad as Megatron did when it built the tokenizer, if it did."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training import global_vars

    if new.padded_vocab_size is None and old.padded_vocab_size is not None:
        tokenizer: Any = global_vars.get_tokenizer()
        size = tokenizer.vocab_size
        new.padded_vocab_size = vocab_size_with_padding(size, new, logging_enabled=False)


def _container(args: Any, model: Any) -> Any:
    from megatron.training import argument_utils

    builders = {
        "GPTModelConfig": argument_utils.gpt_config_from_args,
        "HybridModelConfig": argument_utils.hybrid_config_from_args,
    }
    build = builders.get(type(model).__name__)
    if build is None:
        raise ProgramError(
            f"a model configuration of type {type(model).__name__} can't be given other degrees; "
            f"legal: {', '.join(builders)}"
        )
    return argument_utils.pretrain_cfg_container_from_args(args, build(args))


def _carried(given: Any, before: Any, after: Any) -> Any:
    """``after`` with everything in which ``given`` differs from ``before``."""
    for field in dataclasses.fields(after):
        mine, old = getattr(given, field.name), getattr(before, field.name)
        if dataclasses.is_dataclass(old) and type(mine) is type(old):
            _carried(mine, old, getattr(after, field.name))
        elif not _same(mine, old):
            setattr(after, field.name, mine)
    return after


def _same(one: Any, two: Any) -> bool:
    if callable(one) and callable(two):
        return getattr(one, "__qualname__", one) == getattr(two, "__qualname__", two)
    return type(one) is type(two) and (one == two or repr(one) == repr(two))
