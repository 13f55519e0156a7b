"""Starting over removes the run and nothing else."""

import pytest

from fnet import training as tr


def test_clear_removes_the_run_and_no_other_file(tmp_path):
    for name in (
        "metrics.jsonl",
        "config.json",
        "notes.txt",
        "checkpoints/1/manifest.json",
        "tensorboard/events.out.tfevents.1.host",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    tr.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    tr.clear(tmp_path / "not there")


def test_a_folder_in_use_is_not_cleared(tmp_path):
    with tr.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"x": 1})
        with pytest.raises(tr.CheckpointError, match="another run is using this folder"):
            tr.clear(tmp_path)
    assert checkpoints.steps() == [1]
    tr.clear(tmp_path)
    assert not list(tmp_path.iterdir())
