"""Runs a module as `python -m` would and prints XLA's peak memory of the first local device at the end: peak MODULE ARGS…"""

import runpy
import sys


def main():
  module = sys.argv[1]
  sys.argv = [module, *sys.argv[2:]]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise
  import jax

  statistics = jax.local_devices()[0].memory_stats() or {}
  print("PEAK_BYTES", statistics.get("peak_bytes_in_use", 0), flush=True)


if __name__ == "__main__":
  main()
