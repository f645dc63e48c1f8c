"""Which scale vectors should decay: none, input ones (iwd), output ones (reverse), or all?

The model is that of configs/study_cpu.py with the most Output-Norms it can have, Gemma's sandwich with QK-norm. Scale vectors
that decay do so as strongly as matrices (Σ η λ = 2.6 at rate 1.2e-2, where the paper's smallest model has about 2.5). Each
policy has its own rate (`--tune`, results/study_decay/tuning.md). Four times that strength: configs/study_decay_d24.py.
"""

from dataclasses import replace

from ablate import Study
from configs.study_cpu import study as cpu

TRIED = [8.5e-3, 1.2e-2, 1.7e-2]  # rates, by --tune
RATES = {"none": 1.7e-2, "iwd": 1.2e-2, "all": 1.2e-2, "reverse": 1.2e-2}
OUTPUT_NORMS = {"qk_norm": True, "post_norm": True}


def arm(policy: str, rate: float, decay: float) -> dict:
    """The overrides of a policy: its peak rate, and the decay of the scale vectors that it lets decay."""
    decays = {f"optim.decay_{role}": decay for role in ("input_scale", "output_scale")}
    return {"optim.scale_decay": policy, "optim.learning_rate": rate} | decays


study = Study(
    base=replace(cpu.base, model=replace(cpu.base.model, **OUTPUT_NORMS)),
    arms={policy: arm(policy, rate, cpu.base.optim.decay_matrix) for policy, rate in RATES.items()},
    baseline="none",
    comparisons={"all": "iwd", "reverse": "iwd"},
    learning_rates=dict.fromkeys(RATES, TRIED) | {"none": [*TRIED, 2.4e-2, 3.4e-2]},
    tuning=cpu.tuning,
)
