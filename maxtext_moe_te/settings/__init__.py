"""What the user asked for: our options, overlays and XLA flags. Imports neither jax nor MaxText nor Transformer Engine."""
