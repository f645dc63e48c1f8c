"""The study of configs/study_cpu.py at width 24, with a warm-up of 1 % and a decay of 0.15: a first try.

It takes a fifth of the time and says little: a seed moves most differences by more than they are. Kept with all its runs.
"""

from dataclasses import replace

from ablate import Study
from configs.study_cpu import ROLES, arm
from configs.study_cpu import study as cpu

STEPS = 1280
RATES = {"none": 2.4e-2} | dict.fromkeys(("plain", "hg", "dp"), 1.7e-2) | {"dnp": 1.2e-2, "or": 1.7e-2, "er": 1.7e-2}
RATES |= {"hg_dnp": 1.2e-2, "unified": 1.2e-2} | dict.fromkeys(("plain_qknorm", "hg_qknorm", "or_qknorm"), 1.7e-2)
TRIED = [1.2e-2, 1.7e-2, 2.4e-2, 3.4e-2, 4.8e-2]

study = Study(
    base=replace(
        cpu.base,
        model=replace(cpu.base.model, d_model=24, n_head=2),
        optim=replace(cpu.base.optim, warmup=0.01, **{f"decay_{role}": 0.15 for role in ROLES}),
        train=replace(cpu.base.train, max_steps=STEPS, eval_interval=STEPS // 5, checkpoint_interval=STEPS),
    ),
    arms={name: arm(name, rate) for name, rate in RATES.items()},
    comparisons=cpu.comparisons,
    learning_rates=dict.fromkeys(("none", "plain", "plain_qknorm"), TRIED) | {"unified": [6e-3, 8.5e-3, *TRIED]},
    tuning=cpu.tuning | {"train.eval_interval": STEPS},
)
