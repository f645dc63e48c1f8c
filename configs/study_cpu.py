"""Which scale-vector variant wins on two CPU cores: all nine strategies, and three controls with QK-norm.

The regime is that of the paper's runs in the numbers that carry over: 100 tokens a parameter, an integrated decay of
about 2.5, a short warm-up. DNP normalizes queries and keys, which helps by itself: so its arms are compared with
plain_qknorm too, and the other qknorm arms say what HG and OR add to it. Rates were tuned for none, plain,
plain_qknorm and unified (`--tune`); every other arm takes the rate of the one that it is nearest to.
"""

from ablate import Study
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from optim import OptimConfig

ROLES = ("matrix", "embedding", "head", "input_scale", "output_scale")
STEPS = 2048
DECAY = 0.14  # at rate 1.6e-2, Σ η λ = 2.5: the cosine's mean is 0.55 of its peak
RATE_NONE, RATE_PLAIN, RATE_QK_NORM, RATE_DNP = 1.6e-2, 1.6e-2, 1.6e-2, 1.6e-2


def arm(strategy: str, rate: float) -> dict:
    """The overrides of an arm at its peak rate."""
    return {"scale.strategy": strategy, "optim.learning_rate": rate}


def length(numerator: int, denominator: int) -> dict:
    """The baseline trained for a fraction of the steps, its evaluations with it."""
    steps = STEPS * numerator // denominator
    return arm("plain", RATE_PLAIN) | {"train.max_steps": steps, "train.eval_interval": steps // 8}


def qk_norm(strategy: str) -> dict:
    """A control: the strategy on a model with QK-norm."""
    return arm(strategy, RATE_QK_NORM) | {"model.qk_norm": True}


study = Study(
    base=Config(
        model=ModelConfig(n_layer=2, n_head=2, d_model=32, vocab_size=257, vocab_multiple=1, block_size=64),
        optim=OptimConfig(learning_rate=RATE_PLAIN, **{f"decay_{role}": DECAY for role in ROLES}),
        data=DataConfig(source="stdlib", tokenizer="bytes", eval_start=0, eval_tokens=204_800),
        train=TrainConfig(
            max_steps=STEPS,
            tokens_per_step=2048,
            micro_batch=32,
            eval_interval=STEPS // 8,
            checkpoint_interval=STEPS,
            device="cpu",
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
        "plain_short": length(3, 4),
        "plain_long": length(3, 2),
    },
    seeds=tuple(range(8)),
    baseline="plain",
    comparisons=dict.fromkeys(("dnp", "hg_dnp", "unified", "hg_qknorm", "or_qknorm"), "plain_qknorm"),
    lengths=("plain_short", "plain_long"),
    learning_rates={
        "none": [1.2e-2, 1.6e-2, 2.4e-2, 3.2e-2, 4.8e-2],
        "plain": [1.2e-2, 1.6e-2, 2.4e-2, 3.2e-2, 4.8e-2],
        "plain_qknorm": [8e-3, 1.2e-2, 1.6e-2, 2.4e-2, 3.2e-2],
        "unified": [8e-3, 1.2e-2, 1.6e-2, 2.4e-2, 3.2e-2],
    },
    tuning_seeds=(1000, 1001),
    tuning={"data.eval_start": 204_800},
    smallest_difference=0.003,
)
