"""Run by tests in a fresh process: what scripts/train.py makes of configurations.

Reads a JSON list of jobs ``{"overrides": [...], "world": N, "count": bool}`` from standard input
and writes a JSON list of answers to the file named on the command line: the layers of every stage
and chunk, some of Megatron's settings and, if asked for, the parameters of the real module of a
single process.
"""

import contextlib
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def load_script():
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def split(transformer):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layout = transformer.pipeline_model_parallel_layout
    stages, chunks = transformer.pipeline_model_parallel_size, (
        transformer.virtual_pipeline_model_parallel_size or 1
    )
    if layout is not None:
        return [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    return [
        [get_num_layers_to_build(transformer, vp_stage=v, pp_rank=p) for v in range(chunks)]
        for p in range(stages)
    ]


def parameters(model_config):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder
    from torch._subclasses.fake_tensor import FakeTensorMode

    groups = ProcessGroupCollection.use_mpu_process_groups()
    with FakeTensorMode():
        model = GPTModelBuilder(model_config).build_model(groups)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def answer(script, job):
    from hydra import compose
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(job.get("world", 1))}
    cfg = compose("config", overrides=job["overrides"])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            script.check(cfg)
            args, config = script.parse(cfg, on_cpu=True)
            transformer = config.model.transformer
            transformer.perform_initialization = False
            counts = parameters(config.model) if job.get("count") else None
    except script.ConfigError as error:
        return {"error": str(error)}
    finally:
        with contextlib.suppress(Exception):
            destroy_num_microbatches_calculator()
        with contextlib.suppress(Exception):
            destroy_global_vars()
    return {
        "split": split(transformer),
        "parameters": counts,
        "dp": args.data_parallel_size,
        "seq": args.seq_length,
        "bf16": args.bf16,
        "padded_vocab": args.padded_vocab_size,
    }


def main(out):
    warnings.simplefilter("ignore")
    jobs = json.load(sys.stdin)
    script = load_script()
    from primus_ext.emulate.virtual_cuda import enable_cpu_training

    os.environ["WORLD_SIZE"] = "1"
    enable_cpu_training()
    import torch.distributed as dist
    from hydra import initialize_config_dir
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    with initialize_config_dir(str(ROOT / "hydra_conf" / "trainer"), version_base="1.3"):
        answers = [answer(script, job) for job in jobs]
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
