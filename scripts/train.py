#!/usr/bin/env python
"""Pre-train a GPT model with Megatron-LM on generated data.

    python scripts/train.py model=tiny_gpt train.steps=5
    torchrun --nproc-per-node 8 scripts/train.py model=llama3.1_8b parallel.tp=2 precision=bf16

On GPUs, or on CPUs where there is none.  The keys are explained in hydra_conf/trainer; any other
argument of Megatron-LM can be added with ``+megatron.<argument>=<value>``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import warnings
from functools import partial
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from primus_ext.frameworks.command_line import megatron_command_line
from primus_ext.frameworks.validation import (
    ConfigError,
    check_arguments,
    check_sizes,
    judged_by_megatron,
    positive_int,
)

# Megatron-LM's argument -> our key, for the keys that have another name there
KEYS = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "num_virtual_stages_per_pipeline_rank": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "sequence_parallel": "parallel.sequence_parallel",
    "use_distributed_optimizer": "parallel.distributed_optimizer",
    "overlap_grad_reduce": "parallel.overlap_grad_reduce",
    "overlap_param_gather": "parallel.overlap_param_gather",
    "pipeline_model_parallel_layout": "parallel.layout",
    "micro_batch_size": "train.mbs",
    "global_batch_size": "train.gbs",
    "seq_length": "train.seq",
    "train_iters": "train.steps",
    "seed": "train.seed",
    "lr": "train.lr",
    "log_interval": "train.log_interval",
    "save": "train.save",
    "save_interval": "train.save_interval",
    "load": "train.load",
    "finetune": "train.finetune",
    "recompute_granularity": "train.recompute",
    "recompute_method": "train.recompute_method",
    "recompute_num_layers": "train.recompute_num_layers",
    "recompute_modules": "train.recompute_modules",
}
SIZES = ("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep", "train.mbs",
         "train.gbs", "train.seq", "train.steps", "train.log_interval", "train.save_interval",
         "train.recompute_num_layers")  # fmt: skip


def default_layout(num_layers: int, pp: Any, vpp: Any, mtp: int | None = None) -> str | None:
    """Pipeline layout for a model whose layers may not divide evenly.

    The embedding and the loss count as one layer each.  What is left over goes to the middle
    stages first and to the first one, which holds the most activations, last.

    Args:
        num_layers: Transformer layers.
        pp: Pipeline stages.
        vpp: Chunks per stage.
        mtp: Multi-token-prediction layers; they stand before the loss.

    Returns:
        Megatron-LM's layout; None, which is its even split, where that works or nothing does.
    """
    if not (isinstance(pp, int) and isinstance(vpp, int) and pp > 1 and vpp > 0):
        return None
    chunks, extra = pp * vpp, mtp or 0
    if num_layers % chunks == 0 or chunks > num_layers:
        return None
    base, left = divmod(num_layers + extra + 2, chunks)
    order = [*range(1, chunks - 1), chunks - 1, 0]
    units = [base + (chunk in order[:left]) for chunk in range(chunks)]
    units[0] -= 1
    units[-1] -= 1 + extra
    stages = [f"t*{count}" if count > 0 else "" for count in units]
    return "E" + "|".join(stages) + "m" * extra + "L"


OmegaConf.register_new_resolver("default_layout", default_layout, replace=True)


def world_size() -> int:
    """Processes of the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def megatron_arguments(cfg: DictConfig, on_cpu: bool) -> dict[str, Any]:
    """All arguments of Megatron-LM that the configuration sets, by name.

    Raises:
        ConfigError: If there is no hardware for the precision.
    """
    groups: Any = OmegaConf.to_container(cfg, resolve=True)
    parallel, train = groups["parallel"], groups["train"]
    _fill_in(parallel)
    arguments: dict[str, Any] = {**groups["model"], **groups["precision"]}
    for name, key in KEYS.items():
        group, _, leaf = key.partition(".")
        if groups[group][leaf] is not None:
            arguments[name] = groups[group][leaf]
    if parallel["vpp"] == 1 or arguments.get("pipeline_model_parallel_layout") is not None:
        del arguments["num_virtual_stages_per_pipeline_rank"]
    unused = {"none": ("granularity", "modules", "method", "num_layers"),
              "selective": ("method", "num_layers"), "full": ("modules",)}  # fmt: skip
    for name in unused[train["recompute"]]:
        arguments.pop(f"recompute_{name}", None)
    arguments["no_load_optim"] = arguments["no_load_rng"] = train["finetune"]
    return _for_this_machine(arguments, groups, on_cpu) | groups["megatron"]


def _fill_in(parallel: dict[str, Any]) -> None:
    """Settings that follow from the others where they are left open."""
    several = world_size() > parallel["tp"] * parallel["pp"] * parallel["cp"]
    if parallel["sequence_parallel"] is None:
        parallel["sequence_parallel"] = parallel["tp"] > 1
    if parallel["overlap_grad_reduce"] is None:
        parallel["overlap_grad_reduce"] = several
    if parallel["overlap_param_gather"] is None:
        parallel["overlap_param_gather"] = (
            parallel["overlap_grad_reduce"] and parallel["distributed_optimizer"]
        )


def _for_this_machine(
    arguments: dict[str, Any], groups: dict[str, Any], on_cpu: bool
) -> dict[str, Any]:
    """Without what is not installed, or needs a GPU where there is none."""
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:  # APEX
        arguments = arguments | {"gradient_accumulation_fusion": False}
    if not on_cpu and importlib.util.find_spec("transformer_engine"):
        return arguments
    if arguments.get("fp8") or arguments.get("fp4"):
        choice = HydraConfig.get().runtime.choices["precision"]
        raise ConfigError(
            f"precision={choice} is not legal here: it needs a GPU and Transformer Engine, "
            "so use fp32 or bf16"
        )
    return arguments | groups["local"] | (groups["cpu"] if on_cpu else {})


def parse(cfg: DictConfig, on_cpu: bool) -> tuple[Any, Any]:
    """Megatron-LM's validated arguments, and the configuration that its pretrain takes.

    Raises:
        ConfigError: If the configuration can't be trained.
    """
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    keys = {str(name): f"model.{name}" for name in cfg.model} | KEYS
    keys["world_size"] = "WORLD_SIZE"
    arguments = megatron_arguments(cfg, on_cpu)
    check_sizes(arguments, keys)
    words = megatron_command_line(arguments, keys)
    own_argv, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        with judged_by_megatron(keys, arguments | {"world_size": world_size()}):
            args = parse_and_validate_args()
    finally:
        sys.argv = own_argv
    with judged_by_megatron(keys, vars(args)):
        model = gpt_config_from_args(args)
        config = pretrain_cfg_container_from_args(args, model)
    check_arguments(args, model.transformer, keys)
    if (args.virtual_pipeline_model_parallel_size or 1) != cfg.parallel.vpp:
        raise ConfigError(
            f"parallel.vpp={cfg.parallel.vpp} is not legal with a layout that makes "
            f"{args.virtual_pipeline_model_parallel_size or 1} chunks per pipeline rank"
        )
    return args, config


class JsonLog:
    """Takes the place of Megatron-LM's TensorBoard writer: a line of JSON for every scalar."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: Any = None

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Write one value."""
        if self._file is None:
            os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
            self._file = open(self._path, "w", buffering=1)  # noqa: SIM115 (open to the end)
        if " vs samples" not in tag:
            line = {"step": step, "name": tag, "value": float(value)}
            self._file.write(json.dumps(line) + "\n")

    def add_text(self, tag: str, text: str, global_step: int | None = None) -> None:
        """Texts (Megatron-LM writes its arguments) are left out."""

    def flush(self) -> None:
        """Lines are written at once."""


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Train, validation and test set of generated sequences."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args: Any = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=args.context_parallel_size,
    )
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config)
    return builder.build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own batches


def get_batch(iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch: this rank's part of each sequence."""
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank
    from megatron.training.utils import is_first_or_last_pipeline_stage

    names = ("tokens", "position_ids", "labels", "loss_mask")
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(names)
    sample = next(iterator)
    batch = {name: sample[name].cuda(non_blocking=True) for name in names}
    ranks: Any = mpu.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=ranks)


def loss_function(loss_mask: Any, losses: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum of the losses of all tokens, number of tokens, and both as what is to be logged."""
    import torch

    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    logged = torch.cat([loss.detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": logged}


def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
    """Run one microbatch through (this rank's part of) the model."""
    from megatron.core.utils import get_attr_wrapped_model

    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses, partial(loss_function, batch["loss_mask"])


def check(cfg: DictConfig) -> None:
    """What can be told without Megatron-LM.

    Raises:
        ConfigError: If the configuration can't be trained.
    """
    for key in SIZES:
        positive_int(key, OmegaConf.select(cfg, key))
    if cfg.parallel.vpp > 1 and cfg.parallel.pp == 1:
        raise ConfigError(
            f"parallel.vpp={cfg.parallel.vpp} is not legal with parallel.pp=1: "
            "chunks need a pipeline, so use parallel.pp>1 or parallel.vpp=1"
        )
    if cfg.train.recompute not in ("none", "selective", "full"):
        raise ConfigError(
            f"train.recompute={cfg.train.recompute} is not legal: use none, selective or full"
        )
    # Megatron-LM would start from random weights
    if cfg.train.load not in (None, cfg.train.save) and not os.path.isdir(cfg.train.load):
        raise ConfigError(
            f"train.load={cfg.train.load} is not legal: it must be the folder of a checkpoint"
        )
    for key in ("train.save", "train.log_jsonl"):
        path = OmegaConf.select(cfg, key)
        if path is not None and not _writable(os.path.dirname(os.path.abspath(path))):
            raise ConfigError(f"{key}={path} is not legal: its folder can't be written to")


def _writable(folder: str) -> bool:
    """Whether the folder, or the lowest existing one above it, can be written to."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def train(cfg: DictConfig) -> None:
    """Train.

    Raises:
        ConfigError: If the configuration can't be trained.
    """
    check(cfg)
    # Megatron-LM asks for it where it overlaps tensor- or context-parallel communication.
    if cfg.parallel.tp > 1 or cfg.parallel.cp > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Torch and Megatron-LM load in seconds: import them once the configuration makes sense.
    from primus_ext.emulate.virtual_cuda import enable_cpu_training

    on_cpu = enable_cpu_training()
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import global_vars, pretrain

    args, config = parse(cfg, on_cpu)
    if cfg.train.log_jsonl and args.rank == args.world_size - 1:
        global_vars._GLOBAL_TENSORBOARD_WRITER = JsonLog(cfg.train.log_jsonl)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


@hydra.main(version_base="1.3", config_path="../hydra_conf/trainer", config_name="config")
def main(cfg: DictConfig) -> None:
    """Train, or say in one sentence why not and leave with code 2."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # optional packages that Megatron-LM looks for
    try:
        train(cfg)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
