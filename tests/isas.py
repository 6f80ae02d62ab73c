"""The tests that compare numbers, under several instruction sets and numbers of threads: one line for each run of them.

    python -m tests.isas [ISA:THREADS …] [--workers N] [--tests FILE …]

A line says what passed and failed, in how many seconds, and which error came nearest to its bound: its share of it, 1 being the bound.
Without ISA:THREADS, each instruction set that this machine has on all its cores, and the newest on 1, 2 and 8 of them.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

TESTS = pathlib.Path(__file__).parent
FLAGS = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512f"}  # XLA's names, oldest first: the kernel's
COMPARES = re.compile(r"helpers\.(assert_|within)|\bcontract\.|assert_equal\(|array_equal\(")


def files() -> list[str]:
  """The test files that compare numbers and need no GPU."""
  return [
    str(path) for path in sorted(TESTS.rglob("test_*.py")) if path.parent.name not in ("gpu", "te") and COMPARES.search(path.read_text())
  ]


def default_runs() -> list[str]:
  """ISA:THREADS, as the module says."""
  has = set(re.search(r"^flags\s*:(.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)[1].split())
  isas = [isa for isa, flag in FLAGS.items() if flag in has]
  cores = len(os.sched_getaffinity(0))
  return [f"{isa}:{cores}" for isa in isas] + [f"{isas[-1]}:{threads}" for threads in (1, 2, 8) if threads != cores]


def run(isa: str, threads: int, workers: int, tests: list[str], folder: pathlib.Path) -> tuple[str, bool]:
  """(the line, whether all passed) of one run of the tests."""
  report, errors = folder / f"{isa}-{threads}.xml", folder / f"{isa}-{threads}.jsonl"
  # XLA makes its pool of NPROC threads, or of as many as there are devices if these are more; the cores are what really run.
  environment = os.environ | {"XLA_FLAGS": f"--xla_cpu_max_isa={isa}", "NPROC": str(threads)}
  cores = sorted(os.sched_getaffinity(0))[: threads * workers]
  command = [sys.executable, "-m", "pytest", "-q", "--require-host", f"--junitxml={report}", f"--record-errors={errors}"]
  command += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
  log = folder / f"{isa}-{threads}.log"
  with log.open("w") as out:
    subprocess.run(
      [*command, *tests], cwd=TESTS.parent, env=environment, stdout=out, stderr=subprocess.STDOUT,
      preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
  name = f"{isa:7s} {threads:2d} threads"
  if not report.exists():
    return f"{name}: did not run, see {log}", False
  suite = next(xml.parse(report).getroot().iter("testsuite"))
  total, failed, skipped = (sum(int(suite.get(key)) for key in keys) for keys in (("tests",), ("failures", "errors"), ("skipped",)))
  lines = [json.loads(line) for line in errors.read_text().splitlines()] if errors.exists() else []
  worst = max(lines, key=lambda line: line["share"], default=None)
  nearest = f"nearest to its bound: {worst['share']:.2f}, {worst['name']} in {worst['test'].split(' ')[0]}" if worst else "nothing compared"
  line = f"{name}: {total - failed - skipped} passed, {failed} failed, {skipped} skipped, {float(suite.get('time')):.0f} s; {nearest}"
  failures = [f"  {case.get('classname')}::{case.get('name')}" for case in suite if any(part.tag in ("failure", "error") for part in case)]
  return "\n".join([line, *failures]), not failed and total > skipped


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("runs", nargs="*", metavar="ISA:THREADS", help="as in AVX2:1")
  parser.add_argument("--workers", type=int, default=1, help="processes, each with that many threads")
  parser.add_argument("--folder", type=pathlib.Path, help="where logs and records are kept")
  parser.add_argument("--tests", nargs="+", default=files(), help="files, folders or names, as pytest takes them")
  args = parser.parse_args()
  folder = args.folder or pathlib.Path(tempfile.mkdtemp())
  folder.mkdir(parents=True, exist_ok=True)
  passed = True
  for word in args.runs or default_runs():
    isa, threads = word.split(":")
    line, all_passed = run(isa, int(threads), args.workers, args.tests, folder)
    print(line, flush=True)
    passed &= all_passed
  return 0 if passed else 1


if __name__ == "__main__":
  sys.exit(main())
