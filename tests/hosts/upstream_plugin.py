"""A pytest plugin that runs MaxText's own tests with this one active, for those that pass without it should pass with it.

    cd CHECKOUT_OF_MAXTEXT
    PYTHONPATH=HERE:HERE/tests/hosts python -m pytest -p upstream_plugin tests/unit/train_nnx_test.py

Loaded by its file's name, for MaxText calls its folder `tests` too. The last lines say how often the layer was called.
"""

import maxtext_moe_te

LAYER = "maxtext.layers.moe:RoutedMoE.__call__"
active = []


def pytest_sessionstart(session):
  """After the conftest files, which set JAX up, and before test files are imported."""
  active.append(maxtext_moe_te.activate())


def pytest_terminal_summary(terminalreporter):
  terminalreporter.write_line(f"maxtext-moe-te's layer was called {active[0].calls[LAYER]} times")
