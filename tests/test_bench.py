"""bench.py: the JSON it writes, what its ratios are made of, and what it counts; nothing here is about how fast."""

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

import bench
from bench import MAIN_RATIOS, SETTINGS, Bench, Llama, Matmuls, Report, Size, Training, cpu_stages, run_stages
from config import ConfigError, load_config
from model import flops_per_token

CPU = torch.device("cpu")
CONFIG = """
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from moe import MoEConfig
from norms import ScaleConfig

config = Config(
    model=ModelConfig(n_layer=1, n_head=2, d_model=16, vocab_size=257, block_size=8),
    scale=ScaleConfig(strategy="{strategy}"),
    moe={moe},
    data=DataConfig(source="{text}", tokenizer="bytes"),
    train=TrainConfig(max_steps=100, tokens_per_step=16, loss_chunk=8),
)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """{name: config file} of a tiny plain, unified and mixture-of-experts model, with text to load."""
    folder = tmp_path_factory.mktemp("configs")
    text = folder / "text.txt"
    text.write_text("".join(f"{number} is a number.\n" for number in range(4000)))
    kinds = {"plain": ("plain", "None"), "unified": ("unified", "None")}
    kinds["moe"] = ("plain", "MoEConfig(n_expert=4, top_k=2, n_shared=1, d_ff=8)")
    for name, (strategy, moe) in kinds.items():
        (folder / f"{name}.py").write_text(CONFIG.format(strategy=strategy, moe=moe, text=text.as_posix()))
    return {name: str(folder / f"{name}.py") for name in kinds}


@pytest.fixture
def tiny_bench(monkeypatch, tmp_path, files) -> Bench:
    """A bench without compiling and without minimal times, whose data folders are made in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return Bench(CPU, SETTINGS[:2], rounds=2, at_least=0.0)


def stages(files: dict[str, str]) -> dict:
    """The CPU suite at tiny shapes."""
    sizes = {name: Size(name, files["plain"], 2) for name in ("quickstart", "120m", "250m")}
    return cpu_stages(sizes["quickstart"], sizes["120m"], sizes["250m"], Size("quickstart_moe", files["moe"], 2))


def check_report(values: dict) -> None:
    """Every ratio is that of the medians of the two rows that its pair names."""
    rows = {row["name"]: row for row in values["rows"]}
    assert len(rows) == len(values["rows"])
    assert all(len(row["samples"]) >= 1 and min(row["samples"]) > 0 for row in rows.values())
    assert {name for name, ratio in values["ratios"].items() if ratio is not None} == set(values["pairs"])
    for name, pair in values["pairs"].items():
        top, bottom = (statistics.median(rows[row]["samples"]) for row in pair)
        assert values["ratios"][name] == top / bottom, name


def test_cpu_suite_writes_every_ratio(tiny_bench, files, monkeypatch):
    monkeypatch.setattr(bench.util, "find_spec", lambda name: None)
    values = json.loads(json.dumps(run_stages(tiny_bench, stages(files)).as_dict(CPU)))
    check_report(values)
    assert set(list(values["ratios"])[: len(MAIN_RATIOS)]) == set(MAIN_RATIOS)
    assert values["machine"]["torch"] == torch.__version__
    # without transformers its ratio is null, and a notice says what to install
    nulls = {name for name, ratio in values["ratios"].items() if ratio is None}
    assert nulls == {f"throughput_over_transformers{suffix}" for suffix in ("", "_quickstart", "_120m")}
    assert "pip install transformers" in " ".join(values["notices"])
    main_rows = {row for name in values["pairs"] if name in MAIN_RATIOS for row in values["pairs"][name]}
    assert all(len(row["samples"]) == 2 for row in values["rows"] if row["name"] in main_rows)


def test_a_dtype_that_is_too_slow_is_left_out(tiny_bench, files, monkeypatch):
    monkeypatch.setattr(bench.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "matmul_seconds", lambda config, tokens, dtype, device: 615.0)
    values = run_stages(tiny_bench, stages(files)).as_dict(CPU)
    check_report(values)
    assert values["ratios"]["matmul_rate_over_peak_bf16"] is None and values["ratios"]["matmul_rate_over_peak"] > 0
    assert "120m: no bfloat16, the matmuls of a step would take about 615 s in it" in values["notices"]
    assert not any("bfloat16" in row["name"] for row in values["rows"] if "120m" in row["name"])


def test_llama_has_our_shape_and_takes_our_steps(tiny_bench, files):
    pytest.importorskip("transformers")
    config = load_config(files["plain"])
    theirs, ours = Llama(config, 2, CPU), Training(config, 2, CPU, compiles=False)
    for model in (theirs.model, ours.model):
        assert sum(parameter.numel() for parameter in model.parameters()) == 13_328
    before = theirs.model.lm_head.weight.detach().clone()
    theirs.step(SETTINGS[1])()
    assert theirs.tokens == ours.tokens == 16 and not torch.equal(before, theirs.model.lm_head.weight)


def test_a_step_is_a_training_step(files):
    training = Training(load_config(files["unified"]), 2, CPU, compiles=False)
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    for setting in SETTINGS[:2]:
        training.step(setting)()
    assert training.progress.step == 2 and training.dtype == torch.bfloat16
    assert not any(torch.equal(before[name], parameter) for name, parameter in training.model.named_parameters())
    state = sum(value.numel() for value in training.resident())
    assert state >= 3 * sum(parameter.numel() for parameter in training.model.parameters())  # weights and two moments


@pytest.mark.parametrize("name", ["plain", "moe"])
def test_matmuls_are_the_flops_of_the_linear_maps(files, name):
    config = load_config(files[name])
    training = Training(config, 2, CPU, compiles=False)
    shape, tokens = config.model, training.tokens
    attention = 12 * shape.n_layer * shape.d_model * shape.block_size
    matmuls = Matmuls(config, tokens, "float32", CPU)
    assert matmuls.flops == tokens * (flops_per_token(training.model) - attention)
    matmuls()


def test_peak_bytes_counts_what_is_alive_together():
    held = torch.zeros(1000)

    def run():
        first = torch.zeros(250_000)
        second = torch.zeros(500_000)
        del first, second
        torch.zeros(100_000)

    counts = [bench.peak_bytes(run, CPU, [held]) for _ in range(3)]
    assert counts == [4 * 751_000] * 3


def test_the_loss_in_chunks_takes_less_memory(tiny_bench, files):
    size = Size("loss", files["plain"], 128)  # long enough that the logits outweigh the gradients
    bench.compare_losses(tiny_bench, size)
    assert tiny_bench.report.ratio("chunked_loss_memory_over_naive") < 0.5


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    bench.main()


def test_profile_names_the_costliest_operations(files, monkeypatch, capsys, tmp_path):
    target = tmp_path / "bench.json"
    run_main(monkeypatch, files["unified"], "--profile", "--rounds=1", "--contexts=2", f"--json={target}")
    values = json.loads(target.read_text())
    check_report(values)
    shares = [row["share"] for row in values["profile"]]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-9
    printed = capsys.readouterr().out
    assert all(row["name"][:60] in printed for row in values["profile"])
    assert set(values["ratios"]) == {"matmul_rate_over_peak"}


def test_two_configs_take_turns(files, monkeypatch, capsys, tmp_path):
    target = tmp_path / "bench.json"
    options = ("--rounds=2", "--contexts=2", "--train.dtype=bfloat16", f"--json={target}")
    run_main(monkeypatch, files["unified"], "--against", files["plain"], *options)
    values = json.loads(target.read_text())
    check_report(values)
    assert set(values["ratios"]) == {"time_over_against", "memory_over_against"}
    assert all(len(row["samples"]) == 2 for row in values["rows"]) and "bfloat16" in values["rows"][0]["name"]
    assert values["ratios"]["memory_over_against"] > 1 and "time_over_against" in capsys.readouterr().out


def test_a_wrong_key_is_told(files, monkeypatch):
    with pytest.raises(ConfigError, match="train.compile"):
        run_main(monkeypatch, files["plain"], "--train.compiled=true")
    with pytest.raises(ConfigError, match="the config has 1 fault"):
        bench.sizes_to_measure([files["plain"], str(Path(__file__).parent.parent / "configs/quickstart.py")], [], None)


GPUS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12}
GPUS["NVIDIA L40"] = None  # in the table there is an L4 and an L40S


@pytest.mark.parametrize("name, rate", GPUS.items())
def test_peak_rates_go_by_whole_words(monkeypatch, name, rate):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda", 0)
    row = {"dtype": "bfloat16", "model_flops": 1e12, "samples": [0.01]}
    assert bench.peak_rate(gpu) == rate
    assert bench.utilization(row, gpu) == (None if rate is None else pytest.approx(1e14 / rate))
    assert bench.utilization(row | {"dtype": "float32"}, gpu) is None


def test_a_report_without_samples_prints():
    report = Report(rows={"empty": {"unit": "seconds", "samples": []}}, pairs={"none": None})
    assert report.as_dict(CPU)["rows"] == [] and "null" in bench.format_report(report, CPU)
