"""`mixtron validate`: what it refuses, and what it says of a config that can run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mixtron.data_prep.tokenizer import train_tokenizer
from mixtron.launch.checks import check, check_device
from mixtron.launch.config import load_config
from mixtron.launch.estimate import parameters
from mixtron.launch.validate import print_report
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.kla.config import Config as KLA
from tests.data_prep.corpora import speeches
from tests.helpers.jobs import ENVIRONMENT, SEQUENCE, VOCABULARY, small_config, write_config

SECONDS = 15
"""A refusal must not cost the import of torch and Megatron-core on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus) -> Path:
    """config.yaml of a job on real shards, and another tokenizer."""
    folder = tmp_path_factory.mktemp("validate")
    write_config(folder / "config.yaml", small_config(corpus, folder / "run"))
    train_tokenizer(speeches()[:3], 500, "bpe", folder / "other.model", progress=False)
    return folder


def validate(folder: Path, *overrides: str, ranks: int | None = None) -> None:
    print_report(folder / "config.yaml", [o.format(folder=folder) for o in overrides], ranks)


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mixtron.launch.cli", "validate", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_report(folder, capsys):
    validate(folder, ranks=4)
    report = capsys.readouterr().out
    for text in (
        "data 2 x tensor 2 (sequence) x pipeline 1 x context 1",
        "128 tokens = 4 sequences of 32; 2 micro-batches of 1 a rank",
        "2 layers: 1 kla, 1 attention",
        f"{VOCABULARY} of 640 rows are in use",
        f"{sum(parameters(load_config(folder / 'config.yaml')).values()):,}",
        "gradients",
        "documents",
        "speeches",
        "epochs",
        "valid for 4 ranks",
    ):
        assert text in report, text


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [([], None, "2 ranks"), (["slurm.nodes=3"], None, "24 ranks"), (["slurm.nodes=3"], 2, "2 r")],
    ids=["one model copy", "slurm", "ranks before slurm"],
)
def test_number_of_ranks(folder, capsys, overrides, ranks, expected):
    batch = f"training.global_batch_tokens={SEQUENCE * 24}"
    validate(folder, batch, *overrides, ranks=ranks)
    assert capsys.readouterr().out.splitlines()[1].strip().startswith(expected)


def test_epochs_follow_from_steps_and_samples(folder, capsys):
    validate(folder, "data.validation={{}}", "data.train.0.split=", "training.steps=1000")
    [row] = [line for line in capsys.readouterr().out.splitlines() if " epochs" in line]
    samples = int(row.split(" samples")[0].split()[-1].replace(",", ""))
    assert f"{1000 * 4 / samples:.3g} epochs" in row


@pytest.mark.parametrize(
    ("override", "ranks", "expected"),
    [
        ("training.stpes=4", None, "training.stpes: unknown key; did you mean 'steps'?"),
        ("training.steps=many", None, "training.steps: input should be a valid integer"),
        ("mixers.kla.type=klaa", None, "mixers.kla.type: no mixer 'klaa'; did you mean 'kla'?"),
        (
            "parallel.tensor=4",
            None,
            "mixers.kla.heads=2 is not divisible by parallel.tensor=4; "
            "values of parallel.tensor that work: 1, 2",
        ),
        (
            "model.ffn_hidden_size=49",
            None,
            "model.ffn_hidden_size=49 is not divisible by parallel.tensor=2; "
            "values of parallel.tensor that work: 1, 7, 49",
        ),
        ("model.vocab_multiple=601", None, "parallel.tensor=2 does not divide the padded"),
        (
            "parallel.context=2",
            None,
            "parallel.context=2: mixers.attention.heads over parallel.tensor=2 leaves 1 heads",
        ),
        ("parallel.tensor=1", None, "parallel.sequence=true needs parallel.tensor above 1"),
        (
            "parallel.pipeline=3",
            None,
            "model.layers=2 is not divisible by parallel.pipeline=3 x virtual_pipeline=1; "
            "products that work: 1, 2",
        ),
        (
            "parallel.virtual_pipeline=2",
            None,
            "parallel.virtual_pipeline=2 needs parallel.pipeline above 1",
        ),
        (
            "name=job",
            3,
            "3 ranks cannot hold parallel.tensor=2 x pipeline=1 x context=1; "
            "use a multiple of 2 ranks",
        ),
        ("name=job", 0, "0 ranks: a run has at least 1"),
        ("slurm.gpus_per_node=5", None, "5 ranks cannot hold parallel.tensor=2"),
        (
            "training.global_batch_tokens=100",
            None,
            "training.global_batch_tokens=100 is not a multiple of data.sequence_length=32; "
            "nearest that work: 96, 128",
        ),
        (
            "training.micro_batch_sequences=3",
            4,
            "training.global_batch_tokens=128 is 4 sequences, not a multiple of 2 data-parallel "
            "ranks x training.micro_batch_sequences=3; nearest that work: 192",
        ),
        ("name=job", 16, "not a multiple of 8 data-parallel ranks"),
        (
            "schedule={{type: wsd, warmup_steps: 5, decay_steps: 8}}",
            None,
            "schedule.warmup_steps=5 + decay_steps=8 exceed training.steps=12",
        ),
        (
            "schedule.decay_steps=5",
            None,
            "schedule.decay_steps=5 is the step at which a cosine schedule ends; "
            "it must lie after schedule.warmup_steps=5",
        ),
        ("data.train.0.path={folder}/nowhere", None, "{folder}/nowhere.bin: no such file"),
        ("data.validation.speeches.path=nowhere", None, "nowhere.bin: no such file"),
        ("data.validation.speeches.sequences=100000", None, "speeches: sequences=100000, but"),
        ("data.sequence_length=2000000", None, "not a multiple of data.sequence_length"),
        ("data.tokenizer={folder}/none.model", None, "{folder}/none.model: no such tokenizer"),
        ("data.tokenizer={folder}/other.model", None, "but data.tokenizer is a sentencepiece one"),
        (
            "model.vocab_size=599",
            None,
            f"model.vocab_size=599 is less than the {VOCABULARY} ids of",
        ),
        ("run_dir={folder}/config.yaml/run", None, "{folder}/config.yaml is not a folder"),
        ("model.ffn_hidden_size=8000000000", None, "two checkpoints need"),
    ],
)
def test_refusal_is_one_line_that_names_the_key_and_what_works(folder, override, ranks, expected):
    with pytest.raises(Exception) as caught:
        validate(folder, override, ranks=ranks)
    message = str(caught.value)
    assert expected.format(folder=folder) in message
    assert "\n" not in message
    assert getattr(caught.value, "exit_code", None) == 2


def test_mixer_without_context_parallelism_is_refused_by_name(folder):
    class NoContext(KLA):
        context_parallel = False

    config = load_config(folder / "config.yaml", ["parallel.context=2"])
    kla = NoContext(heads=2, value_heads=2, key_dim=8, value_dim=8)
    config = config.model_copy(update={"mixers": {**config.mixers, "kla": kla}})
    with pytest.raises(ConfigError) as caught:
        check(config, 4)
    expected = "mixer 'kla' (type 'kla') has no context parallelism; use parallel.context=1"
    assert str(caught.value) == f"parallel.context=2: {expected}"


def test_interleaving_needs_enough_micro_batches(folder):
    overrides = [
        "model.layers=4",
        "parallel={tensor: 1, pipeline: 2, virtual_pipeline: 2}",
        "training.global_batch_tokens=96",
    ]
    config = load_config(folder / "config.yaml", overrides)
    with pytest.raises(ConfigError, match=r"virtual_pipeline=2 needs micro-batches a step \(3\)"):
        check(config, 2)


CASES = {
    "valid": [],
    "unknown key": ["training.stpes=4"],
    "wrong ranks": ["--ranks", "3"],
    "no data": ["data.train.0.path=nowhere"],
    "other tokenizer": ["data.tokenizer={folder}/other.model"],
}


@pytest.mark.parametrize("case", CASES)
def test_command(folder, case):
    arguments = [a.format(folder=folder) for a in CASES[case]]
    started = time.monotonic()
    result = command(str(folder / "config.yaml"), *arguments)
    assert time.monotonic() - started < SECONDS
    if case == "valid":
        assert result.returncode == 0, result.stderr
        assert "valid for 2 ranks" in result.stdout
        assert result.stderr == ""
    else:
        assert result.returncode == 2, result.stderr
        [line] = result.stderr.splitlines()
        assert line.startswith("mixtron: ")
        assert "valid for" not in result.stdout


def test_it_imports_no_torch():
    program = "import mixtron.launch.validate, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(("device_type", "precision"), [("cpu", "bf16"), ("cuda", "fp32")])
@pytest.mark.parametrize(
    ("name", "mixer", "otherwise"),
    [
        ("kla_400m", "kla", "chunk"),
        ("sa_swa_400m", "sa_swa", "tiled"),
        ("sd_125m", "sd", "blockwise"),
        ("path_400m", "path", "block"),
    ],
)
def test_triton_kernels_are_refused_where_they_cannot_run(
    name, mixer, otherwise, device_type, precision
):
    path = Path(__file__).parents[2] / f"configs/{name}.yaml"
    config = load_config(path, [f"mixers.{mixer}.kernel=triton"])
    check_device(config, "cuda")
    training = config.training.model_copy(update={"precision": precision})
    said = (
        f"mixers.{mixer}.kernel=triton runs on a GPU in bf16, not on {device_type} in {precision}; "
        f"set mixers.{mixer}.kernel={otherwise}"
    )
    with pytest.raises(ConfigError, match=said):
        check_device(config.model_copy(update={"training": training}), device_type)


@pytest.mark.parametrize(("name", "mixer"), [("sa_swa_400m", "sa_swa"), ("sd_125m", "sd")])
def test_widths_that_triton_kernels_cannot_take_are_refused(name, mixer):
    path = Path(__file__).parents[2] / f"configs/{name}.yaml"
    overrides = [f"mixers.{mixer}.kernel=triton", f"mixers.{mixer}.head_dim=32"]
    with pytest.raises(ConfigError, match="kernel=triton takes a head_dim of 64 or 128, not 32"):
        load_config(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mixers.path.head_dim=32"], "takes head_dim of 64 or 128, not 32"),
        (["parallel.context=2"], "takes no keys of other context ranks"),
    ],
)
def test_what_path_attention_in_triton_cannot_do_is_refused(overrides, said):
    path = Path(__file__).parents[2] / "configs/path_400m.yaml"
    with pytest.raises(ConfigError, match=said):
        check(load_config(path, ["mixers.path.kernel=triton", *overrides]), 2)
