"""What is computed again stands for what was freed, without Megatron's compiled extension."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any, NoReturn

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from primus_ext.emulate import registry
from primus_ext.frameworks.megatron import patches  # noqa: F401  (declares)


@pytest.fixture
def share() -> Any:
    """The patched function; the extension can't be built."""

    def build() -> NoReturn:
        raise RuntimeError("there is no compiler")

    module = types.SimpleNamespace(_get_share_storage=build)
    (patch,) = (p for p in registry.registered("megatron") if p.name == "patches.share_storage")
    patch.apply(module)
    return module._get_share_storage()


def test_a_freed_output_has_the_size_of_the_new_one_and_keeps_it_alive(share: Any) -> None:
    with FakeTensorMode():
        output, again = torch.empty(6, 4), torch.empty(6, 4)
    view = output.view(24)  # as the backward of a product keeps it
    output.untyped_storage().resize_(0)
    share(output, again)
    assert output.untyped_storage().nbytes() == again.untyped_storage().nbytes() == 96
    freed: list[str] = []
    storages = {"again": again.untyped_storage(), "output": output.untyped_storage()}
    watched = {
        name: weakref.ref(storage, lambda _, n=name: freed.append(n))
        for name, storage in storages.items()
    }
    storages.clear()
    del output, again
    gc.collect()
    assert freed == []
    del view
    gc.collect()
    assert freed == ["output", "again"]
    assert all(ref() is None for ref in watched.values())


def test_tensors_with_values_need_the_extension(share: Any) -> None:
    with pytest.raises(RuntimeError, match="no compiler"):
        share(torch.empty(2), torch.empty(2))
