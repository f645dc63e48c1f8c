"""Which scale vectors should decay: input ones (iwd), all, none, or output ones (reverse)?

The model is that of configs/study_cpu.py with the most Output-Norms it can have, Gemma's sandwich with QK-norm. Scale
vectors decay as strongly as the matrices do (Σ η λ = 2.8 at rate 1.7e-2), and in the arms named x4 four times as strongly,
so that what decay does can show. One rate for all arms, tuned for iwd and none (`--tune`, results/study_decay/tuning.md).
"""

from dataclasses import replace

from ablate import Study
from configs.study_cpu import DECAY
from configs.study_cpu import study as cpu

RATE = 1.7e-2
STRONG = {"optim.decay_input_scale": 4 * DECAY, "optim.decay_output_scale": 4 * DECAY}

study = Study(
    base=replace(
        cpu.base,
        model=replace(cpu.base.model, qk_norm=True, post_norm=True),
        optim=replace(cpu.base.optim, learning_rate=RATE),
    ),
    arms={policy: {"optim.scale_decay": policy} for policy in ("iwd", "all", "none", "reverse")}
    | {f"{policy}_x4": {"optim.scale_decay": policy} | STRONG for policy in ("iwd", "all", "reverse")},
    seeds=tuple(range(8)),
    baseline="iwd",
    comparisons=dict.fromkeys(("all", "reverse", "iwd_x4", "all_x4", "reverse_x4"), "none"),
    learning_rates=dict.fromkeys(("iwd", "none"), [1.2e-2, 1.7e-2, 2.4e-2, 3.4e-2]),
    tuning_seeds=(1000, 1001),
    tuning=cpu.tuning,
    smallest_difference=0.003,
)
