"""How an overlay and our options enter MaxText's configurations.

`inputs` reads what one call of MaxText's `initialize` asks for, `join` decides from it, without asking MaxText to resolve anything,
what is added: the `Plan`. `seam` has MaxText resolve the call with it, `explain` shows it and where each value comes from.
"""

from maxtext_moe_te.host.configuration.seam import config_seams

__all__ = ["config_seams"]
