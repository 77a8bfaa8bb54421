"""scripts/train.py trains for real on CPUs, in every layout alike, and says what is not legal."""

import pytest

from tests.training import environment, probe, scalars, train

LOGGED = ("lm loss", "grad-norm")
LAYOUTS = {
    "tp2": (2, ["parallel.tp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "pp2-vpp2": (2, ["parallel.pp=2", "parallel.vpp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "dp2": (2, []),
    "tp2-pp2-vpp2": (4, ["parallel.tp=2", "parallel.pp=2", "parallel.vpp=2"]),
}
EXPERT_LAYOUTS = {
    "ep2": (2, ["parallel.ep=2"]),
    "tp2-etp1-ep2": (2, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=1"]),
    "cp2-ep2": (2, ["parallel.cp=2", "parallel.ep=2"]),
}


def ok(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return done


class Checkpoint:
    """One step of a single process, saved, and three more by any layout from there."""

    def __init__(self, model, folder):
        self.model, self.folder = model, folder
        ok(train(folder, f"model={model}", "train.steps=1", "train.save=checkpoint"))
        self.single = self.continued("single", 1)

    def continued(self, name, processes, *overrides):
        log = f"{name}.jsonl"
        ok(train(self.folder, f"model={self.model}", "train.load=checkpoint", "train.finetune=true",
                 "train.steps=3", f"train.log_jsonl={log}", *overrides, processes=processes))
        values = scalars(self.folder / log)
        return {(step, name): values[step, name] for step in (1, 2, 3) for name in LOGGED}


@pytest.fixture(scope="module")
def tiny_gpt(tmp_path_factory):
    return Checkpoint("tiny_gpt", tmp_path_factory.mktemp("tiny_gpt"))


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory):
    return Checkpoint("tiny_moe", tmp_path_factory.mktemp("tiny_moe"))


def test_the_loss_goes_down(tmp_path):
    done = ok(train(tmp_path, "model=tiny_gpt", "train.steps=5", "train.log_jsonl=log.jsonl"))
    assert "iteration        5/       5" in done.stdout
    values = scalars(tmp_path / "log.jsonl")
    losses = [values[step, "lm loss"] for step in range(1, 6)]
    assert losses[-1] < losses[0] - 0.02
    # an untrained model knows nothing about 512 words: ln 512 = 6.24
    assert losses[0] == pytest.approx(6.24, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_dense_model_agree(layout, tiny_gpt):
    processes, overrides = LAYOUTS[layout]
    values = tiny_gpt.continued(layout, processes, *overrides)
    assert values == pytest.approx(tiny_gpt.single, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*EXPERT_LAYOUTS, "pp2-vpp2", "cp2"])
def test_layouts_of_a_mixture_of_experts_agree(layout, tiny_moe):
    processes, overrides = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    values = tiny_moe.continued(layout, processes, *overrides)
    assert values == pytest.approx(tiny_moe.single, rel=1e-5)


@pytest.mark.slow
def test_flags_that_must_not_change_the_mathematics(tiny_gpt):
    for name, overrides in {
        "recompute": ["train.recompute=full"],
        "no sequence parallelism": ["parallel.tp=2", "parallel.sequence_parallel=false"],
        "no overlap": ["parallel.overlap_grad_reduce=false"],
        "plain optimizer": ["parallel.distributed_optimizer=false"],
    }.items():
        processes = 1 if name == "recompute" else 2
        values = tiny_gpt.continued(name.replace(" ", "_"), processes, *overrides)
        assert values == pytest.approx(tiny_gpt.single, rel=1e-5), name


@pytest.mark.slow
def test_a_run_resumed_from_a_checkpoint_is_the_uninterrupted_one(tmp_path):
    options = ("model=tiny_gpt", "train.steps=4", "train.lr=1e-2")
    ok(train(tmp_path, *options, "train.save=saved", "train.save_interval=2",
             "train.log_jsonl=whole.jsonl", processes=2))
    ok(train(tmp_path, *options, "train.load=saved", "+megatron.ckpt_step=2",
             "train.log_jsonl=rest.jsonl", processes=2))
    whole, rest = scalars(tmp_path / "whole.jsonl"), scalars(tmp_path / "rest.jsonl")
    assert {step for step, _ in rest} == {3, 4}
    for step in (3, 4):
        for name in LOGGED:
            assert rest[step, name] == pytest.approx(whole[step, name], rel=1e-6)


ILLEGAL = {
    # overrides, processes, what the sentence must name
    "negative": (["parallel.tp=-1"], 1, ["parallel.tp=-1", "positive integer"]),
    "zero": (["train.mbs=0"], 1, ["train.mbs=0", "positive integer"]),
    "no number": (["train.seq=long"], 1, ["train.seq=long", "positive integer"]),
    "negative model": (["model.hidden_size=-64"], 1, ["model.hidden_size=-64"]),
    "world": (["parallel.tp=3"], 4, ["parallel.tp=3", "WORLD_SIZE=4", "multiple"]),
    "heads": (["parallel.tp=3"], 3, ["parallel.tp=3", "model.num_attention_heads=8"]),
    "kv heads": (["model.num_attention_heads=12", "model.num_query_groups=6", "parallel.tp=4",
                  "model.hidden_size=96", "train.mbs=1"],
                 4, ["parallel.tp=4", "model.num_query_groups=6"]),
    "gbs": (["train.gbs=6"], 4, ["train.gbs=6", "train.mbs=2", "2 x 4"]),
    "layers": (["parallel.pp=4", "model.num_layers=6"], 4,
               ["parallel.pp=4", "model.num_layers=6"]),
    "chunks": (["parallel.pp=2", "parallel.vpp=4"], 2,
               ["parallel.vpp=4", "parallel.pp=2", "model.num_layers=4"]),
    "vpp": (["parallel.vpp=2"], 1, ["parallel.vpp=2", "parallel.pp=1"]),
    "microbatches": (["parallel.pp=2", "parallel.vpp=2", "train.gbs=6"], 2,
                     ["train.gbs=6", "4 sequences"]),
    "ep on dense": (["parallel.ep=2"], 2, ["parallel.ep=2", "no experts"]),
    "experts": (["model=tiny_moe", "model.num_experts=6", "parallel.ep=4"], 4,
                ["model.num_experts=6", "parallel.ep=4"]),
    "expert ranks": (["model=tiny_moe", "parallel.tp=4", "parallel.ep=4"], 4,
                     ["parallel.etp=4", "parallel.ep=4", "16"]),
    "topk": (["model=tiny_moe", "model.moe_router_topk=9"], 1, ["model.moe_router_topk=9", "8"]),
    "sequence": (["train.seq=256"], 1, ["train.seq=256", "model.max_position_embeddings=128"]),
    "cp": (["parallel.cp=2", "train.seq=62"], 2, ["parallel.cp=2", "train.seq=62"]),
    "recompute": (["train.recompute=some"], 1, ["train.recompute=some", "none, selective or full"]),
    "modules": (["train.recompute=selective", "train.recompute_modules=[nose]"], 1,
                ["train.recompute_modules=['nose']", "core_attn"]),
    "unknown argument": (["+megatron.nose=1"], 1, ["megatron.nose=1", "no argument"]),
    "bad argument": (["+megatron.clip_grad=much"], 1, ["megatron.clip_grad=much", "float"]),
    "bad choice": (["+megatron.fp8=e9"], 1, ["megatron.fp8=e9", "hybrid"]),
    "bad flag": (["+megatron.fim_data=3"], 1, ["megatron.fim_data=3", "true or false"]),
    "layout": (["parallel.pp=2", "parallel.layout=Et*2|t*1L"], 2, ["parallel.layout=Et*2|t*1L"]),
    "load": (["train.load=nowhere"], 1, ["train.load=nowhere", "folder of a checkpoint"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    jobs = [{"overrides": o, "world": world} for o, world, _ in ILLEGAL.values()]
    return dict(zip(ILLEGAL, probe(jobs, tmp_path_factory), strict=True))


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_values_are_named(case, refusals):
    sentence = refusals[case].get("error")
    assert sentence is not None, "it was accepted"
    assert "\n" not in sentence
    for part in ILLEGAL[case][2]:
        assert part in sentence


@pytest.mark.parametrize(
    "override", ["parallel.tp=2", "precision=fp8_current", "+megatron.nose=1"]
)
def test_a_refusal_is_one_line_and_exit_code_2(override, tmp_path):
    done = train(tmp_path, "model=tiny_gpt", override)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert override.lstrip("+") in done.stderr


def test_unknown_model_names_list_the_models(tmp_path):
    done = train(tmp_path, "model=tiny")
    assert done.returncode == 1
    assert "tiny_gpt" in done.stderr and "llama3.1_70b" in done.stderr


def test_help_needs_no_torch(tmp_path):
    """The script imports torch and Megatron-LM only to train."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = train(tmp_path, "--cfg", "job", PYTHONPATH=path)
    assert done.returncode == 0 and "num_layers: 4" in done.stdout
