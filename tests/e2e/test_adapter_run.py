"""A whole run that trains an adapter, with real processes: samplers on adapters, replay, fork, and a question to the model."""

import pytest

from tests.e2e import runs


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_adapter_is_trained_replayed_forked_and_asked(tmp_path, model_dir):
    """Versions are adapters; replay gives each again; a fork goes on; `generate` answers with the merged model, and in the fork
    with the newest version."""
    path = runs.write_run_file(tmp_path, model_dir(), {
        "run": {"steps": 3}, "schedule": {"mode": "pinned"}, "model": {"lora": {"rank": 4, "save_merged": True}}})
    folder = runs.load(path).folder

    def command(*arguments: str) -> str:
        return runs.finish(runs.start(*arguments), 200)

    assert "lost 0, repeated 0" in command("run", str(path), "--plain").splitlines()[-1]
    versions = runs.published(runs.load(path))
    assert set(versions) == {0, 1, 2, 3} and all("lora_" in name for name in versions[3])
    assert "replayed 3 batches, 3 versions equal" in command("replay", str(folder))
    command("fork", f"{folder}@2", "branch")
    branch = folder.parent / "branch"
    assert "lost 0, repeated 0" in command("run", str(branch / "run.toml"), "--plain").splitlines()[-1]
    (branch / "model" / "merged" / "config.json").unlink()
    assert all(len(command("generate", str(place), "3141=", "--n", "2").splitlines()) == 2 for place in (folder, branch))
