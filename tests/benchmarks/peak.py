"""Runs a module as `python -m` would and prints XLA's peak memory of the first local device at the end: peak MODULE ARGS…

Profiles that the module takes are also written in the form that `kernels` reads.
"""

import faulthandler
import functools
import runpy
import sys


def main():
  module = sys.argv[1]
  import jax

  jax.profiler.start_trace = functools.partial(jax.profiler.start_trace, create_perfetto_trace=True)
  sys.argv = [module, *sys.argv[2:]]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise
  statistics = jax.local_devices()[0].memory_stats() or {}
  print("PEAK_BYTES", statistics.get("peak_bytes_in_use", 0), flush=True)
  faulthandler.dump_traceback_later(20)  # says where, if the process does not end


if __name__ == "__main__":
  main()
