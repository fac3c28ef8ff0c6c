"""Opens whatever a person points at."""

from pathlib import Path

from mixtron.launch.spectral.huggingface import open_huggingface
from mixtron.launch.spectral.runs import is_run, open_run
from mixtron.launch.spectral.weights import Model, SpectralError


def open_model(path: Path) -> Model:
    """A run folder, one of its checkpoints, or a Hugging Face folder with safetensors.

    Raises:
        SpectralError: none of these.
    """
    if not path.is_dir():
        raise SpectralError(f"{path}: no such folder; give a run, a checkpoint or a model's folder")
    if is_run(path):
        return open_run(path)
    if (path / "config.json").exists():
        return open_huggingface(path)
    raise SpectralError(
        f"{path}: neither a run (checkpoints/), a checkpoint (manifest.json) nor a Hugging Face "
        "folder (config.json)"
    )
