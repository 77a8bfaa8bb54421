"""Numeric formats of a run."""

from __future__ import annotations

from primus_ext.frameworks.published import launchers
from primus_ext.frameworks.published.draft import Draft, NotProjectable

# Words of the published label or recipe, Megatron-LM's recipe, and its format of the numbers.
_RECIPES = (
    ("delayed", "delayed", "hybrid"),
    ("current", "tensorwise", "hybrid"),
    ("tensorwise", "tensorwise", "hybrid"),
    ("rowwise", None, ""),
    ("blockwise", "blockwise", "e4m3"),
    ("mxfp8", "mxfp8", "e4m3"),
)


def write(draft: Draft) -> None:
    """Arguments of the compute, weight and gradient formats.

    Raises:
        NotProjectable: a format that Megatron-LM lacks.
    """
    compute = draft.run["precision"]["compute"]
    if compute == "fp16":
        draft.add("--fp16", "--initial-loss-scale", "65536")
        return
    if compute == "fp8":
        draft.add("--bf16", *_fp8(draft))
    elif compute == "fp4":
        draft.add("--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4")
    elif compute == "bf16":
        draft.add("--bf16")
    else:
        raise NotProjectable(f"precision {compute} is not mapped yet")
    _gradients(draft)
    _weights(draft, compute)


def _fp8(draft: Draft) -> tuple[str, ...]:
    precision = draft.run["precision"]
    words = (precision.get(key) or "" for key in ("recipe", "label", "scaling"))
    label = " ".join(words).lower()
    found = next(((r, f) for word, r, f in _RECIPES if word in label), None)
    if found is None:
        draft.note("FP8 recipe not stated: current scaling assumed")
        found = ("tensorwise", "hybrid")
    recipe, number_format = found
    if recipe is None:
        raise NotProjectable(f"Megatron-LM has no FP8 recipe for {precision['recipe']}")
    return ("--fp8-format", number_format, "--fp8-recipe", recipe)


def _gradients(draft: Draft) -> None:
    precision = draft.run["precision"]
    stated = precision.get("grad_reduce")
    if stated is None and "bf16 grad reduce" in str(precision.get("recipe")):
        stated = "bf16"
    if stated is None:
        stated = launchers.habits(draft).gradients
        draft.note(f"format of the gradients not stated: {stated}, as its launcher has it"
                   if stated else "format of the gradients not stated: FP32")  # fmt: skip
    if stated == "bf16":
        draft.add("--grad-reduce-in-bf16")


def _weights(draft: Draft, compute: str) -> None:
    """Whether weights are kept and gathered in FP8 beside their FP32 masters."""
    if compute != "fp8" or "--use-distributed-optimizer" not in draft.argv:
        return
    gathered = draft.is_on("FP8_PARAM_GATHER", "FP8_PARAMS")
    if gathered is None:
        gathered = launchers.habits(draft).fp8_weights
        if gathered and "blockwise" in draft.argv:
            gathered = False  # Megatron-Bridge's recipe of that name alone keeps them in BF16
        words = "kept and gathered in FP8" if gathered else "kept in BF16, cast for each use"
        draft.note(f"FP8 weights not stated: {words}, as its launcher has it"
                   if gathered is not None else f"FP8 weights not stated: {words}")  # fmt: skip
    if gathered:
        draft.add("--fp8-param-gather")
        if "mxfp8" in draft.argv and "--overlap-param-gather" in draft.argv:
            draft.add("--reuse-grad-buf-for-mxfp8-param-ag")
