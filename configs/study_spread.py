"""How much do seeds move the difference of two arms? What study_cpu.py was to know before its seeds were spent.

On four tuning seeds and the tuning part of the validation text, plain and unified at one rate, with the warm-up of 1 % that
study_cpu.py has, with 8 % (w8), and with 8 % and a cosine down to 0 (w8r0).
"""

from ablate import Study
from configs.study_cpu import study as cpu

RATE = 1.4e-2
SCHEDULES = {"r10": {}, "w8": {"optim.warmup": 0.08}, "w8r0": {"optim.warmup": 0.08, "optim.final_rate": 0.0}}


def arm(strategy: str, schedule: str) -> dict:
    """A strategy under one of SCHEDULES, evaluated as when rates are tuned."""
    return {"scale.strategy": strategy, "optim.learning_rate": RATE} | cpu.tuning | SCHEDULES[schedule]


study = Study(
    base=cpu.base,
    arms={f"{strategy}_{schedule}": arm(strategy, schedule) for schedule in SCHEDULES for strategy in ("plain", "unified")},
    seeds=(1000, 1001, 1002, 1003),
    baseline="plain_r10",
    comparisons={f"unified_{schedule}": f"plain_{schedule}" for schedule in SCHEDULES if schedule != "r10"},
    smallest_difference=0.003,
)
