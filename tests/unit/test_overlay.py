"""Overlays: reading, joining, contradictions, and what goes into the environment."""

import json
import re
from pathlib import Path

import pytest

from maxtext_moe_te.errors import OptionError, OverlayError
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import xla_flags


@pytest.fixture
def write(tmp_path):
  def to(name, text):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)

  return to


def fails(spec, kind=OverlayError):
  with pytest.raises(kind) as caught:
    overlays.load(spec)
  return str(caught.value)


def test_all_sections(write):
  path = write(
    "a.yml",
    "about: one line\nsteps: 5\nlearning_rate: 1e-3\nmoe_te: {router: jax}\nxla_flags: {xla_a: true, xla_b: 2}\nenv: {A: 1, B: false}\n",
  )
  overlay = overlays.load(path)
  assert overlay.names == (path,)
  assert overlay.maxtext == {"steps": 5, "learning_rate": 0.001}
  assert overlay.moe_te == {"router": "jax"}
  assert overlay.xla_flags == {"xla_a": True, "xla_b": 2}
  assert overlay.env == {"A": "1", "B": "false"}
  assert overlay.sources["maxtext.steps"] == overlay.sources["env.A"] == path


def test_a_date_is_text_as_maxtext_reads_it(write):
  assert overlays.load(write("a.yml", "run_name: 2024-13-45\n")).maxtext == {"run_name": "2024-13-45"}


def test_several_files_join_and_equal_values_agree(write):
  one, two = write("one.yml", "steps: 5\na: 1\n"), write("two.yml", "steps: 5\nb: 2\n")
  overlay = overlays.load(f"{one},{two}")
  assert overlay.maxtext == {"steps": 5, "a": 1, "b": 2}
  assert (overlay.sources["maxtext.steps"], overlay.sources["maxtext.b"]) == (one, two)


def test_contradiction_names_both_files(write):
  one, two = write("one.yml", "env: {A: x}\n"), write("two.yml", "env: {A: y}\n")
  text = fails(f"{one},{two}")
  assert text.startswith(f"{one} sets A=x and {two} sets A=y; needed: overlays that do not contradict each other.")


def test_packaged_names():
  assert "dropless" in overlays.packaged()
  assert overlays.load("dropless").maxtext["capacity_factor"] == -1.0


def test_every_packaged_overlay_loads_and_says_what_it_is_about():
  for name, path in overlays.packaged().items():
    overlays.load(name)
    assert path.read_text().startswith("about: "), name


def test_unknown_name_lists_and_suggests():
  text = fails("droples")
  assert text.startswith("no overlay is called droples; needed: a path, or one of ") and "dropless" in text
  assert text.endswith("Fix: write overlay=dropless.")


@pytest.mark.parametrize(
  ("content", "text"),
  [
    ("a: 1\na: 2\n", "sets a twice, the second time in line 2"),
    ("moe_te:\n  router: te\n  router: jax\n", "sets router twice, the second time in line 3"),
    ("- a\n", "the file in {path} is not a map from names to values"),
    ("xla_flags: [a]\n", "`xla_flags` in {path} is not a map"),
    ("a: [1\n", "{path} is not YAML: expected ',' or ']'"),
    ("about: [1]\n", "`about` in {path} is not one line of text"),
    ("base_config: x.yml\n", "{path} sets base_config; needed: an overlay without it."),
    ("override_model_config: true\n", "{path} sets override_model_config"),
    ("xla_flags: {xla_a: [1]}\n", "xla_flags.xla_a in {path} is [1]; needed: text, a number, true or false."),
    ("env: {A: null}\n", "env.A in {path} is None"),
    ("xla_flags: {--xla_a: 1}\n", "Fix: write xla_a: 1."),
    ('xla_flags: {xla_a: "FUSION, CUBLAS"}\n', "Fix: write xla_a: FUSION,CUBLAS."),
    ("env: {XLA_FLAGS: --a}\n", "Fix: move it to the map `xla_flags`."),
    ("env: {M_STEPS: 3}\n", "Fix: move it to the top level, as steps."),
  ],
)
def test_malformed(write, content, text):
  path = write("x.yml", content)
  assert text.format(path=path) in fails(path)


def test_missing_path_empty_spec_and_wrong_option(write):
  assert fails("./nope.yml").startswith("overlay ./nope.yml does not exist")
  assert fails("").startswith("'' names no overlay; ")
  assert "unknown option moe_te.ruoter" in fails(write("x.yml", "moe_te: {ruoter: te}\n"), OptionError)


def test_environment_user_wins_and_is_reported(write):
  overlay = overlays.load(write("x.yml", "env: {A: 1, B: 2, C: 3}\nxla_flags: {xla_a: true, xla_b: 2, xla_c: 3}\n"))
  environ = {"A": "9", "B": "2", "XLA_FLAGS": "--xla_b=7 --xla_d --xla_a"}
  report = overlays.apply_environment(overlay, environ)
  assert environ == {"A": "9", "B": "2", "C": "3", "XLA_FLAGS": "--xla_c=3 --xla_b=7 --xla_d --xla_a"}
  assert report == [
    "environment variable A=1 of the overlay not used: the environment sets 9",
    "xla flag xla_b=2 of the overlay not used: XLA_FLAGS sets 7",
  ]


def test_environment_without_flags_is_untouched():
  environ = {"XLA_FLAGS": "/some/file"}
  assert overlays.apply_environment(overlays.Overlay(()), environ) == []
  assert environ == {"XLA_FLAGS": "/some/file"}


def test_xla_flags_text():
  assert xla_flags.parse("--a=1 --b --c='x y' --a=2 word --d") == [("a", "1"), ("b", None), ("c", "x y"), ("a", "2")]
  assert xla_flags.format_flags({"a": True, "b": False, "c": 1.5, "d": "x"}) == "--a=true --b=false --c=1.5 --d=x"
  with pytest.raises(OverlayError, match="XLA_FLAGS=/some/file names a file of flags"):
    xla_flags.merge({"a": 1}, "/some/file")


def test_compiled_memory_in_comments_is_on_record():
  """GiB by capacity and parts, of the overlays that name them."""
  record = json.loads((Path(__file__).parents[1] / "te" / "capacity.json").read_text())["cases"]
  for name in {case.partition(",")[0] for case in record}:
    comment = re.search(r"  # Compiled, GiB: ((?:.*\n)(?:  # .*\n)*)", overlays.packaged()[name].read_text())[1]
    known = {one[key] for case, grid in record.items() if case.startswith(f"{name},") for one in grid for key in one if "peak" in key}
    named = set(map(float, re.findall(r"\d+\.\d", comment)))
    assert named and named <= known, f"{name}: {named - known}"
