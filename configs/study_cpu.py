"""Which scale-vector variant wins on two CPU cores: all nine strategies, and three controls with QK-norm.

The regime is that of the paper's runs in the numbers that carry over: 100 tokens a parameter, and an integrated decay of 1.8
to 2.6 (with the rate). The warm-up, 8 % of the steps, is a longer share than there: 1 % would be 39 steps, and at width 24
steps so few cost every arm something. Width and warm-up were chosen by what seeds do to differences (study_spread.py). DNP
normalizes queries and keys, which helps by itself: so its arms are compared with plain_qknorm too, and the other qknorm
arms say what HG and OR add to it. Plain is also trained shorter and longer: how many tokens would it take for the loss of an
arm? Rates were tuned for none, plain, plain_qknorm and unified (`--tune`, results/study_cpu/tuning.md); every other arm takes
the rate of the one that it is nearest to.
"""

from ablate import Study
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from optim import OptimConfig

ROLES = ("matrix", "embedding", "head", "input_scale", "output_scale")
STEPS = 3900
LENGTHS = {"plain_0.75": 0.75, "plain_1.75": 1.75}  # plain's steps, over STEPS
DECAY = 0.1  # at rate 1.2e-2, Σ η λ = 2.6: the schedule's mean is 0.55 of its peak
TRIED = [6e-3, 8.5e-3, 1.2e-2, 1.7e-2, 2.4e-2]  # rates, by --tune
RATE_NONE, RATE_PLAIN, RATE_QK_NORM, RATE_DNP = 1.2e-2, 8.5e-3, 1.2e-2, 1.2e-2
RATES = {
    "none": RATE_NONE,
    "plain": RATE_PLAIN,
    "hg": RATE_PLAIN,
    "dp": RATE_PLAIN,
    "dnp": RATE_DNP,
    "or": RATE_PLAIN,
    "er": RATE_PLAIN,
    "hg_dnp": RATE_DNP,
    "unified": RATE_DNP,
    "plain_qknorm": RATE_QK_NORM,
    "hg_qknorm": RATE_QK_NORM,
    "or_qknorm": RATE_QK_NORM,
}


def arm(name: str, rate: float) -> dict:
    """The overrides of a strategy, with QK-norm where its name ends so, at its peak rate."""
    strategy, qk_norm = name.removesuffix("_qknorm"), name.endswith("_qknorm")
    return {"scale.strategy": strategy, "model.qk_norm": qk_norm, "optim.learning_rate": rate}


study = Study(
    base=Config(
        model=ModelConfig(n_layer=2, n_head=3, d_model=48, vocab_size=257, vocab_multiple=1, block_size=64),
        optim=OptimConfig(learning_rate=RATE_PLAIN, warmup=0.08, **{f"decay_{role}": DECAY for role in ROLES}),
        data=DataConfig(source="stdlib", tokenizer="bytes", eval_start=0, eval_tokens=204_800),
        train=TrainConfig(
            max_steps=STEPS,
            tokens_per_step=2048,
            micro_batch=32,
            eval_interval=STEPS // 5,
            checkpoint_interval=STEPS,
            device="cpu",
            compile=True,
        ),
    ),
    arms={name: arm(name, rate) for name, rate in RATES.items()}
    | {name: arm("plain", RATE_PLAIN) | {"train.max_steps": int(STEPS * share)} for name, share in LENGTHS.items()},
    seeds=tuple(range(8)),
    baseline="plain",
    comparisons=dict.fromkeys(("dnp", "hg_dnp", "unified", "hg_qknorm", "or_qknorm"), "plain_qknorm"),
    lengths=tuple(LENGTHS),
    learning_rates={"none": TRIED[1:], "plain": TRIED, "plain_qknorm": TRIED[1:], "unified": TRIED[:4]},
    tuning_seeds=(1000, 1001),
    tuning={"data.eval_start": 204_800, "train.eval_interval": STEPS},
    smallest_difference=0.003,
)
