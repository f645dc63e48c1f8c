"""2B parameters in 44 experts, of which a token passes 5 and a shared one; plain scale vectors."""

from configs.sizes import build

config = build("moe_2b", "plain")
