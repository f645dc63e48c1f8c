"""500M parameters, the unified strategy: HG + DNP + OR, decayed by IWD."""

from configs.sizes import build

config = build("500m", "unified")
