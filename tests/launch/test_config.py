"""Loading a config: strictness, overrides, messages, schema."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mixtron.launch.config import RunConfig, json_schema, load_config
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers import mixer_configs
from tests.helpers.jobs import small_config, write_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def path(tmp_path) -> Path:
    return write_config(tmp_path / "job.yaml", small_config(tmp_path, tmp_path / "run"))


def refusal(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.steps=7", 7),
        ("optimizer.lr=3e-4", 3e-4),
        ("parallel.sequence=false", False),
        ("name=other-name_2", "other-name_2"),
        ("model.pattern.0=attention", "attention"),
        ("mixers.kla.heads=1", 1),
        ("data.train.0.weight=0.5", 0.5),
        ("data.validation.speeches.sequences=", None),
        ("slurm.nodes=4", 4),
    ],
)
def test_override_replaces_one_value(path, override, value):
    before, after = load_config(path), load_config(path, [override])
    node = after
    for part in override.split("=")[0].split("."):
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert node == value
    assert type(node) is type(value)
    assert after != before


def test_overrides_apply_in_order(path):
    config = load_config(path, ["training.steps=7", "training.steps=8"])
    assert config.training.steps == 8


def test_override_may_hold_a_whole_list(path):
    config = load_config(path, ["model.pattern=[attention]"])
    assert config.model.layer_mixers == ["attention", "attention"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "override 'training.steps': expected key.path=value"),
        ("=3", "override '=3': expected key.path=value"),
        ("data.train.1.weight=2", "override 'data.train.1.weight=2': '1' is not an index below 1"),
        (
            "training.steps.x=1",
            "override 'training.steps.x=1': training.steps holds a value, not a section",
        ),
    ],
)
def test_override_that_cannot_be_applied(path, override, message):
    assert refusal(path, override) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stpes=4", "training.stpes: unknown key; did you mean 'steps'?"),
        ("mixers.kla.haeds=4", "mixers.kla.haeds: unknown key; did you mean 'heads'?"),
        ("data.train.0.wieght=1", "data.train.0.wieght: unknown key; did you mean 'weight'?"),
        ("slurm.node=1", "slurm.node: unknown key; did you mean 'nodes'?"),
        (
            "training.steps=many",
            "training.steps: input should be a valid integer, found 'many'",
        ),
        ("training.steps=4.0", "training.steps: input should be a valid integer, found 4.0"),
        ("training.steps=0", "training.steps: input should be greater than 0, found 0"),
        # YAML 1.2: a word, not a truth value.
        ("parallel.sequence=yes", "parallel.sequence: input should be a valid boolean, found"),
        (
            "training.precision=fp16",
            "training.precision: input should be 'bf16' or 'fp32', found 'fp16'",
        ),
        (
            "mixers.kla.type=klaa",
            "mixers.kla.type: no mixer 'klaa'; did you mean 'kla'?; mixers: "
            + ", ".join(mixer_configs()),
        ),
        (
            "model.pattern.0=attn",
            "model.pattern: 'attn' is not defined under mixers; did you mean 'attention'?",
        ),
        ("data.split.train=0.9", "data: split: the fractions sum to 1.2"),
        (
            "data.train.0.split=trian",
            "source 0: split 'trian' is not one of data.split (held_out, train)",
        ),
        ("mixers.attention.kv_heads=3", "heads=2 is not a multiple of kv_heads=3"),
        ("mixers.kla.value_heads=3", "value_heads=3 is not a multiple of heads=2"),
        ("schedule.type=wsd", "schedule.type=wsd needs schedule.decay_steps"),
        ("optimizer.lr=.nan", "optimizer.lr: input should be"),
        ("checkpoint.keep=1", "checkpoint.keep: input should be greater than or equal to 2"),
        ("name=a/b", "name: string should match pattern"),
        ("data=", "data: input should be a valid"),
    ],
)
def test_refusal_names_the_path_and_what_would_work(path, override, message):
    found = refusal(path, override)
    assert message in found
    assert "\n" not in found


def test_missing_key(tmp_path):
    raw = small_config(tmp_path, tmp_path / "run")
    del raw["training"]["steps"]
    path = write_config(tmp_path / "job.yaml", raw)
    assert refusal(path) == "training.steps: required key is missing"


def test_mixer_without_a_type(tmp_path):
    raw = small_config(tmp_path, tmp_path / "run")
    del raw["mixers"]["kla"]["type"]
    path = write_config(tmp_path / "job.yaml", raw)
    known = ", ".join(mixer_configs())
    assert refusal(path) == f"mixers.kla.type: required key is missing; mixers: {known}"


def test_every_fault_has_its_line(path):
    found = refusal(path, "training.stpes=4", "optimizer.lr=-1", "model.layers=x")
    assert len(found.splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1, 2", "not valid YAML"),
        (b"- a\n- b\n", "expected a mapping of sections, found list"),
        (b"", "expected a mapping of sections, found NoneType"),
        (b"name: a\nname: b\n", "not valid YAML"),
        (b"name: \xff\xfe\n", "not valid YAML"),
    ],
    ids=["unclosed", "list", "empty", "key twice", "not utf-8"],
)
def test_file_that_is_no_config(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    found = refusal(path)
    assert found.startswith(f"{path}: ")
    assert message in found
    assert "\n" not in found


def test_file_that_is_not_there(tmp_path):
    assert refusal(tmp_path / "x.yaml") == f"{tmp_path / 'x.yaml'}: no such config file"


SCHEMA = json.loads(json_schema())


def test_schema_names_every_mixer_and_forbids_unknown_keys():
    mixers = SCHEMA["properties"]["mixers"]["additionalProperties"]
    assert set(mixers["discriminator"]["mapping"]) == set(mixer_configs())
    for definition in [SCHEMA, *SCHEMA["$defs"].values()]:
        if "properties" in definition:
            assert definition["additionalProperties"] is False


def test_schema_references_are_defined():
    def references(node):
        if isinstance(node, dict):
            yield from [node["$ref"]] if "$ref" in node else []
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(SCHEMA))
    assert found
    assert found <= {f"#/$defs/{name}" for name in SCHEMA["$defs"]}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_schema_accepts_the_configs(path):
    accept(YAML(typ="safe", pure=True).load(path), SCHEMA, path.stem)


@pytest.mark.parametrize(
    ("key", "value"),
    [("steps", "many"), ("stpes", 4), ("precision", "fp16"), ("steps", 0)],
)
def test_schema_refuses_what_loading_refuses(key, value):
    raw = YAML(typ="safe", pure=True).load(CONFIGS[0])
    raw["training"][key] = value
    with pytest.raises(AssertionError):
        accept(raw, SCHEMA, "config")


def accept(value, schema: dict, path: str) -> None:
    """As much of JSON Schema as ours uses."""
    if "$ref" in schema:
        return accept(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], path)
    if "discriminator" in schema:
        union = schema["discriminator"]
        return accept(value, {"$ref": union["mapping"][value[union["propertyName"]]]}, path)
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return accept_any(value, schema[alternatives], path)
    if "const" in schema:
        assert value == schema["const"], path
    if "enum" in schema:
        assert value in schema["enum"], path
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    if "type" in schema:
        assert isinstance(value, types[schema["type"]]), f"{path}: {value!r}"
    if "exclusiveMinimum" in schema:
        assert value > schema["exclusiveMinimum"], path
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = set(schema.get("required", [])) - value.keys()
        assert not missing, f"{path}: {missing}"
        for key, item in value.items():
            rest = schema.get("additionalProperties", True)
            assert key in known or rest is not False, f"{path}.{key}"
            accept(item, known.get(key, rest), f"{path}.{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            accept(item, schema["items"], f"{path}.{i}")
    return None


def accept_any(value, schemas: list[dict], path: str) -> None:
    for schema in schemas:
        try:
            return accept(value, schema, path)
        except AssertionError:
            continue
    raise AssertionError(f"{path}: {value!r} fits none of the alternatives")


def test_schema_describes_every_section():
    assert set(SCHEMA["properties"]) == set(RunConfig.model_fields)
