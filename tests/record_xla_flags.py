"""Records which XLA flags the released jaxlib and CUDA plugins have, by two independent ways, into tests/xla_flags.json.

    python -m tests.record_xla_flags        needs a C compiler, Linux, and 1.7 GB of downloads from PyPI

The truth comes from XLA itself: `XLA_FLAGS=--help` prints every flag, but the log cuts the text, so a preloaded `exit` writes the
process's memory to a file before it is gone. Beside it stands what `settings.xla_flags.names_in` finds in the libraries without
running them, as far as it differs from that.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

from maxtext_moe_te.settings import xla_flags

FILE = pathlib.Path(__file__).with_name("xla_flags.json")
VERSIONS = ("0.9.2", "0.10.2", "0.11.2", "0.12.0.1")

_PRELOADED = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static void end(int status) {
  FILE *maps = fopen("/proc/self/maps", "r"), *out = fopen(getenv("MEMORY"), "w");
  char line[512], mode[8], path[300];
  unsigned long from, to;
  while (fgets(line, sizeof line, maps)) {
    path[0] = 0;
    if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %299s", &from, &to, mode, path) >= 3 && !strncmp(mode, "rw", 2) && !strstr(path, ".so"))
      fwrite((void *)from, 1, to - from, out);
  }
  fclose(out);
  syscall(SYS_exit_group, status);
}
void _exit(int status) { end(status); __builtin_unreachable(); }
void exit(int status) { end(status); __builtin_unreachable(); }
"""
_START_CPU = "import sys; sys.path.insert(0, sys.argv[1]); from jaxlib import xla_client; xla_client.make_cpu_client()"


def true_flags(site, folder):
  """Name to type, as the jaxlib in `site` prints them."""
  (folder / "end.c").write_text(_PRELOADED)
  subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / "end.so", folder / "end.c"], check=True)
  memory = folder / "memory"
  environment = {"XLA_FLAGS": "--help", "LD_PRELOAD": str(folder / "end.so"), "MEMORY": str(memory)}
  subprocess.run([sys.executable, "-c", _START_CPU, site], env=environment, capture_output=True)
  found = re.findall(rb"\t--(xla_\w+)=[^\t\n]*\t(bool|string|float|int32|int64)\t", memory.read_bytes())
  return {name.decode(): kind.decode() for name, kind in found}


def fetch(version, folder):
  for package, library in (("jaxlib", "jaxlib"), ("jax-cuda13-pjrt", "jax_plugins")):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    subprocess.run([*pip, f"{package}=={version}"], check=True)
    wheel = next(folder.glob(f"{package.replace('-', '_')}*.whl"))
    with zipfile.ZipFile(wheel) as content:
      content.extractall(folder / "site", [name for name in content.namelist() if name.startswith(library)])
    wheel.unlink()
  return folder / "site"


def main():
  flags, more = {}, {}
  for version in VERSIONS:
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch)
      site = fetch(version, folder)
      true = true_flags(site, folder)
      for name, kind in true.items():
        flags[name] = f"{flags.get(name, kind)} {version}"
      more[version] = {}
      for library in ("jaxlib/libjax_common.so", "jax_plugins/xla_cuda13/xla_cuda_plugin.so"):
        scanned = xla_flags.names_in(site / library)
        assert true.keys() <= scanned, (version, library, true.keys() - scanned)
        more[version][library] = sorted(scanned - true.keys())
    print(version, len(true), "flags;", *(f"{len(names)} more names in {library}" for library, names in more[version].items()))
  lines = [f"  {json.dumps(name)}: {json.dumps(flag)}" for name, flag in sorted(flags.items())]
  extra = json.dumps(more, indent=1)
  FILE.write_text(f'{{"command": "python -m tests.record_xla_flags",\n"flags": {{\n{",\n".join(lines)}}},\n"no_flags": {extra}}}\n')


if __name__ == "__main__":
  main()
