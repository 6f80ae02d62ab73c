"""Dropless, fast Mixture-of-Experts training for MaxText on NVIDIA GPUs, through Transformer Engine.

Importing this package loads neither jax nor MaxText nor Transformer Engine; `activate` does.
"""

from maxtext_moe_te.errors import MoeTeError

__version__ = "0.1.0"
__all__ = ["MoeTeError", "__version__", "activate"]


def activate(overlay=None, options=None):
  """Replaces MaxText's MoE computation in this process; returns an `Activation` that undoes it.

  Args:
    overlay: a loaded `settings.overlay.Overlay`, or None for none.
    options: a `settings.config.MoeTeOptions`, or None for the overlay's (or the defaults).

  Returns:
    host.patching.Activation: call `undo()` on it, or use it as a context manager.

  Raises:
    VersionError: MaxText is missing or of an unsupported version.
    SeamError: a place in MaxText is not what the plugin was written against. Nothing was changed.
  """
  from maxtext_moe_te import session

  return session.activate(overlay=overlay, options=options)
