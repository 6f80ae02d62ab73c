"""Child processes whose output the tests read. Imports no jax."""

import pytest


def finish(process):
  """(exit status, stdout, stderr) of a process that ends within a minute."""
  out, err = process.communicate(timeout=60)
  return process.returncode, out, err


def wait_for(process, text):
  """Reads the process's output up to the line that contains `text`."""
  for line in process.stdout:
    if text in line:
      return
  pytest.fail(f"never said {text!r}: {process.stderr.read()}")
