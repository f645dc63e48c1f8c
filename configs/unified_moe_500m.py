"""500M parameters in 28 experts, of which a token passes 3 and a shared one; the unified strategy."""

from configs.sizes import build

config = build("moe_500m", "unified")
