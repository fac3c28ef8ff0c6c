"""What is wrong in a configuration: a line a fault, with its path and the nearest valid key."""

import difflib
from typing import Any

from pydantic import BaseModel

from mixtron.launch.config_sections import DATA_TAGS, RECOMPUTE_TAGS, TrainingConfig
from mixtron.launch.synthetic.task import Task, tasks
from mixtron.megatron_ext.config import Section
from mixtron.megatron_ext.mixers import mixer_configs


def describe(error: Any, root: type[Section]) -> str:
    """One line for one pydantic error: path, what is wrong, the nearest valid key or values."""
    loc, model = _follow(error["loc"], root)
    path = ".".join(map(str, loc))
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path}: unknown key{nearest(str(loc[-1]), _keys(model))}{_choices(model)}"
    if kind == "missing":
        return f"{path}: required key is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = context["discriminator"].strip("'")
        noun, known = ("mixer", mixer_configs()) if key == "type" else ("task", tasks())
        choices = f"{noun}s: {', '.join(known)}"
        if kind == "union_tag_not_found":
            return f"{path}.{key}: required key is missing; {choices}"
        tag = context["tag"]
        return f"{path}.{key}: no {noun} {tag!r}{nearest(tag, known)}; {choices}"
    if kind == "value_error":
        message = str(context["error"])
        return f"{path}: {message}" if path else message
    return f"{path}: {error['msg'].lower()}, found {error['input']!r}"


def _follow(loc: tuple, root: type[Section]) -> tuple[list, Any]:
    """An error's path as it stands in the file, and the model of the section that it ends in.

    Pydantic puts the tag of a union into the path, which is no key of the file.
    """
    path, model, tags = [], root, {}
    for part in loc:
        if part in tags:
            model, tags = tags[part], {}
        else:
            path.append(part)
            model, tags = _section_under(model, part), _tags_at(path)
    return path, model


def _tags_at(path: list) -> dict[str, Any]:
    """The models that a section may have, by tag."""
    if path == ["data"]:
        return DATA_TAGS
    if path == ["training", "recompute"]:
        return dict.fromkeys(RECOMPUTE_TAGS, TrainingConfig)
    if path[0] == "mixers" and len(path) == 2:
        return mixer_configs()
    return tasks() if path[-1] == "synthetic" else {}


def _section_under(model: Any, key: Any) -> Any:
    """The model of a section's value, or of its entries; the section's own when it has none."""
    if not isinstance(key, str) or key not in model.model_fields:
        return model
    annotation = model.model_fields[key].annotation
    nested = [annotation, *getattr(annotation, "__args__", ())]
    return next((a for a in nested if isinstance(a, type) and issubclass(a, BaseModel)), model)


def _keys(model: Any) -> list[str]:
    """The keys that a section takes, as they stand in a file."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _choices(model: Any) -> str:
    """All parameters, for a task: they are few and in no other list."""
    if not issubclass(model, Task):
        return ""
    parameters = [name for name in model.model_fields if name != "task"]
    return f"; {model.model_fields['task'].default} takes: {', '.join(parameters)}"


def nearest(word: str, choices) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
