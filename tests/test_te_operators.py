"""Every operator of the stand-in: both kernels exist and state the same outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from primus_ext.emulate.te import module, target
from primus_ext.emulate.te.ops import NAMESPACE, OPS
from tests import te_samples_model  # noqa: F401
from tests.te_samples import SAMPLES

module.build()


@pytest.fixture(autouse=True)
def hopper() -> None:
    target.set_target((9, 0))


def overload(name: str) -> Any:
    base, _, rest = name.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), base), rest or "default")


def spec(value: Any) -> list[Any]:
    return [
        (tuple(t.shape), t.dtype, t.stride()) if isinstance(t, torch.Tensor) else t
        for t in tree_leaves(value)
    ]


def on_fake_tensors(name: str, args: Any, kwargs: Any) -> Any:
    mode = FakeTensorMode()
    fakes = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t, args)
    with mode:
        return overload(name)(*fakes, **kwargs)


def test_every_operator_has_samples() -> None:
    assert set(SAMPLES) == set(OPS)


@pytest.mark.parametrize("name", list(OPS))
def test_both_kernels_are_registered(name: str) -> None:
    qualified = f"{NAMESPACE}::{name}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU")
    assert torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel is not None
    assert OPS[name].cpu is not None and OPS[name].fake is not None


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_fake_outputs_equal_real_ones(name: str) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        args, kwargs = SAMPLES[name](random.Random(seed))
        expected = spec(on_fake_tensors(name, args, kwargs))
        assert spec(overload(name)(*args, **kwargs)) == expected, seed


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_schema_tells_what_is_written_and_shared(name: str) -> None:
    """Only arguments declared so are written, and no output shares memory with an input."""
    args, kwargs = SAMPLES[name](random.Random(3))
    torch.library.opcheck(overload(name), args, kwargs, test_utils="test_schema")
