"""A rank that hangs is ended: when, with which words, and what it leaves."""

import pytest

from maxtext_moe_te.errors import OptionError
from maxtext_moe_te.host import watchdog
from maxtext_moe_te.host.watchdog import Watchdog
from maxtext_moe_te.settings.limits import EXCEEDED, VARIABLE, Limits


@pytest.fixture
def made(tmp_path):
  now, ended, watchdogs = [0.0], [], []

  def make(first=100.0, later=10.0, rank=1):
    watchdogs.append(
      Watchdog(Limits(first, later, tmp_path / "logs" / "r.stacks"), rank, clock=lambda: now[0], wait=ended.append, end=ended.append)
    )
    return watchdogs[-1]

  yield make, now, ended
  for one in watchdogs:
    one.stop()


def test_the_first_step_has_a_limit_of_its_own(made):
  make, now, _ = made
  dog = make()
  now[0] = 99.0
  assert not dog.overdue()
  dog.beat(7)
  now[0] = 109.0
  assert not dog.overdue()
  now[0] = 110.0
  assert dog.overdue() == "rank 1: after step 7 was issued, no other had been for 11 s (limit 10 s)"
  dog.beat(8)
  assert not dog.overdue()


def test_no_limit(made):
  make, now, _ = made
  dog, other = make(first=0), make(later=0)
  now[0] = 1e6
  assert not dog.overdue() and other.overdue()
  dog.beat(1), other.beat(1)
  now[0] = 2e6
  assert dog.overdue() and not other.overdue()


def test_what_it_leaves(made, tmp_path, capfd):
  make, now, ended = made
  dog = make()
  now[0] = 101.0
  dog.expire(dog.overdue())
  assert ended == [watchdog.FOR_THE_OTHERS_S, EXCEEDED]
  text = (tmp_path / "logs" / "r.stacks").read_text()
  assert text.startswith("rank 1: no step had been issued for 101 s (limit 100 s)\n") and "test_watchdog.py" in text
  assert capfd.readouterr().err == (
    "maxtext-moe-te: error: rank 1: no step had been issued for 101 s (limit 100 s); needed: a step in time, or a longer limit. Fix: see "
    f"where the ranks wait in {tmp_path}/logs/*.stacks, or, if steps are only slow, launch with a larger --first-step-limit.\n"
  )


def test_a_run_that_ends_leaves_nothing(made, tmp_path):
  make, *_ = made
  make().stop()
  assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("text", ["x", "1 2", "a 2 /x"])
def test_limits_that_launch_did_not_make(monkeypatch, text):
  monkeypatch.setenv(VARIABLE, text)
  with pytest.raises(OptionError, match=f"{VARIABLE}={text}; needed: what launch sets for each of its ranks. Fix: unset"):
    Limits.of_this_process()


def test_limits_of_launch(monkeypatch, tmp_path):
  limits = Limits(3600, 0.5, tmp_path / "a folder" / "x.stacks")
  monkeypatch.setenv(VARIABLE, limits.variable())
  assert Limits.of_this_process() == limits
  monkeypatch.delenv(VARIABLE)
  assert Limits.of_this_process() is None


def test_off_without_limits(tmp_path):
  watchdog.watch(None, 0)
  watchdog.watch(Limits(0, 0, tmp_path / "x.stacks"), 0)
  assert watchdog._current is None
