"""What a resumed run logs takes the place of what it had logged beyond its checkpoint."""

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mixtron.launch.metrics import Metrics


def test_steps_that_are_run_again_are_logged_once(tmp_path):
    """Killed after step 7, resumed after step 5: one run, every step once, the newer values."""
    for first, last, value in ((1, 7, 1.0), (6, 8, 2.0)):
        metrics = Metrics(tmp_path, first_step=first, total_steps=8, tensorboard=True)
        for step in range(first, last + 1):
            metrics.log(step, {"train/loss": value})
        metrics.close()
    expected = [(step, 1.0 if step < 6 else 2.0) for step in range(1, 9)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == expected
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == expected
