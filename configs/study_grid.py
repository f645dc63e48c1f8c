"""A quick look at the paper's grid: dense and mixture of experts, AdamW and Muon, cosine and WSD, plain and unified.

One seed and 300 steps each: it shows that every cell trains, not which strategy wins (that takes study_cpu's pairs).
"""

from itertools import product

from ablate import Study
from configs.quickstart import config as dense
from configs.quickstart_moe import config as experts

MOE = {f"moe.{name}": value for name, value in vars(experts.moe).items()}

study = Study(
    base=dense,
    arms={
        f"{kind} {optimizer} {schedule} {strategy}": {
            "scale.strategy": strategy,
            "optim.optimizer": optimizer,
            "optim.learning_rate": 2e-3 if optimizer == "adamw" else 8e-3,  # each its best of two, as for the quickstart
            "optim.schedule": schedule,
            "train.max_steps": 300,
            "train.eval_interval": 300,
            "train.sample_tokens": 0,
            "train.compile": False,
            **(MOE if kind == "moe" else {}),
        }
        for kind, optimizer, schedule, strategy in product(
            ("dense", "moe"), ("adamw", "muon"), ("cosine", "wsd"), ("plain", "unified")
        )
    },
    seeds=(0,),
    baseline="dense adamw cosine plain",
)
