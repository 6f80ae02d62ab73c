"""`MAXTEXT_MOE_TE_OVERLAY` under the unchanged command, on a MaxText that only prints; each case in its own interpreter."""

import base64
import hashlib
import os
import re
import subprocess
import sys

import pytest

from maxtext_moe_te.errors import PatchError
from maxtext_moe_te.settings.variable import PTH, PTH_LINE, VARIABLE
from maxtext_moe_te.tools import enable, patches

HOST = {
  "maxtext/__init__.py": "import os\nprint('maxtext starts, XLA_FLAGS', os.environ.get('XLA_FLAGS'))\n",
  "maxtext/configs/pyconfig.py": "def initialize(argv=None):\n  return f'config of {argv}'\ninitialize_pydantic = initialize\n",
  "maxtext/trainers/pre_train/train.py": (
    "import sys\nfrom maxtext.configs import pyconfig\nif __name__ == '__main__':\n  print('plain', sys.argv)\n"
  ),
  "maxtext/tool/__init__.py": "",
  "maxtext/tool/__main__.py": "print('plain tool')\n",
  "other/program.py": "from maxtext.configs.pyconfig import initialize\nprint(initialize(['x']))\nprint(initialize(['y']))\n",
}
# What the .pth file runs, with our command line and activation replaced by ones that say that they were called.
START = """
import os, sys
{line}
if os.environ.get("MAXTEXT_MOE_TE_OVERLAY") and "maxtext_moe_te" in sys.modules:
  from maxtext_moe_te import session
  from maxtext_moe_te.settings import variable
  session.run = lambda *args: (print("ours", args, sys.argv[0].rpartition("/")[2]), 7)[1]
  session.activate = lambda overlay, options: (print("activated", *overlay.names), variable.take_over())
"""
TRAIN = "maxtext.trainers.pre_train.train"


@pytest.fixture
def host(tmp_path):
  for path, text in HOST.items():
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
  (tmp_path / "sitecustomize.py").write_text(START.format(line=PTH_LINE))
  (tmp_path / "flags.yml").write_text("xla_flags: {xla_force_host_platform_device_count: 3}\n")
  return tmp_path


def python(host, *words, variable="flags.yml", status=0):
  environment = {key: value for key, value in os.environ.items() if key not in (VARIABLE, "XLA_FLAGS")}
  environment["PYTHONPATH"] = f"{host}{os.pathsep}{os.getcwd()}"
  if variable is not None:
    environment[VARIABLE] = variable
  done = subprocess.run([sys.executable, *words], cwd=host, env=environment, capture_output=True, text=True)
  assert done.returncode == status, done.stderr
  return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("options", [["-m", TRAIN], ["-u", "-m", TRAIN], [f"-m{TRAIN}"], [f"-um{TRAIN}"], ["-X", "dev", "-m", TRAIN]])
def test_the_command_becomes_ours(host, options):
  """Our command line gets the module and its words, and has the environment to itself; its exit status is the process's."""
  out, err = python(host, *options, "base.yml", "steps=3", "-m", status=7)
  assert out == ["maxtext starts, XLA_FLAGS None", f"ours ('{TRAIN}', ['base.yml', 'steps=3', '-m']) train.py"]
  assert err == ""


def test_a_package_that_is_run(host):
  assert python(host, "-m", "maxtext.tool", status=7)[0][1] == "ours ('maxtext.tool', []) __main__.py"


@pytest.mark.parametrize("variable", [None, ""])
def test_unset_is_plain(host, variable):
  out, _ = python(host, "-m", TRAIN, "a", variable=variable)
  assert out[0] == "maxtext starts, XLA_FLAGS None" and out[1].startswith("plain [") and len(out) == 2
  out, _ = python(host, "-c", "import sys; print([name for name in sys.modules if 'moe_te' in name], sys.meta_path[0])", variable=variable)
  assert out[0].startswith("[] ") and "_Finder" not in out[0]


def test_what_is_not_maxtext_is_left_alone(host):
  assert python(host, "-m", "this")[0][0].startswith("The Zen")
  assert "No module named maxtext.trainers.trian" in python(host, "-m", "maxtext.trainers.trian", status=1)[1]


def test_another_program_is_activated_once_when_it_resolves_a_configuration(host):
  out, _ = python(host, "-m", "other.program")
  assert out[0] == "maxtext starts, XLA_FLAGS --xla_force_host_platform_device_count=3"
  assert out[1:] == ["activated flags.yml", "config of ['x']", "config of ['y']"]


def test_an_own_activation_wins(host):
  (host / "other/program.py").write_text(
    "from maxtext_moe_te.settings import variable\nvariable.take_over()\n"
    "from maxtext.configs import pyconfig\nprint(pyconfig.initialize())\n"
  )
  assert python(host, "-m", "other.program")[0][-1] == "config of None"


def test_our_own_commands_are_left_alone(host):
  """Each reads the variable by itself: an overlay on the command line wins, and `disable` works whatever the variable says."""
  (host / "sitecustomize.py").write_text(PTH_LINE)
  out, err = python(host, "-m", "maxtext_moe_te", "patch", "check", "maxtext", variable="nope", status=2)
  assert out[0] == f"maxtext (unknown version) in {host}: damaged" and "nope" not in err  # the stand-in is no MaxText
  assert out[1].startswith(f"maxtext: source unknown in {host}/maxtext, not known to the plugin: against ") and len(out) == 2


def test_a_script_of_maxtext_is_refused(host):
  script = host / "maxtext/trainers/pre_train/train.py"
  out, err = python(host, script, "base.yml", status=2)
  assert out == [] and err.count("\n") == 1
  assert err.startswith(f"maxtext-moe-te: error: {VARIABLE} is set and {script.resolve()} was started as a script; needed: ")
  assert err.endswith(f"Fix: write python -m {TRAIN}.\n")


def test_an_overlay_that_does_not_exist(host):
  """Under -m our command line says so; anywhere else it is an error of the program."""
  assert python(host, "-m", TRAIN, variable="nope", status=7)[0][-1].startswith("ours")
  assert "OverlayError: no overlay is called nope" in python(host, "-m", "other.program", variable="nope", status=1)[1]


def test_worker_processes_are_left_alone(host):
  (host / "other/program.py").write_text(
    "import multiprocessing, sys\n"
    "def found(_):\n  return [type(f).__name__ for f in sys.meta_path if not isinstance(f, type)]\n"
    "if __name__ == '__main__':\n"
    "  print(found(0))\n"
    "  print(multiprocessing.get_context('spawn').Pool(1).map(found, [0])[0])\n"
  )
  out, _ = python(host, "-m", "other.program")
  assert "_Finder" in out[0] and "_Finder" not in out[1]


BROKEN = {
  "raises": ("raise RuntimeError('a\\nb')", "RuntimeError: a b"),
  "lacks a package": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
  "cannot install": ("def install():\n  1 / 0", "ZeroDivisionError: division by zero"),
  "is no Python": ("syntax error", "SyntaxError: "),
  "is gone": (None, "ModuleNotFoundError: No module named 'maxtext_moe_te'"),
}


@pytest.fixture(params=BROKEN)
def broken(request, host):
  """(folder of MaxText and what is left of the package, what is wrong with it)"""
  code, why = BROKEN[request.param]
  if code is not None:
    (host / "maxtext_moe_te").mkdir()
    (host / "maxtext_moe_te/__init__.py").write_text("")
    (host / "maxtext_moe_te/hook.py").write_text(code)
  (host / "sitecustomize.py").unlink()
  return host, why


def start(folder, *words, variable="dropless"):
  """A Python whose site folder holds the .pth file and whatever package is in `folder`; where it is not the package's own environment."""
  code = f"import runpy, site, sys; sys.path.insert(0, {str(folder)!r}); site.addsitedir({str(folder)!r}); "
  environment = {**os.environ, "PYTHONPATH": "", VARIABLE: variable}
  return subprocess.run([sys.executable, "-S", "-c", code + words[0]], env=environment, capture_output=True, text=True, cwd=folder)


def test_a_broken_package_lets_python_start_but_not_maxtext(broken):
  """Who set the variable does not train without the plugin; other programs have nothing to do with that."""
  folder, why = broken
  (folder / PTH).write_text(PTH_LINE)
  done = start(folder, "import json, wave; print('started')")
  assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
  for use in ("import maxtext", "from maxtext.configs import pyconfig", f"runpy.run_module({TRAIN!r}, run_name='__main__')"):
    done = start(folder, f"{use}; print('imported')")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: maxtext-moe-te: error: {VARIABLE} is set, and the plugin cannot be loaded ({why}"), done.stderr
    assert last.endswith("); needed: a whole installation. Fix: pip install --force-reinstall --no-deps maxtext-moe-te.")
  assert start(folder, "import maxtext", variable="").stdout.startswith("maxtext starts, ")


def test_nor_does_a_patched_maxtext_start_with_a_broken_package(broken):
  folder, why = broken
  patch = (patches.folder() / "maxtext/plugin-loader.patch").read_text().splitlines()
  added = [line[1:] for line in patch if line.startswith("+") and not line.startswith("+++")]
  (folder / "maxtext/__init__.py").write_text("\n".join(["import os", *added, "print('maxtext starts')"]))
  done = start(folder, f"runpy.run_module({TRAIN!r}, run_name='__main__')")
  assert (done.returncode, done.stdout) == (1, "") and why.partition(":")[0] in done.stderr
  assert start(folder, "import maxtext", variable="").stdout == "maxtext starts\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_enabling_and_disabling(tmp_path, monkeypatch, end):
  monkeypatch.delenv(VARIABLE, raising=False)
  pth, record = tmp_path / PTH, tmp_path / "RECORD"
  content = f"maxtext_moe_te/hook.py,sha256=x,1{end}maxtext_moe_te-0.1.0.dist-info/RECORD,,{end}".encode()
  record.write_bytes(content)
  assert enable.status(pth, record).splitlines()[0] == f"import hook: disabled ({pth})"
  enable.enable(pth, record)
  once = record.read_bytes()
  enable.enable(pth, record)
  assert record.read_bytes() == once and pth.read_text() == PTH_LINE
  digest = base64.urlsafe_b64encode(hashlib.sha256(pth.read_bytes()).digest()).decode().rstrip("=")
  assert once == content + f"{PTH},sha256={digest},{pth.stat().st_size}{end}".encode()
  assert enable.status(pth, record).splitlines()[0] == f"import hook: enabled ({pth})"
  assert enable.status(pth, record).splitlines()[-1].endswith("plain MaxText")
  monkeypatch.setenv(VARIABLE, "dropless")
  assert enable.status(pth, record).splitlines()[-1].endswith("under the plugin, overlay dropless")
  pth.write_text("import old\n")
  assert "of another version, enable it again" in enable.status(pth, record)
  enable.enable(pth, record)
  assert record.read_bytes() == once and pth.read_text() == PTH_LINE
  enable.disable(pth, record)
  enable.disable(pth, record)
  assert record.read_bytes() == content and not pth.exists()
  assert sorted(tmp_path.iterdir()) == [record]


def test_status_answers_whatever_is_there(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv(VARIABLE, "nope")
  pth = tmp_path / PTH
  pth.write_bytes(b"\xff")
  assert "of another version, enable it again" in enable.status(pth, None)
  enable.enable(pth, None)
  assert "python -m maxtext.…: refused: no overlay is called nope, from MAXTEXT_MOE_TE_OVERLAY;" in enable.status(pth, None)
  monkeypatch.setattr(enable.site, "getsitepackages", lambda: ["/nowhere"])
  monkeypatch.setattr(enable.site, "ENABLE_USER_SITE", False)
  assert enable.main(["status"]) == 0
  said = capsys.readouterr().out
  assert re.match(r"import hook: not possible \(maxtext-moe-te is installed in .*, where Python reads no \.pth files\)\n", said)


def test_a_folder_in_the_files_place_leaves_nothing_behind(tmp_path):
  (tmp_path / PTH).mkdir()
  with pytest.raises(OSError):
    enable.enable(tmp_path / PTH, None)
  assert [path.name for path in tmp_path.iterdir()] == [PTH]


def test_without_a_record_it_says_what_to_do_first(tmp_path):
  enable.enable(tmp_path / PTH, None)
  assert "not in RECORD: run `maxtext-moe-te disable` before uninstalling" in enable.status(tmp_path / PTH, None)


def test_an_installation_outside_the_site_folders_is_refused(monkeypatch):
  monkeypatch.setattr(enable.site, "getsitepackages", lambda: ["/nowhere"])
  monkeypatch.setattr(enable.site, "ENABLE_USER_SITE", False)
  with pytest.raises(PatchError, match=r"where Python reads no \.pth files; needed: an installation in /nowhere\. Fix: pip install"):
    enable.places()


def test_the_line_is_one_line_that_site_runs():
  assert re.fullmatch(r"import os; [^\n]+\n", PTH_LINE)
