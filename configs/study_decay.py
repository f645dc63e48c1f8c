"""Which scale vectors should decay: input ones (iwd), all, none, or output ones (reverse)?

The model is that of configs/study_cpu.py with the most Output-Norms it can have, Gemma's sandwich with QK-norm. The
decay of scale vectors is four times that of the matrices, Σ η λ = 10, so that what it does can show.
"""

from dataclasses import replace

from ablate import Study
from configs.study_cpu import DECAY
from configs.study_cpu import study as cpu

RATE = 1.6e-2

base = replace(
    cpu.base,
    model=replace(cpu.base.model, qk_norm=True, post_norm=True),
    optim=replace(
        cpu.base.optim,
        learning_rate=RATE,
        decay_input_scale=4 * DECAY,
        decay_output_scale=4 * DECAY,
    ),
)

study = Study(
    base=base,
    arms={policy: {"optim.scale_decay": policy} for policy in ("iwd", "all", "none", "reverse")},
    seeds=tuple(range(8)),
    baseline="iwd",
    learning_rates={"iwd": [8e-3, 1.2e-2, 1.6e-2, 2.4e-2, 3.2e-2]},
    tuning_seeds=(1000, 1001),
    tuning={"data.eval_start": 204_800},
    smallest_difference=0.003,
)
