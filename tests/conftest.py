"""What every test session needs before jax is imported, and the one place that decides what is skipped.

A skip has a reason and is central; `--require-host`, `--require-gpu`, `--require-te` and `--require-dist` (or
MOE_TE_REQUIRE="host gpu te dist") turn the skips of that kind into failures, for the machines whose job it is to run them.
"""

import functools
import importlib.metadata
import importlib.util
import os
import sys

import pytest

KINDS = ("host", "host_0_2_4", "gpu", "gpus", "te", "dist", "plot", "tunix")


def pytest_addoption(parser):
  for kind in KINDS:
    parser.addoption(f"--require-{kind}", action="store_true", help=f"fail the tests marked `{kind}` that cannot run")
  parser.addoption("--every-sequence", action="store_true", help="host/test_adversarial.py trains every routing on every mesh")
  parser.addoption("--launch-ranks", type=int, help="how many processes host/test_launch.py starts, and kills one")
  parser.addoption("--record-parity", action="store_true", help="write the errors that test_every_model.py measures")
  parser.addoption("--fuzz-cases", type=int, help="how many cases test_fuzz.py compares, and record the result")
  parser.addoption("--fuzz-seed", type=int, default=0, help="which cases")
  parser.addoption("--record-errors", metavar="FILE", help="write what share of its bound each error takes, a JSON line each")


def pytest_configure(config):
  if "jax" in sys.modules:
    raise pytest.UsageError("jax was imported before the tests could choose its platform")
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}".strip()
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  if config.getoption("--record-errors"):
    os.environ["MOE_TE_RECORD_ERRORS"] = os.path.abspath(config.getoption("--record-errors"))
  if not required(config, "gpu"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  else:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tests start processes on the same GPU


def pytest_runtest_setup(item):
  for kind in KINDS:
    if item.get_closest_marker(kind):
      reason = missing(kind)
      if reason and required(item.config, kind):
        pytest.fail(f"{kind} tests are required and cannot run: {reason}", pytrace=False)
      if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def no_programs_of_other_runs():
  """MaxText turns JAX's cache of programs on, in the user's home: one that another run left there was seen to end this one in a crash."""
  if importlib.util.find_spec("jax"):
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture
def on_purpose(monkeypatch):
  """For a test that makes errors to see them found: they are no measure of anything, so --record-errors leaves them out."""
  monkeypatch.delenv("MOE_TE_RECORD_ERRORS", raising=False)


def required(config, kind):
  return config.getoption(f"--require-{kind}") or kind in os.environ.get("MOE_TE_REQUIRE", "").split()


@functools.cache
def missing(kind):
  """Why tests of a kind cannot run here, or None."""
  if kind == "host":
    return None if importlib.util.find_spec("maxtext") else "MaxText is not installed"
  if kind == "host_0_2_4":
    found = importlib.metadata.version("maxtext") if importlib.util.find_spec("maxtext") else "none"
    return None if found == "0.2.4" else f"MaxText 0.2.4 is needed, not {found}: `make test-install` runs these with it"
  if kind == "plot":
    return None if importlib.util.find_spec("matplotlib") else "matplotlib is not installed"
  if kind == "dist":
    return None if importlib.util.find_spec("hatchling") else "the build backend is not installed (pip install 'hatchling>=1.27')"
  if kind == "tunix":
    return None if importlib.util.find_spec("tunix") else "Tunix is not installed: `make test-tunix` runs these with it"
  if kind == "te":
    return None if importlib.util.find_spec("transformer_engine") else "Transformer Engine is not installed"
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if platforms and "cuda" not in platforms and "gpu" not in platforms:
    return f"no GPU asked for: JAX_PLATFORMS={platforms} (pass --require-gpu)"
  import jax

  if jax.default_backend() != "gpu":
    return f"jax found no GPU, only {jax.default_backend()}"
  return "one GPU, and two are needed" if kind == "gpus" and jax.local_device_count() < 2 else None
