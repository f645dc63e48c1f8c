"""A file plus overrides becomes one checked config; every fault is told at once, and nothing is made or lost."""

import json
import subprocess
import sys
import typing
from dataclasses import replace

import pytest
from conftest import ROOT

from config import Config, ConfigError, apply_overrides, find_faults, from_dict, load_config, nearest_key, parse_value, valid_keys
from model import ModelConfig
from moe import MoEConfig
from norms import STRATEGIES, ScaleConfig

QUICKSTART = "configs/quickstart.py"


def faults(*overrides, path=QUICKSTART):
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return {fault.key: fault for fault in caught.value.faults}


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "configs").glob("*.py") if not p.name.startswith(("sizes", "study"))))
def test_every_config_loads_and_survives_json(path):
    config = load_config(f"configs/{path}")
    assert config.name == path.removesuffix(".py") and config.train.out_dir == f"out/{config.name}"
    assert from_dict(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize("size, steps", [("120m", 45679), ("2b", 96109)])
def test_steps_follow_from_tokens_a_parameter(size, steps):
    config = load_config(f"configs/baseline_{size}.py")
    assert config.train.max_steps == steps
    assert load_config(f"configs/baseline_{size}.py", ["--train.max_steps=7"]).train.max_steps == 7


def test_a_strategy_fills_what_is_not_given():
    config = load_config(QUICKSTART, ["--scale.strategy=hg"])
    assert config.scale == replace(ScaleConfig(strategy="hg").resolved())
    assert (config.scale.kind, config.scale.heterogeneous, config.scale.attention_placement) == ("plain", True, "input")
    config = load_config(QUICKSTART, ["--scale.kind=er", "--scale.attention_placement=dual"])
    assert (config.scale.kind, config.scale.attention_placement, config.scale.feedforward_placement) == ("er", "dual", "dual_norm")
    assert load_config(QUICKSTART, ["--scale.kind=none"]).scale.kind == "none"  # the kind, not the absence of one
    assert set(STRATEGIES) == {"none", "plain", "hg", "dp", "dnp", "or", "er", "hg_dnp", "unified"}


def test_derived_shape_follows_overrides():
    model = load_config("configs/baseline_120m.py", ["--model.d_model=384"]).model
    assert (model.head_dim, model.d_ff, model.n_kv_head) == (32, 1024, 12)


def test_all_faults_at_once():
    found = faults("--model.n_heads=3", "--optim.learning_rate=fast", "--train.max_steps=0", "--scale.kind=orr", "nonsense")
    assert set(found) == {"model.n_heads", "optim.learning_rate", "train.max_steps", "scale.kind", "nonsense"}
    assert "nearest valid key: model.n_head" in str(found["model.n_heads"])
    assert "expected a number" in str(found["optim.learning_rate"]) and "'fast'" in str(found["optim.learning_rate"])
    assert "one of none, plain, centred, or, er" in str(found["scale.kind"])


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["--model.n_head=5"], "model.d_model"),
        (["--model.n_kv_head=3"], "model.n_head"),
        (["--model.head_dim=7"], "model.head_dim"),
        (["--model.d_ff=0"], "model.d_ff"),
        (["--model.vocab_size=200"], "model.vocab_size"),
        (["--model.n_head=0"], "model.n_head"),
        (["--model.block_size=-1"], "model.block_size"),
        (["--train.tokens_per_step=1000"], "train.tokens_per_step"),
        (["--train.micro_batch=0"], "train.micro_batch"),
        (["--optim.warmup=1.5"], "optim.warmup"),
        (["--optim.schedule=wsd", "--optim.warmup=0.9"], "optim.decay_share"),
        (["--optim.decay_matrix=-1"], "optim.decay_matrix"),
        (["--optim.learning_rate=nan"], "optim.learning_rate"),
        (["--train.max_steps=1.5"], "train.max_steps"),
        (["--train.compile=maybe"], "train.compile"),
        (["--data.tokenizer=words"], "data.tokenizer"),
        (["--data.eval_tokens=-1"], "data.eval_tokens"),
        (["--learning_rate=1"], "learning_rate"),
    ],
)
def test_each_fault_names_its_key(overrides, key):
    assert key in faults(*overrides)


@pytest.mark.parametrize(
    "key, near",
    [
        ("learning_rate", "optim.learning_rate"),
        ("model.n_heads", "model.n_head"),
        ("optim.max_steps", "train.max_steps"),
        ("stratgy", "scale.strategy"),
    ],
)
def test_nearest_key(key, near):
    assert nearest_key(key) == near


def test_values_by_type():
    keys = valid_keys()
    assert parse_value("1e6", keys["train.max_steps"]) == 1_000_000
    assert parse_value("1_000", keys["train.max_steps"]) == 1000
    assert parse_value("none", keys["train.max_steps"]) is None
    assert parse_value("True", keys["train.compile"]) is True and parse_value("0", keys["model.tied"]) is False
    assert parse_value("3", keys["optim.clip"]) == 3.0
    for text, key in (("x", "model.tied"), ("inf", "optim.clip"), ("2.5", "model.n_layer"), ("none", "model.n_layer")):
        with pytest.raises((ValueError, KeyError)):
            parse_value(text, keys[key])


def test_a_config_files_own_values_are_checked_too():
    found = find_faults(Config(model=ModelConfig(n_layer="six", tied=1), scale=ScaleConfig(strategy="best")))
    assert {fault.key for fault in found} == {"model.n_layer", "model.tied", "scale.strategy"}
    with pytest.raises(ConfigError, match="model.n_layer"):
        from_dict({"model": {"n_layer": True}})
    with pytest.raises(ConfigError, match="n_layers"):
        from_dict({"model": {"n_layers": 3}})


def test_moe_keys_make_a_dense_config_sparse():
    config, found = apply_overrides(Config(), ["--moe.top_k=3"])
    assert not found and config.moe == replace(MoEConfig(), top_k=3)


def test_every_key_says_its_effect():
    for key, annotation in valid_keys().items():
        assert typing.get_origin(annotation) is typing.Annotated, key
        assert 5 < len(typing.get_args(annotation)[1]) < 130, key


def test_broken_config_files(tmp_path):
    (tmp_path / "broken.py").write_text("config = 1 / 0")
    assert "ZeroDivisionError" in str(faults(path=tmp_path / "broken.py")["CONFIG"])
    (tmp_path / "empty.py").write_text("")
    assert "sets config" in str(faults(path=tmp_path / "empty.py")["CONFIG"])
    assert "configs/quickstart.py" in str(faults(path="configs/quikstart.py")["CONFIG"])


def run(*arguments, cwd=ROOT):
    return subprocess.run([sys.executable, str(ROOT / "train.py"), *arguments], cwd=cwd, capture_output=True, text=True)


def test_the_command_exits_2_without_traceback_or_run_directory(tmp_path):
    result = run(str(ROOT / QUICKSTART), "--model.n_heads=3", "--optim.learning_rate=fast", cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "2 faults" in result.stderr and "model.n_head" in result.stderr
    assert not list(tmp_path.iterdir())
    assert run().returncode == 2


def test_help_lists_every_key():
    result = run("--help")
    assert result.returncode == 0
    assert all(f"--{key}=" in result.stdout for key in valid_keys())
    assert f"--optim.learning_rate={load_config(QUICKSTART).optim.learning_rate}" in run(QUICKSTART, "--help").stdout
