"""What was classified once is what classifying again gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from primus_ext.emulate import selection, virtual_world
from primus_ext.observe import classify, known_ops
from primus_ext.observe.recorder import Recorder
from primus_ext.trace import Op


class Checked(Recorder):
    """Classifies every call a second time."""

    def __init__(self) -> None:
        super().__init__({})
        self.remembered = 0

    def _op(self, func: Any, args: tuple, kwargs: dict, produced: list) -> Op | None:
        key = known_ops.key(func, args, kwargs, produced)
        self.remembered += self._known.get(key) is not known_ops.ABSENT
        found = super()._op(func, args, kwargs, produced)
        assert found == classify.classify(func, args, kwargs, produced, self)
        return found


@pytest.fixture
def recorder() -> Iterator[Checked]:
    checked = Checked()
    with virtual_world.no_storage(), checked, checked.collect("forward"):
        yield checked


def test_layers_forward_and_backward(recorder: Checked) -> None:
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(100, 64), *layers, nn.Linear(64, 100))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        loss = model(torch.zeros(2, 16, dtype=torch.int64)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert recorder.remembered > 200


def test_what_a_product_reads_depends_on_its_layout(recorder: Checked) -> None:
    a, b = torch.empty(8, 8), torch.empty(8, 8)
    for left in (a, a.t()):
        for right in (b, b.t()):
            for _ in range(2):
                left @ right
    layouts = [op.attr("layout") for op in recorder.ops if op.name == "aten.mm"]
    assert sorted(layouts) == ["nn", "nt", "tn", "tt"]


def test_what_moves_depends_on_the_storage(recorder: Checked) -> None:
    row = torch.empty(1, 8)
    for _ in range(2):
        torch.add(torch.empty(8, 8), torch.empty(8, 8))
        torch.add(torch.empty(8, 8), row.expand(8, 8))
    moved = [op.bytes for op in recorder.ops if op.name == "aten.add"]
    assert moved == [3 * 8 * 8 * 4, 2 * 8 * 8 * 4 + 8 * 4]


def test_what_is_recalled_is_what_the_world_below_answers(recorder: Checked) -> None:
    def work() -> list[int]:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        layer(torch.zeros(2, 16, 64)).sum().backward()
        chosen = torch.zeros(8, dtype=torch.bool)
        with selection.selecting(3):
            assert torch.empty(8, 4)[chosen].shape == (3, 4)
        assert torch.tensor(2.5).item() == 2.5  # made from a number: it has a value
        assert torch.empty(1).item() == 1.0
        return [call.op for _, _, call in recorder.calls]

    count = len(recorder.calls)
    below = work()[count:]
    answered: list[bool] = []

    def recalled(*call: Any) -> Any:
        found = virtual_world.recalled(*call)
        answered.append(found is not NotImplemented)  # to hold it would change the backward
        return found

    recorder.recalled = recalled
    count = len(recorder.calls)
    assert work()[count:] == below
    assert sum(answered) > len(answered) / 2


def test_numbers_of_another_type_are_other_calls() -> None:
    tensor = torch.empty(2)
    keys = [
        known_ops.key(torch.ops.aten.add.Scalar, (tensor, number), {}, [])
        for number in (1, 1.0, True)
    ]
    assert len(set(keys)) == 3 and None not in keys


def test_what_is_not_known_has_no_key() -> None:
    tensor = torch.empty(2)
    add = torch.ops.aten.add.Tensor
    assert known_ops.key(add, (tensor, tensor), {}, []) is None  # which of them is written?
    assert known_ops.key(add, (tensor, object()), {}, []) is None
    assert known_ops.key(torch.ops.c10d.barrier.default, (), {}, []) is None
