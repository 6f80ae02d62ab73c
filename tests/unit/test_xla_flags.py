"""XLA flags: what the installed libraries know, what XLA would do with a text, and what is said before it does.

The recorded lists in tests/xla_flags.json are XLA's own (tests/record_xla_flags.py says how they were made); one live jaxlib is
asked as well.
"""

import json
import pathlib
import subprocess
import sys

import pytest
from packaging.version import Version

from maxtext_moe_te import cli
from maxtext_moe_te.errors import OptionError, RefusedError
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.xla_flags import MULTI_STREAMING, OVERLAP_LIMIT

RECORD = json.loads((pathlib.Path(__file__).parents[1] / "xla_flags.json").read_text())
VERSIONS = ("0.9.2", "0.10.2", "0.11.2", "0.12.0.1")


def flags_of(version):
  return {name for name, text in RECORD["flags"].items() if version in text.split()[1:]}


def names(version):
  """What `installed_names` finds on a machine with the released jaxlib and CUDA plugin of a version."""
  libraries = {library: frozenset(flags_of(version).union(more)) for library, more in RECORD["no_flags"][version].items()}
  return xla_flags.Names(libraries=libraries, version=version)


# Names


@pytest.mark.parametrize("version", VERSIONS)
def test_every_gpu_flag_of_any_release_is_judged_right(version):
  """Flags of all releases, and words the libraries hold that are none."""
  words = {*RECORD["flags"], *(name for libraries in RECORD["no_flags"].values() for more in libraries.values() for name in more)}
  words = {word for word in words if word.startswith("xla_gpu_")}
  accepted = {word for word in words if not names(version).lacking(word)}
  assert accepted == flags_of(version) & words
  assert 170 < len(accepted) < len(words)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_flag_of_a_release_is_refused_on_it(version):
  assert not [name for name in flags_of(version) if names(version).lacking(name)]


def test_the_installed_jaxlib_has_what_was_recorded():
  installed = xla_flags.installed_names()
  assert installed.version in VERSIONS, "record this jaxlib: python -m tests.record_xla_flags"
  for library, found in installed.libraries.items():
    recorded = RECORD["no_flags"][installed.version]
    more = next(more for file, more in recorded.items() if file.startswith("jaxlib") == library.startswith("jaxlib"))
    assert found == flags_of(installed.version).union(more), library


def test_only_whole_strings_are_names(tmp_path):
  library = tmp_path / "no-elf.so"
  library.write_bytes(b"\0xla_a\0xla_b\0--xla_c\0xla_d=1\0")
  assert xla_flags.names_in(library) == {"xla_a", "xla_b"}


def test_the_catalogue_agrees_with_the_record():
  kinds = {"list": "string", "choice": "string"}
  for name, flag in xla_flags.catalogue().items():
    for version in VERSIONS:
      since, until = Version(flag.since or "0"), Version(flag.until or "99")
      assert (name in flags_of(version)) == (since <= Version(version) < until), (name, version)
    if name in RECORD["flags"]:
      assert kinds.get(flag.type, flag.type) == RECORD["flags"][name].split()[0], name
    assert flag.meaning.endswith("."), name
    assert flag.source in ("binary", "run") or flag.source.startswith("https://github.com/"), name


@pytest.mark.parametrize(
  ("profile", "runs_on"),
  [
    ("multistream-domain", ("0.11.2", "0.12.0.1")),
    ("multistream-aggressive", ("0.11.2", "0.12.0.1")),
    ("published", VERSIONS),
  ],
)
def test_a_profile_passes_where_all_its_flags_exist(profile, runs_on):
  text = xla_flags.format_flags(xla_flags.profile([profile]))
  assert tuple(version for version in VERSIONS if not xla_flags.check(text, names(version), {})) == runs_on


# What XLA does with a text, tried on the installed jaxlib


ACCEPTED = [
  "--xla_gpu_enable_latency_hiding_scheduler --xla_gpu_enable_nccl_comm_splitting=FALSE",
  "--xla_gpu_enable_command_buffer='FUSION, cublas,' --xla_gpu_experimental_max_unroll_factor=+7",
  xla_flags.format_flags(xla_flags.profile(["published", "multistream-aggressive"])),
]
ENDS_THE_PROCESS = [
  "--xla_gpu_enable_scale_up_fabric_assignment=true",
  "--xla_gpu_host_bfc=1",
  "-xla_dump_to=/tmp",
  "--xla_gpu_enable_latency_hiding_scheduler=yes",
  "--xla_gpu_all_gather_combine_threshold_bytes=6GB",
  "--xla_gpu_experimental_max_unroll_factor=2147483648",
  "--xla_gpu_experimental_max_unroll_factor=0",
  "--xla_gpu_enable_command_buffer=FUSION,+CUBLAS",
  """--xla_gpu_enable_command_buffer="'FUSION'" """,
  "--xla_gpu_pipeline_all_gather=maybe",
  "--xla_gpu_memory_limit_slop_factor",
  "xla_dump_to=/tmp",
]
START = "from jaxlib import xla_client; xla_client.make_cpu_client()"


def test_the_verdict_is_xlas_own():
  hidden = " --xla_no_such_flag=1"  # behind a word that is no flag, XLA does not even see this
  texts = [*ACCEPTED, *ENDS_THE_PROCESS, "--xla_dump_hlo_as_text false" + hidden, "--xla_dump_hlo_as_text=false" + hidden]
  runs = [subprocess.Popen([sys.executable, "-c", START], env={"XLA_FLAGS": text}, stderr=subprocess.DEVNULL) for text in texts]
  ended = [run.wait() != 0 for run in runs]
  assert ended == [False] * len(ACCEPTED) + [True] * len(ENDS_THE_PROCESS) + [False, True]
  installed = xla_flags.installed_names()
  verdicts = [any(finding.fatal for finding in xla_flags.check(text, installed)) for text in texts]
  assert verdicts == [*ended[:-2], True, True]


# Reading and mending


@pytest.mark.parametrize(
  ("text", "flags", "unread"),
  [
    ("--a=1 --b  --a=2", [("a", "1"), ("b", None), ("a", "2")], ""),
    ("--a='x y' --b=\"it's\" --c=d'e", [("a", "x y"), ("b", "it's"), ("c", "d'e")], ""),
    ("--a=x'y z' --b=1", [("a", "x'y")], "z' --b=1"),
    ('--a="b\\"c" --d=1', [("a", 'b"c'), ("d", "1")], ""),
    ("--a false --b=1", [("a", None)], "false --b=1"),
    ("", [], ""),
    ("flags.txt", [], "flags.txt"),
  ],
)
def test_read(text, flags, unread):
  assert xla_flags.read(text) == (flags, unread)


@pytest.mark.parametrize(
  ("text", "mended"),
  [
    ("--xla_a false --xla_b=1", "--xla_a=false --xla_b=1"),
    ("--xla_b=1 --xla_n 99", "--xla_b=1 --xla_n=99"),
    ("--xla_l=A, B, C --xla_b=1", "--xla_l=A,B,C --xla_b=1"),
    ("--xla_a word --xla_b=1", None),
    ("--xla_l=A B", None),
    ("/some/file", None),
    ("--xla_a  --xla_b", None),
  ],
)
def test_repair_mends_what_has_one_reading(text, mended):
  result, lines = xla_flags.repair(text)
  assert result == (mended or text)
  assert bool(lines) == bool(mended)


def test_repair_says_what_it_did():
  assert xla_flags.repair("--xla_a false")[1] == [
    "XLA_FLAGS: '--xla_a false' read as --xla_a=false (XLA stops reading at a space that no flag follows)"
  ]


# Findings


def only(text, environ=None, version="0.12.0.1"):
  (finding,) = xla_flags.check(text, names(version), environ)
  return finding


@pytest.mark.parametrize(
  ("text", "version", "message"),
  [
    (
      "--xla_gpu_enable_comand_buffer=FUSION",
      "0.12.0.1",
      "jaxlib/libjax_common.so has no flag --xla_gpu_enable_comand_buffer and would end the process; needed: flags that jaxlib and "
      "the CUDA plugin know. Fix: write --xla_gpu_enable_command_buffer.",
    ),
    (
      "--xla_gpu_experimental_enable_nvshmem=true",
      "0.11.2",
      "jaxlib/libjax_common.so has no flag --xla_gpu_experimental_enable_nvshmem (Gone) and would end the process; needed: flags that "
      "jaxlib and the CUDA plugin know. Fix: remove --xla_gpu_experimental_enable_nvshmem.",
    ),
    (
      "--xla_gpu_experimental_parallel_scale_up_collective_overlap_limit=1",
      "0.10.2",
      "(it came with jaxlib 0.11.2) and would end the process; needed: flags that jaxlib and the CUDA plugin know. Fix: remove "
      "--xla_gpu_experimental_parallel_scale_up_collective_overlap_limit, or install jaxlib 0.11.2 or newer.",
    ),
    ("--xla_gpu_enable_latency_hiding_scheduler=on", "0.12.0.1", "has a wrong value; needed: true or false. Fix: correct or remove"),
    ("--xla_gpu_all_gather_combine_threshold_bytes=6e9", "0.12.0.1", "needed: a whole number that fits int64."),
    ("--xla_gpu_experimental_max_unroll_factor=0", "0.12.0.1", "needed: a whole number from 1 to 2147483647."),
    ("--xla_gpu_memory_limit_slop_factor", "0.12.0.1", "needed: --xla_gpu_memory_limit_slop_factor=VALUE."),
    ("--xla_gpu_pipeline_all_gather=yes", "0.12.0.1", "needed: one of default, off, on, explicit."),
    ("--xla_gpu_enable_command_buffer=COLLECTIVES_KERNEL", "0.11.2", "needed: words among FUSION, CUBLAS"),
    ("--xla_gpu_enable_command_buffer=+FUSION,CUDNN", "0.12.0.1", "joined by commas, all or none of them with + or -."),
    (
      "--xla_dump_to=/x word --xla_dump_hlo_as_text",
      "0.12.0.1",
      "'word' in XLA_FLAGS is no flag, and XLA reads nothing from there on: word --xla_dump_hlo_as_text; needed: flags of the form "
      "--name=value, without spaces inside. Fix: write the value after = or remove the word.",
    ),
    ("/no/such/file", "0.12.0.1", "XLA_FLAGS=/no/such/file does not begin with -- and so is the name of a file, which cannot be read"),
    ("xla_dump_to=/x", "0.12.0.1", "Fix: write --xla_dump_to=/x."),
    (
      f"--{OVERLAP_LIMIT}=2",
      "0.12.0.1",
      f"--{OVERLAP_LIMIT}=2 without --{MULTI_STREAMING}=true: collectives overlap in the program and run one after the other on one "
      f"stream; needed: both or neither. Fix: add --{MULTI_STREAMING}=true, or remove --{OVERLAP_LIMIT}.",
    ),
    (
      f"--{MULTI_STREAMING} --xla_gpu_enable_latency_hiding_scheduler",
      "0.12.0.1",
      f"--{MULTI_STREAMING}=true without --{OVERLAP_LIMIT}=2: nothing overlaps; needed: both or neither.",
    ),
  ],
)
def test_fatal_findings(text, version, message):
  finding = only(text, version=version)
  assert message in str(finding)
  assert finding.fatal


def test_a_wrong_domain_passes_xlas_parser_and_not_ours():
  finding = only("--xla_gpu_collective_domain_assignment=scale_up --xla_gpu_enable_latency_hiding_scheduler=true")
  assert str(finding).endswith(
    "needed: words among scale_up_fabric, joined by commas. Fix: correct or remove --xla_gpu_collective_domain_assignment=scale_up."
  )


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("--xla_gpu_autotune_level=0 --xla_gpu_autotune_level=4", "--xla_gpu_autotune_level is in XLA_FLAGS as 0 and as 4; XLA takes the last"),
    (
      "--xla_gpu_enable_command_buffer=+COLLECTIVES",
      "--xla_gpu_enable_command_buffer names COLLECTIVES. With COLLECTIVES a run on GB200 hung at step 838 "
      "(https://github.com/marin-community/marin/pull/8277)",
    ),
    (
      "--xla_gpu_collective_domain_assignment=scale_up_fabric",
      "--xla_gpu_collective_domain_assignment without --xla_gpu_enable_latency_hiding_scheduler=true: nothing overlaps",
    ),
  ],
)
def test_findings_worth_a_line(text, message):
  finding = only(text)
  assert finding.found == message
  assert not finding.fatal


def test_a_file_of_flags_is_checked_too(tmp_path):
  file = tmp_path / "flags"
  file.write_text("--xla_dump_to=/x\n--xla_gpu_no_such_flag=1\n")
  assert only(str(file)).found.startswith("jaxlib/libjax_common.so has no flag --xla_gpu_no_such_flag")


@pytest.mark.parametrize("streams", [True, False])
def test_one_hardware_queue(streams):
  text = xla_flags.format_flags(xla_flags.profile(["multistream-domain"])) if streams else ""
  finding = only(text, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
  assert finding.found.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams on one hardware queue")
  assert finding.fatal == streams == ("ask for collectives on several streams" in finding.found)
  assert finding.fix == "unset it, or set CUDA_DEVICE_MAX_CONNECTIONS=16"


def test_two_names_of_the_memory_fraction():
  finding = only("", {"XLA_CLIENT_MEM_FRACTION": "0.8", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"})
  assert finding.found == "XLA_CLIENT_MEM_FRACTION=0.8 and XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 are both set, which JAX refuses"


def test_enforce_refuses_or_reports():
  environ = {"XLA_FLAGS": "--xla_gpu_no_such_flag=1 --xla_dump_to=a --xla_dump_to=b"}
  with pytest.raises(RefusedError, match="has no flag --xla_gpu_no_such_flag"):
    xla_flags.enforce(environ)
  assert len(xla_flags.enforce(environ, strict=False)) == 2
  assert xla_flags.enforce({}) == []


def test_a_run_is_refused_before_maxtext_is_looked_for(monkeypatch, capsys):
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_no_such_flag=1")
  assert cli.main(["train", "base.yml"]) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert error.startswith("maxtext-moe-te: error: jaxlib ") and "has no flag --xla_gpu_no_such_flag and would end the process" in error


def test_an_unknown_layout_of_jaxlib_is_said(monkeypatch):
  monkeypatch.setattr(xla_flags, "installed_names", lambda: None)
  assert xla_flags.enforce({"XLA_FLAGS": "--xla_x=1"}) == ["XLA_FLAGS not checked: no jaxlib of a known layout is installed"]


# Profiles


def applied(profile, environ, overlay=overlays.Overlay(())):
  return overlays.apply_environment(overlay, environ, [profile] if profile else []), dict(xla_flags.parse(environ.get("XLA_FLAGS", "")))


def test_profile_below_overlay_below_user():
  environ = {"XLA_FLAGS": "--xla_gpu_memory_limit_slop_factor=90"}
  overlay = overlays.Overlay((), xla_flags={"xla_gpu_experimental_max_unroll_factor": 4, "xla_gpu_autotune_level": 0})
  report, flags = applied("published", environ, overlay)
  assert (flags["xla_gpu_memory_limit_slop_factor"], flags["xla_gpu_experimental_max_unroll_factor"]) == ("90", "4")
  assert flags.keys() == {*xla_flags.profile(["published"]), "xla_gpu_autotune_level"}
  assert report == [
    "xla flag xla_gpu_experimental_max_unroll_factor=8 of the profile published not used: the overlay sets 4",
    "xla flag xla_gpu_memory_limit_slop_factor=99 of the profile published not used: XLA_FLAGS sets 90",
  ]


def test_the_users_flags_are_mended_before_they_are_joined():
  environ = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION, CUDNN --xla_dump_to=x"}
  report, flags = applied("multistream-domain", environ)
  assert flags["xla_gpu_enable_command_buffer"] == "FUSION,CUDNN" and flags["xla_dump_to"] == "x"
  assert len(report) == 1


def test_half_a_profile_is_refused():
  environ = {"XLA_FLAGS": f"--{OVERLAP_LIMIT}=1"}
  applied("multistream-aggressive", environ)
  with pytest.raises(RefusedError, match=f"--{MULTI_STREAMING}=true without --{OVERLAP_LIMIT}=2: nothing overlaps"):
    xla_flags.enforce(environ)


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ("multistream", "names the profile multistream; needed: names among multistream-domain, multistream-aggressive, published, joined"),
    ("multistream-domain,multistream-aggressive", "profiles that do not contradict each other. Fix: remove multistream-domain or"),
    (True, "moe_te.xla_profile=True in the command line names the profile True"),
  ],
)
def test_wrong_profiles(value, message):
  with pytest.raises(OptionError) as caught:
    MoeTeOptions.from_mapping({"xla_profile": value}, "the command line")
  assert message in str(caught.value)


def test_activate_refuses_a_profile_that_came_too_late():
  with pytest.raises(RefusedError, match=r"and XLA_FLAGS without xla_gpu_collective_domain_assignment: XLA reads flags once"):
    xla_flags.check_profile_is_set(["multistream-domain"], {"XLA_FLAGS": "--xla_dump_to=x"})
  environ = {}
  applied("multistream-domain", environ)
  xla_flags.check_profile_is_set(["multistream-domain"], environ)


def test_the_older_memory_fraction_of_an_overlay_yields_to_the_users_newer_name():
  environ = {"XLA_CLIENT_MEM_FRACTION": "0.7"}
  report, _ = applied("", environ, overlays.Overlay((), env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85"}))
  assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.7"}
  assert report == [
    "environment variable XLA_PYTHON_CLIENT_MEM_FRACTION=0.85 of the overlay not used: the environment sets XLA_CLIENT_MEM_FRACTION=0.7"
  ]
