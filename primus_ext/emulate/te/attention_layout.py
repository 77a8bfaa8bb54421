"""Layouts of query, key and value tensors: ``sbhd``, ``bshd``, ``bhsd``, ``thd`` and packings."""

from __future__ import annotations

import torch

_SPLIT = {"sbhd_2bshd": ("sbhd", "bshd"), "bshd_2sbhd": ("bshd", "sbhd"),
          "thd_2bshd": ("thd", "bshd"), "thd_2sbhd": ("thd", "sbhd")}  # fmt: skip


def formats(layout: str) -> tuple[str, str]:
    """Formats of the query and of key and value, e.g. ``sbhd_sb2hd`` -> ``("sbhd", "sbhd")``."""
    parts = layout.removeprefix("paged_kv_").replace("2", "").replace("3", "").split("_")
    return parts[0], parts[-1]


def group(layout: str) -> str:
    """How q, k, v lie: ``3hd``, ``h3d``, ``hd_2hd``, ``hd_h2d``, ``hd_hd_hd`` or ``paged``."""
    if layout.startswith("paged_kv"):
        return "paged"
    parts = layout.split("_")
    if len(parts) == 1:
        return "3hd" if parts[0].endswith("3hd") else "h3d"
    if len(parts) == 2:
        return "hd_2hd" if parts[1].endswith("2hd") else "hd_h2d"
    return "hd_hd_hd"


def heads_and_dim(tensor: torch.Tensor, fmt: str) -> tuple[int, int]:
    """Number of heads and size of a head."""
    return tensor.shape[1 if fmt == "bhsd" else -2], tensor.shape[-1]


def convert_shape(shape: list[int], source: str, target: str) -> list[int]:
    """The shape in another format; ``thd`` converts to itself only.

    Raises:
        ValueError: If tokens would have to be told apart into sequences.
    """
    if source == target:
        return list(shape)
    if "t" in (source[0], target[0]):
        raise ValueError(f"no shape conversion from {source} to {target}")
    sizes = dict(zip(source, shape, strict=True))
    return [sizes[axis] for axis in target]


def to_bhsd(tensor: torch.Tensor, fmt: str) -> torch.Tensor:
    """A view ordered (batch, heads, sequence, dim)."""
    return tensor.permute([fmt.index(axis) for axis in "bhsd"])


def allocate_gradients(
    layout: str, shapes: tuple[list[int], list[int], list[int]], like: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty dq, dk, dv; packed layouts are views of one buffer, as the extension makes them.

    Args:
        layout: Layout of the gradients.
        shapes: Shapes of dq, dk and dv.
        like: A tensor on the device.
        dtype: Their dtype.
    """
    kind = group(layout)
    if kind == "hd_hd_hd":
        dq, dk, dv = (like.new_empty(shape, dtype=dtype) for shape in shapes)
        return dq, dk, dv
    axis = len(shapes[0]) - (2 if kind in ("3hd", "hd_2hd") else 1)
    count = 3 if kind in ("3hd", "h3d") else 2
    packed_shape = list(shapes[0] if count == 3 else shapes[1])
    packed_shape.insert(axis, count)
    packed = like.new_empty(packed_shape, dtype=dtype)
    views = packed.unbind(axis)
    if count == 3:
        return views[0], views[1], views[2]
    return like.new_empty(shapes[0], dtype=dtype), views[0], views[1]
