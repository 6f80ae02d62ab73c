"""The options: defaults, types, choices, and what a mistake is told."""

import dataclasses

import pytest

from maxtext_moe_te.errors import OptionError
from maxtext_moe_te.settings.config import CHOICES, MoeTeOptions


def test_defaults():
  assert MoeTeOptions().as_dict() == {
    "enabled": True,
    "router": "auto",
    "transport": "auto",
    "experts": "auto",
    "recipe": "bf16",
    "cast_weights": "auto",
    "capacity_factor": "auto",
    "on_overflow": "exact",
    "chunks": "auto",
    "padding": "route",
    "offload": (),
    "metrics": True,
    "load_map": 0,
    "xla_profile": (),
    "selfcheck": "auto",
  }


def test_later_wins_and_the_rest_stays():
  first = MoeTeOptions.from_mapping({"router": "jax", "metrics": False}, "a.yml")
  second = first.replace_from({"router": "auto"}, "the command line")
  assert (second.router, second.metrics) == ("auto", False)
  assert first.router == "jax"


def test_options_are_frozen_and_hashable():
  with pytest.raises(dataclasses.FrozenInstanceError):
    MoeTeOptions().router = "te"
  assert hash(MoeTeOptions()) == hash(MoeTeOptions())


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_accepted(name):
  for value in CHOICES[name]:
    assert getattr(MoeTeOptions.from_mapping({name: value}, "x"), name) == value


@pytest.mark.parametrize(
  ("mapping", "text"),
  [
    (
      {"ruoter": "jax"},
      "unknown option moe_te.ruoter in my.yml; needed: one of enabled, router, transport, experts, recipe, cast_weights, capacity_factor, "
      "on_overflow, chunks, padding, offload, metrics, load_map, xla_profile, selfcheck. Fix: write moe_te.router.",
    ),
    ({"zzz": 1}, "Fix: remove moe_te.zzz."),
    ({"router": "jaxx"}, "moe_te.router=jaxx in my.yml; needed: one of auto, jax, te. Fix: write moe_te.router=jax."),
    (
      {"chunks": 0},
      "moe_te.chunks=0 in my.yml; needed: auto, or a whole number from 1 to 1024. Fix: write moe_te.chunks=1 or, to save memory, ",
    ),
    ({"chunks": "8"}, "moe_te.chunks=8 in my.yml; needed: auto, or a whole number from 1 to 1024."),
    ({"chunks": True}, "moe_te.chunks=True in my.yml; needed: auto, or a whole number"),
    ({"load_map": -1}, "moe_te.load_map=-1 in my.yml; needed: a number of steps, or 0 for no picture. Fix: write moe_te.load_map=0 "),
    ({"load_map": True}, "moe_te.load_map=True in my.yml"),
    ({"load_map": 5, "metrics": False}, "moe_te.load_map=5 with moe_te.metrics=false in my.yml; needed: what the picture shows."),
    ({"experts": True}, "moe_te.experts=True in my.yml; needed: one of auto, reference, ragged_dot, blocked, te."),
    ({"enabled": "yes"}, "needed: true or false. Fix: write moe_te.enabled=true or moe_te.enabled=false."),
    (
      {"offload": "query_proj,value_prj"},
      "moe_te.offload with 'value_prj' in my.yml; needed: names among decoder_layer_input, context, query_proj,",
    ),
    ({"offload": ["value_prj"]}, "Fix: write value_proj."),
    ({"offload": True}, "moe_te.offload with True in my.yml"),
    ({"offload": "zzz"}, "Fix: write for example moe_te.offload=query_proj,value_proj."),
    ({"xla_profile": [1, "published"]}, "names the profile 1; needed: names among "),
    ({"xla_profile": [["published"]]}, "names the profile ['published']; needed: names among "),
    ({"xla_profile": None}, "names the profile None; needed: names among "),
    ({"experts": "TE"}, "Fix: write moe_te.experts=te."),
    ({"metrics": 1}, "moe_te.metrics=1 in my.yml; needed: true or false."),
  ],
)
def test_mistakes(mapping, text):
  with pytest.raises(OptionError) as caught:
    MoeTeOptions.from_mapping(mapping, "my.yml")
  assert text in str(caught.value)


def test_construction_is_checked_too():
  with pytest.raises(OptionError, match=r"moe_te\.router=x in the arguments of MoeTeOptions"):
    MoeTeOptions(router="x")


def test_offload_is_text_with_commas_or_a_list():
  wanted = ("query_proj", "value_proj")
  for value in ("query_proj,value_proj", " query_proj, value_proj,", ["query_proj", "value_proj"], wanted):
    assert MoeTeOptions.from_mapping({"offload": value}, "x").offload == wanted
  assert MoeTeOptions.from_mapping({"offload": ""}, "x").offload == ()
