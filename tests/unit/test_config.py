"""The run file: bad input is one sentence with field, value and remedy; good input resolves to one frozen object."""

import json
from pathlib import Path

import jsonschema
import pytest

from slipstream.config import RunFile, json_schema, load, parse, settings
from slipstream.config_sections import Rollout
from slipstream.errors import ConfigError

MINIMAL = {"run": {"name": "a"}, "model": {"path": "m"}, "environments": [{"name": "e", "entry": "m:C"}]}


def test_minimal_file_resolves_with_defaults():
    """Three tables suffice; lag, batch and clip come from the one place where defaults live."""
    run = parse(MINIMAL)
    assert (run.schedule.max_lag, run.schedule.groups_per_batch, run.algorithm.clip_high) == (2, 64, 0.28)
    assert run.objects_url == f"file://{Path('runs/a').resolve()}/objects"
    assert not run.deterministic


def ranks(count, minibatches=1, packing="rows", **mesh):
    """A trainer of so many ranks."""
    return {"trainer": {"minibatches": minibatches, "packing": packing, "parallel": {"ranks": count, **mesh}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainer": {"learning_rat": 1}}, ["trainer.learning_rat", "did you mean 'learning_rate'"]),
        ({"trainr": {}}, ["trainr", "did you mean 'trainer'"]),
        ({"schedule": {"max_lag": "two"}}, ["schedule.max_lag", "'two'", "It is: Bound on steps"]),
        ({"schedule": 3}, ["schedule = 3", "should be a table"]),
        ({"model": {}}, ["model.path", "model.build"]),
        ({"trainer": {"publish_every": 4}}, ["trainer.publish_every = 4", "schedule.max_lag + 1 = 3"]),
        ({"rollout": {"temperature": 0.7}}, ["rollout.temperature = 0.7"]),
        ({"run": {"name": "a", "placement": "shared"}, "rollout": {"workers": 0}}, ["rollout.workers = 0", "shared", "split"]),
        ({"run": {"name": "a", "placement": "shared"}, "service": {"buffer_address": "0.0.0.0:5"}}, ["0.0.0.0:5", "shared"]),
        ({"run": {"name": "a", "placement": "shared"},
          "rollout": {"engine": "vllm", "vllm": {"data_parallel": 4, "data_parallel_local": 2}}}, ["2 nodes", "shared"]),
        ({"run": {"name": "a", "placement": "shared"},
          "trainer": {"parallel": {"ranks": 2, "experts": 2, "exchange": "deep_ep"}}}, ["exchange = deep_ep", "shared"]),
        ({"schedule": {"max_lag": 0, "group_timeout_s": 5}}, ["group_timeout_s", "pinned"]),
        ({"schedule": {"mode": "pinned", "sample_timeout_s": 5}}, ["schedule.sample_timeout_s = 5", "pinned", "remove"]),
        ({"schedule": {"mode": "pinned", "max_requeues": 1}}, ["schedule.max_requeues = 1", "pinned"]),
        ({"schedule": {"mode": "pinned", "resample_no_signal": 1}}, ["schedule.resample_no_signal = 1", "pinned"]),
        ({"model": {"path": "m", "dtype": "bfloat16", "lora": {}}, "rollout": {"engine": "vllm"}},
         ["model.lora", "bfloat16", "rollout.vllm.adapters = merged", "torch"]),
        ({"model": {"path": "m", "lora": {}}, "rollout": {"engine": "vllm", "vllm": {"adapters": "slots"}}},
         ["model.lora.targets", "slots", "experts", "merged"]),
        ({"rollout": {"speculation": {"method": "ngram"}}},
         ["rollout.speculation.method = ngram", "rollout.engine = torch", "set rollout.engine = vllm"]),
        ({"rollout": {"engine": "vllm", "speculation": {"method": "ngram"}}, "schedule": {"max_lag": 0}},
         ["rollout.speculation.method = ngram", "schedule.deterministic", "method = off"]),
        ({"rollout": {"engine": "vllm", "speculation": {"method": "ngram"}, "vllm": {
            "sampling": {"min_p": 0.1}, "biased_sampling": ["min_p"]}}}, ["rollout.vllm.sampling.min_p = 0.1", "remove one"]),
        ({"rollout": {"speculation": {"prompt_lookup_min": 5}}}, ["prompt_lookup_min = 5", "prompt_lookup_max = 4", "lower"]),
        ({"model": {"path": "m", "build": {"model_type": "olmoe"}}}, ["path = 'm'", "model.build", "remove one"]),
        ({"schedule": {"sample_timeout_s": 9, "group_timeout_s": 5}}, ["sample_timeout_s = 9", "group_timeout_s = 5"]),
        ({"buffer": {"quota_bytes": 1000}}, ["buffer.quota_bytes = 1000", "raise it"]),
        ({"rollout": {"lease_s": 5}}, ["rollout.heartbeat_s = 15", "rollout.lease_s = 5"]),
        ({"schedule": {"group_size": 1}}, ["schedule.group_size = 1", "at least 2"]),
        ({"environments": []}, ["environments"]),
        ({"environments": [{"name": "e", "entry": "m:C"}, {"name": "e", "entry": "m:C"}]}, ["'e'", "twice"]),
        ({"run": {"name": "Bad Name"}},
         ["run.name", "'Bad Name': it may not be that. It is", "lower-case letters, digits, dots and hyphens"]),
        ({"run": {"name": 42}}, ["run.name = 42", "--set run.name='\"42\"'"]),
        ({"trainer": {"betas": [0.9]}}, ["trainer.betas = [0.9]", "too few values"]),
        ({"trainer": {"betas": [0.9, float("inf")]}}, ["trainer.betas.1 = inf", "finite"]),
        ({"trainer": {"learning_rate": float("inf")}}, ["trainer.learning_rate = inf", "finite number"]),
        ({"trainer": {"learning_rate": float("nan")}}, ["trainer.learning_rate = nan", "finite number"]),
        (ranks(2, context=2, packing="packed"),
         ["parallel.ranks = 2 and", "parallel.context = 2", "trainer.packing = packed", "packing = rows, or context = 1"]),
        (ranks(2, context=2, minibatches=2) | {"algorithm": {"route_replay": "trainer"}},
         ["parallel.ranks = 2 and", "parallel.context = 2", "algorithm.route_replay = trainer", "route_replay = auto"]),
        (ranks(2) | {"schedule": {"mode": "pinned"}},
         ["parallel.ranks = 2 with schedule.mode = pinned", "schedule.deterministic = true", "set ranks = 1, or"]),
        (ranks(2) | {"schedule": {"deterministic": True}},
         ["parallel.ranks = 2 with schedule.deterministic = true", "set ranks = 1, or"]),
        (ranks(2, tensor=2) | {"model": {"path": "m", "lora": {"targets": ["attention"]}}},
         ["parallel.ranks = 2 and", "parallel.tensor = 2", "model.lora", "set tensor = 1"]),
        (ranks(2) | {"model": {"path": "m", "lora": {"save_merged": True}}},
         ["parallel.ranks = 2 with", "model.lora.save_merged = true", "set it to false"]),
        (ranks(2, experts=2) | {"model": {"path": "m", "lora": {}}},
         ["parallel.experts = 2", "experts in model.lora.targets", 'targets = ["attention"], or experts = 1']),
    ],
)
def test_bad_settings_name_field_value_and_remedy(change, words):
    """Each message tells what to change without opening the source."""
    with pytest.raises(ConfigError) as caught:
        parse({**MINIMAL, **change})
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message


def test_overrides_are_toml_or_bare_strings(tmp_path):
    """`--set` takes numbers, booleans and bare words, reaches into lists, and creates tables."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(MINIMAL))
    run = load(path, ["schedule.max_lag=0", "model.path=/other", "environments.0.weight=2.5", "rollout.capture_routes=true",
                      "run.target_reward=0.5", "run.target_reward=null"])
    assert run.run.target_reward is None
    assert (run.schedule.max_lag, run.model.path, run.environments[0].weight, run.rollout.capture_routes) == (
        0,
        "/other",
        2.5,
        True,
    )
    assert run.deterministic, "max_lag = 0 implies the pinned schedule, and that determinism"
    for bad in ("nonsense", "environments.7.name=x", "model.path.deeper=1"):
        with pytest.raises(ConfigError):
            load(path, [bad])


def test_missing_and_broken_files_are_one_line(tmp_path):
    """No traceback for a typo in a path or a quote."""
    with pytest.raises(ConfigError, match=r"does not exist; examples/"):
        load(tmp_path / "nope.toml")
    (tmp_path / "broken.toml").write_text("a = ")
    (tmp_path / "README.md").write_text("# A run\nRead me.\n")
    for name in ("broken.toml", "README.md"):
        with pytest.raises(ConfigError, match="not valid TOML"):
            load(tmp_path / name)


def test_hash_follows_what_workers_must_agree_on():
    """Another folder or worker count is the same run, and so is one that trains longer; another learning rate is not."""
    base = parse(MINIMAL).hash
    assert parse({**MINIMAL, "run": {"name": "a", "steps": 7, "target_reward": 0.5}}).hash == base
    assert parse({**MINIMAL, "run": {"name": "a", "folder": "/x"}, "rollout": {"workers": 9}}).hash == base
    assert parse({**MINIMAL, "trainer": {"parallel": {"ranks": 2}}}).hash == base  # the same run on other devices
    assert parse({**MINIMAL, "trainer": {"learning_rate": 1e-5}}).hash != base


def test_hash_is_the_same_in_a_release_that_knows_more_settings():
    """What nobody set counts for nothing, whether it is written down with its default or not even known; what is set counts."""
    class LaterRollout(Rollout):
        added: int = 1

    class Later(RunFile):
        rollout: LaterRollout = LaterRollout()
        table: LaterRollout | None = None

    given = {**MINIMAL, "rollout": {"slots": 7}}
    run = parse(given)
    assert Later.model_validate(given).hash == parse(run.model_dump(mode="json")).hash == run.hash
    assert Later.model_validate({**MINIMAL, "rollout": {"slots": 7, "added": 2}}).hash != run.hash


def test_schema_accepts_what_the_models_accept():
    """The exported JSON Schema is a usable one, and every setting has its sentence."""
    jsonschema.validate(MINIMAL, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**MINIMAL, "trainr": {}}, json_schema())
    assert all(sentence for _, _, sentence in settings())
