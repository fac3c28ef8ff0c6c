"""Files that others read while they are written."""

import threading
from pathlib import Path

import pytest

from mixtron.launch.config import dump_config, load_config
from mixtron.launch.slurm.status import total_steps
from mixtron.launch.whole_files import replaced

CONFIG = Path(__file__).parents[2] / "configs" / "kla_400m.yaml"


def test_a_config_written_again_is_whole_at_every_moment(tmp_path):
    """`mixtron status` while a requeued run writes its folder anew."""
    config, path = load_config(CONFIG), tmp_path / "config.yaml"
    dump_config(config, path)
    read, ended = 0, threading.Event()

    def write_often() -> None:
        while not ended.is_set():
            dump_config(config, path)

    writer = threading.Thread(target=write_often)
    writer.start()
    try:
        while writer.is_alive() and read < 3000:
            assert total_steps(tmp_path) == config.training.steps
            read += 1
    finally:
        ended.set()
        writer.join()
    assert read == 3000
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")
    with pytest.raises(OSError, match="full"):
        _write_half(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def _write_half(path):
    with replaced(path) as file:
        file.write_text("hal")
        raise OSError("full")
