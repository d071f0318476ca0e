"""The command line: what it loads, what it prints, and that every mistake of a user is one line with the remedy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.config import load

pytestmark = pytest.mark.slow

RUN = """
run = { name = "cli", folder = "@/run" }
model.build = { model_type = "qwen3_moe" }
[[environments]]
name = "sort"
entry = "slipstream.environments.sort_digits:SortDigits"
"""


def slipstream(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Standard output, or with a code other than 0, standard error."""
    done = subprocess.run([sys.executable, "-c", "from slipstream.cli import main; main()", *arguments], cwd=cwd, text=True,
                          capture_output=True, timeout=30, env=os.environ | {"COLUMNS": "100"}, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def one_line(text: str) -> str:
    """The line, without a traceback around it."""
    assert len(text.strip().splitlines()) == 1 and text.startswith("slipstream: "), text
    return text


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("@", str(tmp_path)))
    return path


def test_help_is_light(tmp_path: Path) -> None:
    """`slipstream --help` loads neither torch nor transformers, nor grpc, pydantic or numpy, and takes about half a second."""
    code = """if True:
        import sys, time
        started = time.perf_counter()
        sys.argv = ["slipstream", "--help"]
        from slipstream.cli import main
        try:
            main()
        except SystemExit as end:
            assert end.code == 0
        heavy = {"torch", "transformers", "vllm", "grpc", "pydantic", "numpy", "uvloop", "redis"} & sys.modules.keys()
        assert not heavy, heavy
        print(f"{time.perf_counter() - started:.3f} s", file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    print("slipstream --help:", done.stderr.strip())
    assert "run" in done.stdout and "generate" in done.stdout
    assert float(done.stderr.split()[0]) < 2.0


def test_the_supervisor_loads_no_model_code() -> None:
    """The process that supervises a run for days imports neither torch nor transformers, nor any service."""
    code = ("import sys; import slipstream.cli.run, slipstream.cli.existing_run; "
            "print({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'services', 'vllm'} or 'light')")
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "light"


def test_dry_run_prints_a_run_file(run_file: Path, tmp_path: Path) -> None:
    """--dry-run resolves defaults and --set into TOML that loads to the same settings."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    run_file.write_text(run_file.read_text().replace('build = { model_type = "qwen3_moe" }', 'path = "model"'))
    text = slipstream(
        "run", str(run_file), "--set", "schedule.max_lag=1", "--set", "run.target_reward=0.8", "--dry-run", cwd=tmp_path)
    assert tomllib.loads(text)["schedule"]["max_lag"] == 1
    (tmp_path / "resolved.toml").write_text(text)
    assert load(tmp_path / "resolved.toml") == load(run_file, ["schedule.max_lag=1", "run.target_reward=0.8"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_dry_run_says_everything_that_cannot_work(run_file: Path, tmp_path: Path) -> None:
    """Not the first problem but all: a scorer that is none, a Redis that is away, a model that is built and cannot run."""
    model = 'build = { model_type = "qwen3_moe", tokenizer_chars = "01", config = { num_experts = 2, num_hidden_layers = 1, ' \
        'hidden_size = 32, head_dim = 16, num_experts_per_tok = 3 } }'
    run_file.write_text(
        run_file.read_text().replace('build = { model_type = "qwen3_moe" }', model) + 'scorer = "exakt"\n')
    said = slipstream(
        "run", str(run_file), "--dry-run", "--set", "buffer.redis=redis://127.0.0.1:1", cwd=tmp_path, code=2).splitlines()
    assert len(said) == 3 and all(line.startswith("slipstream: ") for line in said), said
    assert "buffer.redis = redis://127.0.0.1:1 does not answer" in said[0]
    assert "environments.sort.scorer = 'exakt' is not a scorer" in said[1]
    assert "model.build.config: the model can be built, but a forward pass fails (RuntimeError: selected index k" in said[2]


def test_config_commands(tmp_path: Path) -> None:
    """The schema is JSON Schema, the reference names every setting."""
    assert '"$defs"' in slipstream("config", "schema", cwd=tmp_path)
    assert "| `schedule.max_lag` | `2` |" in slipstream("config", "reference", cwd=tmp_path)


def test_wrong_key(run_file: Path, tmp_path: Path) -> None:
    """An unknown key is answered with the nearest known one; two mistakes are two lines."""
    overrides = "--set", "schedule.maxlag=1", "--set", "trainer.learning_rat=1"
    said = slipstream("run", str(run_file), *overrides, cwd=tmp_path, code=2).splitlines()
    assert len(said) == 2 and all(line.startswith("slipstream: ") for line in said), said
    assert "unknown key schedule.maxlag" in said[0] and "did you mean 'max_lag'?" in said[0]
    assert "unknown key trainer.learning_rat" in said[1]


def test_usage_errors(tmp_path: Path) -> None:
    """A wrong option, a missing argument: one line that names the help."""
    said = one_line(slipstream("run", "--fast", "run.toml", cwd=tmp_path, code=2))
    assert "--fast" in said and "slipstream run --help" in said
    assert "RUN.toml" in one_line(slipstream("run", cwd=tmp_path, code=2))
    assert slipstream(cwd=tmp_path, code=2) == ""  # the help is on standard output


def test_missing_files(run_file: Path, tmp_path: Path) -> None:
    """A run file, a run and a model directory that are not there."""
    assert "nowhere.toml does not exist" in one_line(slipstream("run", "nowhere.toml", cwd=tmp_path, code=2))
    assert "no run 'ghost'" in one_line(slipstream("status", "ghost", cwd=tmp_path, code=2))
    assert "has not been started" in one_line(slipstream("watch", str(run_file), cwd=tmp_path, code=2))
    said = one_line(slipstream("run", str(run_file), "--set", "model={path='no-model'}", cwd=tmp_path, code=2))
    assert "model.path = no-model" in said and "is not a directory" in said
    (tmp_path / "empty-model").mkdir()
    said = one_line(slipstream("run", str(run_file), "--set", "model={path='empty-model'}", cwd=tmp_path, code=2))
    assert "holds no config.json" in said


def test_unwritable_run_folder(run_file: Path, tmp_path: Path) -> None:
    """A run folder below a file cannot be made."""
    (tmp_path / "file").touch()
    said = one_line(slipstream("run", str(run_file), "--set", f"run.folder={tmp_path}/file/run", cwd=tmp_path, code=2))
    assert "cannot be written (Not a directory)" in said and "set run.folder" in said


def test_a_folder_of_something_else_is_left_alone(run_file: Path, tmp_path: Path) -> None:
    """Files that are not of a run are never mixed with one, nor deleted by --fresh."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    assert "not of a run" in one_line(slipstream("run", str(run_file), "--fresh", cwd=tmp_path, code=2))
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_environment_that_is_down(run_file: Path, tmp_path: Path) -> None:
    """An address where nothing listens is found before anything starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    setting = f"environments=[{{name='mine', address='{address}'}}]"
    said = one_line(slipstream("run", str(run_file), "--set", setting, cwd=tmp_path, code=2))
    assert f"environments.mine.address = {address}" in said and "slipstream env serve" in said
    assert address in one_line(slipstream("env", "check", address, cwd=tmp_path, code=2))


def test_code_that_cannot_be_imported(run_file: Path, tmp_path: Path) -> None:
    """An environment's class or a scorer that is not there, or that raises at import."""
    (tmp_path / "mine.py").write_text("def score(answer, task): return 1.0\nnumber = 3\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')\n")
    for setting, expected in (
        ("environments.0.entry='mine:Sort'", "mine has no 'Sort'"),
        ("environments.0.entry='nowhere:Sort'", "no module 'nowhere'"),
        ("environments.0.entry='broken:Sort'", "importing broken raised RuntimeError: no licence"),
        ("environments.0.scorer='mine:scor'", "did you mean 'score'?"),
        ("environments.0.scorer='mine:number'", "is not callable"),
        ("environments.0.scorer='exakt'", "known: exact, numeric, regex"),
    ):
        assert expected in one_line(slipstream("run", str(run_file), "--set", setting, cwd=tmp_path, code=2)), setting


def test_port_in_use(run_file: Path, tmp_path: Path) -> None:
    """A fixed port that somebody has."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = one_line(slipstream("run", str(run_file), "--set", f"service.buffer_port={port}", cwd=tmp_path, code=2))
    assert f"service.buffer_port: port {port} on 127.0.0.1 cannot be bound (Address already in use)" in said


def test_redis_that_is_down(run_file: Path, tmp_path: Path) -> None:
    """A Redis of one's own that does not answer."""
    said = one_line(slipstream("run", str(run_file), "--set", "buffer.redis=redis://127.0.0.1:1/0", cwd=tmp_path, code=2))
    assert "buffer.redis = redis://127.0.0.1:1/0 does not answer" in said


def test_debug_shows_the_traceback(run_file: Path, tmp_path: Path) -> None:
    """--debug adds the traceback to the same line."""
    said = slipstream("run", str(run_file), "--set", "run.step=1", "--debug", cwd=tmp_path, code=2)
    assert "Traceback" in said and "did you mean 'steps'?" in said


def test_generate_without_a_model(run_file: Path, tmp_path: Path) -> None:
    """Asking a run that has published nothing yet."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(load(run_file).model_dump_json())
    assert "has no model yet" in one_line(slipstream("generate", str(tmp_path / "run"), "31=", cwd=tmp_path, code=2))
