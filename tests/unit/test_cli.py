"""The command line: words taken out of MaxText's, one-line errors, exit statuses, and a fast --help."""

import os
import subprocess
import sys
import time

import pytest

from maxtext_moe_te import cli, session
from maxtext_moe_te.errors import OptionError, OverlayError, RefusedError, VersionError
from maxtext_moe_te.host import source
from maxtext_moe_te.settings import words as our_words
from maxtext_moe_te.settings.config import MoeTeOptions

HEAVY = ("jax", "maxtext", "transformer_engine", "numpy")
HELP = """
import sys
from maxtext_moe_te import cli
try:
  cli.main({argv})
except SystemExit as stop:
  assert stop.code == 0, stop.code
{extra}
print("HEAVY", *[name for name in {heavy} if name in sys.modules])
"""


def heavy_after_help(argv, extra=""):
  code = HELP.format(argv=argv, extra=extra, heavy=HEAVY)
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout, done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"], ["run", "--help"], ["launch", "--help"]])
def test_help_loads_nothing_heavy(argv):
  text, heavy = heavy_after_help(argv)
  assert heavy == []
  assert "maxtext-moe-te" in text


def test_the_check_sees_a_heavy_module():
  assert heavy_after_help(["--help"], "import types; sys.modules['jax'] = types.ModuleType('jax')")[1] == ["jax"]


def test_help_is_fast():
  times_s = []
  for _ in range(5):
    start = time.perf_counter()
    code = "from maxtext_moe_te.cli import main; main(['--help'])"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    times_s.append(time.perf_counter() - start)
  assert min(times_s) < 0.3, times_s


def test_words_are_taken_out_wherever_they_stand():
  ours = ["moe_te.router=auto", "overlay=a,b", "moe_te.metrics=False", "overlay=c", "moe_te.router=jax"]
  words = [ours[0], "base.yml", ours[1], "steps=3", *ours[2:], "--flag"]
  rest, spec, options = our_words.split_words(words)
  assert rest == ["base.yml", "steps=3", "--flag"]
  assert spec == "a,b,c"
  assert options == {"router": "jax", "metrics": False}
  assert our_words.split_words(["base.yml"]) == (["base.yml"], None, {})


@pytest.mark.parametrize("options", [MoeTeOptions(), MoeTeOptions(chunks=8, capacity_factor=1.25, metrics=False, on_overflow="exact")])
def test_every_option_as_a_word(options):
  """What `config show` prints of the options, typed in."""
  shown = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in options.as_dict().items()}
  words = [f"moe_te.{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in shown.items()]
  assert our_words.read(words, None).options == options


def test_a_whole_number_may_be_written_for_a_factor():
  assert our_words.read(["moe_te.capacity_factor=2"], None).options.capacity_factor == 2.0


@pytest.mark.parametrize("word", ["moe_te.router", "moe_te", "moe_te=1"])
def test_a_word_of_ours_without_option_and_value(word):
  with pytest.raises(OptionError, match=r"needed: moe_te\.OPTION=VALUE\. Fix: write for example moe_te\.router=jax\."):
    our_words.split_words([word])


def test_the_overlay_of_the_variable_counts_only_where_no_word_names_one():
  assert our_words.read(["steps=3"], "dropless").spec == "dropless"
  assert our_words.read(["overlay=te-moe-bf16"], "dropless").spec == "te-moe-bf16"
  assert our_words.read(["steps=3"], "").spec is None
  with pytest.raises(OverlayError, match=r"^no overlay is called nope, from MAXTEXT_MOE_TE_OVERLAY; needed: "):
    our_words.read([], "nope")
  with pytest.raises(OverlayError, match=r"^' ' names no overlay, from MAXTEXT_MOE_TE_OVERLAY; needed: a name or a path"):
    our_words.read([], " ")
  with pytest.raises(OverlayError, match=r"^'' names no overlay; needed: a name or a path\. Fix: write overlay=NAME, or name none"):
    our_words.read(["overlay="], "dropless")


@pytest.fixture
def host(tmp_path, monkeypatch):
  """A stand-in for MaxText: a package whose modules do as the test says."""
  package = tmp_path / "maxtext_stand_in"
  package.mkdir()
  (package / "__init__.py").write_text("")
  (package / "entry.py").write_text("import os, sys\nprint((__name__, sys.argv, os.environ.get('MOE_TE_TEST')))\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "maxtext_stand_in", raising=False)  # that of the test before
  monkeypatch.setattr(sys, "argv", list(sys.argv))
  monkeypatch.setenv("MOE_TE_TEST", "user")
  monkeypatch.delenv("MOE_TE_TEST")
  calls = []
  monkeypatch.setattr(session, "activate", lambda overlay=None, options=None: calls.append((overlay, options)))

  def module(code):
    (package / "fails.py").write_text(code)
    return "maxtext_stand_in.fails"

  return calls, module, tmp_path


def one_line(capsys):
  err = capsys.readouterr().err.splitlines()
  assert [line for line in err if not line.startswith("moe_te: ")] == err[-1:], err
  return err[-1]


def test_run_gives_the_module_its_words_and_the_environment(host, capsys):
  calls, _, folder = host
  (folder / "o.yml").write_text("steps: 3\nmoe_te: {router: jax, metrics: false}\nenv: {MOE_TE_TEST: overlay}\n")
  status = cli.main(["run", "maxtext_stand_in.entry", f"overlay={folder}/o.yml", "base.yml", "moe_te.router=auto", "--help"])
  assert status == 0
  argv = [f"{folder}/maxtext_stand_in/entry.py", "base.yml", "--help"]
  assert capsys.readouterr().out.strip() == str(("__main__", argv, "overlay"))
  ((overlay, options),) = calls
  assert overlay.maxtext == {"steps": 3}
  assert (options.router, options.metrics) == ("auto", False)
  os.environ.pop("MOE_TE_TEST")


def test_train_is_run_of_the_trainer(monkeypatch):
  seen = []
  monkeypatch.setattr(session, "run", lambda module, words: seen.append((module, words)))
  assert cli.main(["train", "base.yml", "steps=3"]) == 0
  assert cli.main(["run", "maxtext.trainers.pre_train.train", "base.yml", "steps=3"]) == 0
  assert seen[0] == seen[1] == ("maxtext.trainers.pre_train.train", ["base.yml", "steps=3"])


def test_an_error_of_ours_is_one_line(host, capsys):
  _, module, _ = host
  code = "from maxtext_moe_te.errors import RefusedError\nraise RefusedError(found='two\\nlines', needed='b', fix='c')"
  assert cli.main(["run", module(code)]) == 2
  assert one_line(capsys) == "maxtext-moe-te: error: two lines; needed: b. Fix: c."


def test_an_error_of_ours_behind_another(host, capsys):
  _, module, _ = host
  code = """
from maxtext_moe_te.errors import RefusedError
try:
  raise RefusedError(found='a', needed='b', fix='c')
except RefusedError as error:
  raise RuntimeError('host') from error
"""
  assert cli.main(["run", module(code)]) == 2
  assert one_line(capsys) == "maxtext-moe-te: error: a; needed: b. Fix: c."


@pytest.mark.host  # for jax
def test_an_error_of_ours_from_inside_a_trace(host, capsys):
  _, module, _ = host
  code = """
import jax
from maxtext_moe_te.errors import RefusedError
@jax.jit
def step(x):
  def body(carry, _):
    raise RefusedError(found='a', needed='b', fix='c')
  return jax.lax.scan(body, x, length=2)
jax.grad(lambda x: step(x)[0])(1.0)
"""
  assert cli.main(["run", module(code)]) == 2
  assert one_line(capsys) == "maxtext-moe-te: error: a; needed: b. Fix: c."


def test_other_exceptions_pass_unchanged(host):
  _, module, _ = host
  with pytest.raises(ZeroDivisionError):
    cli.main(["run", module("1 / 0")])
  with pytest.raises(SystemExit) as caught:
    cli.main(["run", module("raise SystemExit(7)")])
  assert caught.value.code == 7


def test_interrupt_is_130_without_traceback(host, capsys):
  _, module, _ = host
  assert cli.main(["run", module("raise KeyboardInterrupt")]) == 130
  assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
  ("module", "near"),
  [
    ("maxtext.trainers.pre_train.trian", "maxtext.trainers.pre_train.train"),
    ("train_compile", "maxtext.trainers.pre_train.train_compile"),
    ("train_sfd", "maxtext.trainers.post_train.sft.train_sft"),
    ("maxtext_stand_in", "maxtext.trainers.pre_train.train"),
    ("no/such.py", "maxtext.trainers.pre_train.train"),
    (".train", "maxtext.trainers.pre_train.train"),
  ],
)
def test_missing_module(host, capsys, module, near):
  assert cli.main(["run", module]) == 2
  assert one_line(capsys) == (
    f"maxtext-moe-te: error: there is no module {module}; needed: a MaxText entry point by its full name. Fix: write {near}."
  )
  assert host[0] == [], "nothing is activated for a module that does not exist"


@pytest.mark.parametrize(
  ("words", "text"),
  [
    (["overlay=nope"], "no overlay is called nope"),
    (["moe_te.ruoter=te"], "unknown option moe_te.ruoter in the command line"),
    (["moe_te.router"], "the word 'moe_te.router' on the command line"),
  ],
)
def test_bad_words(host, capsys, words, text):
  assert cli.main(["train", *words]) == 2
  assert one_line(capsys).startswith(f"maxtext-moe-te: error: {text}")


def test_a_failing_activation_stops_the_run(host, capsys, monkeypatch):
  def activate(**kwargs):
    raise RefusedError(found="a", needed="b", fix="c")

  monkeypatch.setattr(session, "activate", activate)
  assert cli.main(["run", "maxtext_stand_in.entry"]) == 2
  assert capsys.readouterr().out == ""


def test_missing_maxtext_is_one_line(host, capsys, monkeypatch):
  monkeypatch.setattr(source, "root", no_maxtext)
  assert cli.main(["train"]) == 2
  said = "maxtext-moe-te: error: maxtext cannot be imported; needed: MaxText's container, or MaxText in this environment. Fix: pip install"
  assert one_line(capsys).startswith(said)
  monkeypatch.undo()
  monkeypatch.setattr(source, "root", no_maxtext)
  with pytest.raises(VersionError, match="maxtext cannot be imported"):  # in a program of one's own
    session.activate()


def no_maxtext(package="maxtext"):
  raise VersionError(**source.MISSING)


def test_unknown_command_is_a_usage_error(capsys):
  with pytest.raises(SystemExit) as caught:
    cli.main(["trian"])
  assert caught.value.code == 2
  assert "Traceback" not in capsys.readouterr().err


def test_python_dash_m_train(tmp_path):
  done = subprocess.run([sys.executable, "-m", "maxtext_moe_te.train", "overlay=nope"], capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.startswith("maxtext-moe-te: error: no overlay is called nope") and done.stderr.count("\n") == 1
