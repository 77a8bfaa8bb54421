"""The model files of scripts/train.py against published counts, own arithmetic, real modules."""

from pathlib import Path

import pytest
import yaml

from tests.training import probe

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "hydra_conf" / "trainer" / "model"

# Parameters in billions, of the Hugging Face model cards and safetensors indices.  DeepSeek-V3
# without its multi-token-prediction layer; DeepSeek-V2-Lite: 15.7 B on its card.
PUBLISHED = {
    "llama3.1_8b": 8.030,
    "llama3.1_70b": 70.554,
    "llama3.1_405b": 405.853,
    "mixtral_8x7b": 46.703,
    "mixtral_8x22b": 140.621,
    "deepseek_v2_lite": 15.706,
    "deepseek_v3": 671.03,
    "qwen3_30b_a3b": 30.532,
    "qwen3_235b_a22b": 235.094,
    "gpt_oss_20b": 20.915,
    "gpt_oss_120b": 116.829,
}
DENSE = ["llama3.1_8b", "llama3.1_70b", "llama3.1_405b"]
MOE = [name for name in PUBLISHED if name not in DENSE]
TINY = ["tiny_gpt", "tiny_moe"]


def model_file(name):
    return yaml.safe_load((MODELS / f"{name}.yaml").read_text())


def layer_kinds(m):
    """0 (dense) or 1 (experts) for every layer."""
    if not m.get("num_experts"):
        return [0] * m["num_layers"]
    pattern = m.get("moe_layer_freq")
    return eval(pattern) if pattern else [1] * m["num_layers"]


def attention_parameters(m):
    hidden, heads = m["hidden_size"], m["num_attention_heads"]
    if m.get("multi_latent_attention"):
        qk = m["qk_head_dim"] + m["qk_pos_emb_head_dim"]
        rank_q, rank_kv = m["q_lora_rank"], m["kv_lora_rank"]
        query = (
            hidden * rank_q + rank_q + rank_q * heads * qk if rank_q else hidden * heads * qk
        )
        down = hidden * (rank_kv + m["qk_pos_emb_head_dim"]) + rank_kv
        up = rank_kv * heads * (m["qk_head_dim"] + m["v_head_dim"])
        return query + down + up + heads * m["v_head_dim"] * hidden
    dim = m.get("kv_channels") or hidden // heads
    groups = m["num_query_groups"]
    count = hidden * dim * (heads + 2 * groups) + heads * dim * hidden
    count += 2 * dim if m.get("qk_layernorm") else 0
    if m["add_bias_linear"]:
        count += dim * (heads + 2 * groups) + hidden
    if m.get("softmax_type") == "learnable":
        count += heads
    return count


def mlp_parameters(m, width):
    """Gate, up and down projection."""
    bias = 2 * width + m["hidden_size"] if m["add_bias_linear"] else 0
    return 3 * m["hidden_size"] * width + bias


def layer_parameters(m, kind):
    hidden = m["hidden_size"]
    count = attention_parameters(m) + 2 * hidden
    if not kind:
        return count + mlp_parameters(m, m["ffn_hidden_size"])
    router = hidden * m["num_experts"] + (m["num_experts"] if m["add_bias_linear"] else 0)
    shared = m.get("moe_shared_expert_intermediate_size")
    count += router + m["num_experts"] * mlp_parameters(m, m["moe_ffn_hidden_size"])
    return count + (mlp_parameters(m, shared) if shared else 0)


def total_parameters(m):
    ends = 2 * m["vocab_size"] * m["hidden_size"] + m["hidden_size"]
    assert m["untie_embeddings_and_output_weights"]
    return ends + sum(layer_parameters(m, kind) for kind in layer_kinds(m))


def short(name, layers):
    """A job with the first layers only, as listed (0 dense, 1 experts), and its parameters."""
    overrides = [f"model={name}", f"model.num_layers={len(layers)}"]
    if model_file(name).get("moe_layer_freq"):
        overrides.append(f'model.moe_layer_freq="{layers}"'.replace(" ", ""))
    return {"overrides": overrides, "count": True}


def pipeline(name, pp, vpp, *more, world=64):
    overrides = [f"model={name}", f"parallel.pp={pp}", f"parallel.vpp={vpp}", *more]
    return {"overrides": overrides, "world": world}


def all_jobs():
    """Every configuration that the tests below look at, by what it is about."""
    jobs = {}
    for name in [*PUBLISHED, *TINY]:
        for kind in set(layer_kinds(model_file(name))):
            jobs["one", name, kind] = short(name, [kind])
            jobs["two", name, kind] = short(name, [kind, kind])
    for name in DENSE:
        jobs["64", name] = pipeline(name, 4, 1, "parallel.tp=8")
        jobs["tp8", name] = pipeline(name, 1, 1, "parallel.tp=8", world=8)
    for name in MOE:
        jobs["64", name] = pipeline(
            name, 4, 1, "parallel.tp=1", "parallel.ep=8", "parallel.etp=1"
        )
    jobs["405b", 8, 1] = pipeline("llama3.1_405b", 8, 1)
    jobs["405b", 8, 2] = pipeline("llama3.1_405b", 8, 2)
    jobs["405b", 1, 1] = pipeline("llama3.1_405b", 1, 1)
    jobs["405b", 2, 1] = pipeline("llama3.1_405b", 2, 1)
    own = "parallel.layout='Et*30|t*32|t*32|t*32L'"
    jobs["405b own layout"] = pipeline("llama3.1_405b", 4, 1, own)
    jobs["405b own layout, vpp"] = pipeline("llama3.1_405b", 4, 2, own)
    jobs["v3 mtp"] = pipeline("deepseek_v3", 8, 1, "model.mtp_num_layers=1")
    jobs["70b", 8, 5] = pipeline("llama3.1_70b", 8, 5)
    jobs["8b", 3, 1] = pipeline("llama3.1_8b", 3, 1, world=3)
    return jobs


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    jobs = all_jobs()
    return dict(zip(jobs, probe(list(jobs.values()), tmp_path_factory), strict=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_the_published_one(name):
    assert total_parameters(model_file(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_its_source(name):
    first = (MODELS / f"{name}.yaml").read_text().splitlines()[0]
    assert "config.json of" in first and "Hugging Face" in first


@pytest.mark.parametrize("name", [*PUBLISHED, *TINY])
def test_real_modules_hold_the_computed_parameters(name, answers):
    """Layers of a kind are equal, so two short models of each kind give the whole one."""
    m = model_file(name)
    for kind in set(layer_kinds(m)):
        one, two = (sum(answers[n, name, kind]["parameters"].values()) for n in ("one", "two"))
        layer = layer_parameters(m, kind)
        assert two - one == layer
        # vocabularies of published models are multiples of 128: nothing is padded on one rank
        assert one - layer == 2 * m["vocab_size"] * m["hidden_size"] + m["hidden_size"]


SPLIT = {
    "llama3.1_8b": [[8]] * 4,
    "llama3.1_70b": [[20]] * 4,
    "llama3.1_405b": [[31], [32], [32], [31]],
    "mixtral_8x7b": [[8]] * 4,
    "mixtral_8x22b": [[14]] * 4,
    "deepseek_v2_lite": [[6], [8], [7], [6]],
    "deepseek_v3": [[14], [16], [16], [15]],
    "qwen3_30b_a3b": [[12]] * 4,
    "qwen3_235b_a22b": [[23], [24], [24], [23]],
    "gpt_oss_20b": [[6]] * 4,
    "gpt_oss_120b": [[9]] * 4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_legal_on_64_processes(name, answers):
    answer = answers["64", name]
    assert "error" not in answer, answer
    assert answer["split"] == SPLIT[name]
    assert answer["dp"] == (2 if name in DENSE else 16)
    assert answer["bf16"] and answer["seq"] == (8192 if name in DENSE else 4096)


def test_default_splits_for_other_pipelines(answers):
    assert answers["405b", 8, 1]["split"] == [[15], *[[16]] * 6, [15]]
    interleaved = answers["405b", 8, 2]["split"]
    assert [sum(stage) for stage in interleaved] == [15, *[16] * 6, 15]
    assert interleaved[0] == [7, 8] and interleaved[-1] == [8, 7]
    assert answers["405b", 1, 1]["split"] == [[126]]
    assert answers["405b", 2, 1]["split"] == [[63], [63]]
    mtp = answers["v3 mtp"]["split"]
    assert sum(map(sum, mtp)) == 61 and len(mtp) == 8 and mtp[-1][0] < mtp[1][0]
    assert answers["405b own layout"]["split"] == [[30], [32], [32], [32]]
    assert answers["70b", 8, 5]["split"] == [[2] * 5] * 8


def test_splits_that_are_not_legal_are_refused(answers):
    error = answers["8b", 3, 1]["error"]
    assert "parallel.pp=3" in error and "model.num_layers=32" in error
    assert "parallel.vpp=2" in answers["405b own layout, vpp"]["error"]


@pytest.mark.parametrize("name", DENSE)
def test_vocabulary_padding_stays_below_the_promised_share(name, answers):
    m = model_file(name)
    padding = 2 * (answers["tp8", name]["padded_vocab"] - m["vocab_size"]) * m["hidden_size"]
    assert 0 <= padding / total_parameters(m) < 0.00079
