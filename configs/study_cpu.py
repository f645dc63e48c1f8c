"""Which scale-vector variant wins on two CPU cores: all nine strategies, and three controls with QK-norm.

The regime is that of the paper's runs in the numbers that carry over: 100 tokens a parameter, an integrated decay of 1.3
to 2.5 (with the rate), a short warm-up. DNP normalizes queries and keys, which helps by itself: so its arms are compared
with plain_qknorm too, and the other qknorm arms say what HG and OR add to it. Rates were tuned for none, plain,
plain_qknorm and unified (`--tune`, results/study_cpu/tuning.md); every other arm takes the rate of the one that it is
nearest to.
"""

from ablate import Study
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from optim import OptimConfig

ROLES = ("matrix", "embedding", "head", "input_scale", "output_scale")
STEPS = 1280
DECAY = 0.15  # at rate 2.4e-2, Σ η λ = 2.5: the cosine's mean is 0.55 of its peak
RATES = [1.2e-2, 1.7e-2, 2.4e-2, 3.4e-2, 4.8e-2]  # tried by --tune
RATE_NONE, RATE_PLAIN, RATE_QK_NORM, RATE_DNP = 2.4e-2, 1.7e-2, 1.7e-2, 1.2e-2


def arm(strategy: str, rate: float) -> dict:
    """The overrides of an arm at its peak rate."""
    return {"scale.strategy": strategy, "optim.learning_rate": rate}


def qk_norm(strategy: str) -> dict:
    """A control: the strategy on a model with QK-norm."""
    return arm(strategy, RATE_QK_NORM) | {"model.qk_norm": True}


study = Study(
    base=Config(
        model=ModelConfig(n_layer=2, n_head=2, d_model=24, vocab_size=257, vocab_multiple=1, block_size=64),
        optim=OptimConfig(learning_rate=RATE_PLAIN, **{f"decay_{role}": DECAY for role in ROLES}),
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
    arms={
        "none": arm("none", RATE_NONE),
        "plain": arm("plain", RATE_PLAIN),
        "hg": arm("hg", RATE_PLAIN),
        "dp": arm("dp", RATE_PLAIN),
        "dnp": arm("dnp", RATE_DNP),
        "or": arm("or", RATE_PLAIN),
        "er": arm("er", RATE_PLAIN),
        "hg_dnp": arm("hg_dnp", RATE_DNP),
        "unified": arm("unified", RATE_DNP),
        "plain_qknorm": qk_norm("plain"),
        "hg_qknorm": qk_norm("hg"),
        "or_qknorm": qk_norm("or"),
    },
    seeds=tuple(range(8)),
    baseline="plain",
    comparisons=dict.fromkeys(("dnp", "hg_dnp", "unified", "hg_qknorm", "or_qknorm"), "plain_qknorm"),
    learning_rates=dict.fromkeys(("none", "plain", "plain_qknorm"), RATES) | {"unified": [6e-3, 8.5e-3, *RATES]},
    tuning_seeds=(1000, 1001),
    tuning={"data.eval_start": 204_800, "train.eval_interval": STEPS},
    smallest_difference=0.003,
)
