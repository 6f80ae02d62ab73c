"""The only place that imports MaxText: what is replaced in it, why, how values convert, and how it is undone."""
