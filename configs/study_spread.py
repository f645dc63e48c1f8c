"""How much do seeds move the difference of two arms? What study_cpu.py was to know before its seeds were spent.

On four tuning seeds and the tuning part of the validation text: plain and unified at one rate, at width 24 under three
schedules (a warm-up of 1 % of the steps; of 8 %, w8; of 8 % with a cosine down to 0, w8r0), and under w8 at widths 32 and
48. A width has its own length, 100 tokens a parameter, and a rate that falls with the root of the width. What decides is
not the spread alone: half the interval takes four times the seeds, so the measure is spread² times seconds a run.
"""

from ablate import Study
from configs.study_d24 import study as d24

W8 = {"optim.warmup": 0.08}
REGIMES = {
    "r10": {},
    "w8": W8,
    "w8r0": W8 | {"optim.final_rate": 0.0},
    "w8_d32": W8 | {"model.d_model": 32, "train.max_steps": 2000, "optim.learning_rate": 1.2e-2},
    "w8_d48": W8 | {"model.d_model": 48, "model.n_head": 3, "train.max_steps": 3900, "optim.learning_rate": 1e-2},
}


def arm(strategy: str, regime: str) -> dict:
    """A strategy in one of REGIMES, evaluated as when rates are tuned."""
    return {"scale.strategy": strategy, "optim.learning_rate": 1.4e-2} | d24.tuning | REGIMES[regime]


study = Study(
    base=d24.base,
    arms={f"{strategy}_{regime}": arm(strategy, regime) for regime in REGIMES for strategy in ("plain", "unified")},
    seeds=(1000, 1001, 1002, 1003),
    baseline="plain_r10",
    comparisons={f"unified_{regime}": f"plain_{regime}" for regime in REGIMES if regime != "r10"},
)
