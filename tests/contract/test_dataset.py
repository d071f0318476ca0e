"""The dataset environment: the same tasks whatever the format and wherever the files lie; one clear line when they do not."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import open_bucket, s3_server

from slipstream import config
from slipstream.environment import EpisodeReset, Reset, Task, connect, describe
from slipstream.errors import ConfigError

ROWS = [
    {"prompt": "3+4=", "answer": "7", "level": 1}, {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "9*9=", "answer": "81", "level": 2}]


def settings(path: object, **args: object) -> config.Environment:
    return config.Environment(
        name="rows", entry="slipstream.environments.dataset:Dataset", scorer="numeric", args={"path": str(path), **args})


async def resets(environment: config.Environment) -> list[Reset]:
    async with connect(environment) as client:
        items = [EpisodeReset(f"e{i}", Task(i, 0)) for i in range(client.description.tasks)]
        return await client.reset(items)  # type: ignore[return-value]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_saved(folder: Path, rows: list[dict]) -> Path:
    """What datasets.save_to_disk writes: Arrow streams, and a state.json that lists them (caches lie beside, unlisted)."""
    folder.mkdir(parents=True)
    for name, part in (("data-00000-of-00002", rows[:2]), ("data-00001-of-00002", rows[2:]), ("cache-1f", rows)):
        table = pa.Table.from_pylist(part)
        with pa.ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
            stream.write_table(table)
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture(params=["jsonl", "parquet", "folder of parquet shards", "save_to_disk", "splits of save_to_disk"])
def dataset(request, tmp_path):
    """ROWS in one of the formats, as settings."""
    match request.param:
        case "jsonl":
            return settings(write_jsonl(tmp_path / "rows.jsonl", ROWS))
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
            return settings(tmp_path / "rows.parquet")
        case "folder of parquet shards":
            (tmp_path / "data").mkdir()
            for name, rows in (("train-00000", ROWS[:1]), ("train-00001", ROWS[1:]), ("test-00000", ROWS[:1])):
                pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / f"{name}-of-00002.parquet")
            return settings(tmp_path, split="train")
        case "save_to_disk":
            return settings(write_saved(tmp_path / "saved", ROWS))
    write_saved(tmp_path / "saved" / "train", ROWS)
    write_saved(tmp_path / "saved" / "test", ROWS[:2])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return settings(tmp_path / "saved", split="train")


async def test_every_format_gives_the_same_tasks(dataset):
    """Row i is task i, in the order of the files; the other columns are info."""
    assert await resets(dataset) == [
        Reset(r["prompt"], answer=r["answer"], scorer="numeric", info={"level": r["level"]}) for r in ROWS]


async def test_the_same_from_s3(tmp_path):
    """A file and a folder behind s3://, through the object store of the run."""
    with s3_server() as endpoint:
        async with open_bucket(endpoint, "data") as store:
            await store.put("rows.jsonl", write_jsonl(tmp_path / "rows.jsonl", ROWS).read_bytes())
            for path in write_saved(tmp_path / "saved", ROWS).iterdir():
                await store.put(f"saved/{path.name}", path.read_bytes())
            root = store.url
            expected = await resets(settings(tmp_path / "rows.jsonl"))
            assert await resets(settings(f"{root}/rows.jsonl", endpoint=endpoint)) == expected
            assert await resets(settings(f"{root}/saved", endpoint=endpoint)) == expected
            with pytest.raises(ConfigError, match="does not exist; check bucket and key"):
                await describe(settings(f"{root}/lost.jsonl", endpoint=endpoint))


async def test_messages_columns_of_other_names_and_scorers_per_row(tmp_path):
    """Column names are arguments; numbers become text; a row's scorer wins over the environment's, the run file's over both."""
    chat = [{"role": "user", "content": "2+2?"}]
    path = write_jsonl(tmp_path / "c.jsonl", [{"chat": chat, "target": 4, "grader": "exact"}, {"chat": chat, "target": 4.5}])
    environment = settings(path, messages="chat", answer="target", scorer="grader").model_copy(update={"scorer": ""})
    assert await resets(environment) == [
        Reset(messages=chat, answer="4", scorer="exact"), Reset(messages=chat, answer="4.5", scorer="")]
    questions = write_jsonl(tmp_path / "q.jsonl", [{"question": "2+2?", "answer": 4.0}])
    [reset] = await resets(settings(questions, prompt="question", system="Be brief."))
    assert reset.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert reset.answer == "4"


@pytest.mark.parametrize(("content", "args", "message"), [
    ('{"promt": "x", "answer": "y"}', {}, "no column 'prompt' or 'messages'; did you mean 'promt'?"),
    ('{"prompt": "x", "anwser": "y"}', {}, "no column 'answer'; did you mean 'anwser'?"),
    ('{"prompt": "x", "answer": "y"}', {"scorer": "judge"}, "no column 'judge'; known: answer, prompt"),
    ('{"prompt": "x", "answer": "y"}\n{"prompt": 3, "answer": "y"}', {}, "row 1: prompt is a int"),
    ("", {}, "has no rows"),
    ('{"prompt": "x"}\n{oops', {}, "line 2 is not JSON"),
    ("[1, 2]", {}, "line 1 is a list; one object a line is needed")])
async def test_bad_rows_are_one_line_that_names_the_place(tmp_path, content, args, message):
    """At start, not at the thousandth task."""
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ConfigError) as caught:
        await describe(settings(tmp_path / "rows.jsonl", **args))
    assert message in caught.value.message and "\n" not in caught.value.message


async def test_bad_paths_are_one_line_that_names_the_nearest(tmp_path, dataset):
    """A missing file, a folder without data, a Parquet file that is none, several splits and none chosen."""
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"does not exist; did you mean 'train.jsonl'\?"):
        await describe(settings(tmp_path / "tain.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a file nor a folder of .*: it is empty"):
        await describe(settings(tmp_path / "empty"))
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match=r"bad\.parquet cannot be read as parquet"):
        await describe(settings(tmp_path / "bad.parquet"))
    if dataset.args.get("split"):
        with pytest.raises(ConfigError, match=r"has splits test, train: choose one with args\.split"):
            await describe(settings(dataset.args["path"]))
        with pytest.raises(ConfigError, match=r"no such split; did you mean 'train'\?"):
            await describe(settings(dataset.args["path"], split="trian"))


async def test_without_pyarrow_the_package_to_install_is_named(tmp_path, monkeypatch):
    """JSONL needs nothing; the other formats say what they need."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    await describe(settings(write_jsonl(tmp_path / "rows.jsonl", ROWS)))
    (tmp_path / "rows.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[data\]'"):
        await describe(settings(tmp_path / "rows.parquet"))
