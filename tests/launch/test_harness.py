"""lm-evaluation-harness on a local task: likelihoods, rolling likelihoods and generation."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_on_ranks

QUESTIONS = [
    {"question": "The people of the", "choices": [" States", " moon"], "answer": 0},
    {"question": "I have the honor", "choices": [" to", " of a very long answer"], "answer": 1},
    {"question": "We", "choices": [" must", " the"], "answer": 0},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def evaluated(run: str, folder: str, tensor: int) -> tuple[dict, list, list, list]:
    """Metrics of the task; likelihoods, rolling ones, and generations."""
    from lm_eval.api.instance import Instance

    from mixtron.launch.inference.harness import HarnessModel, evaluate_tasks
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.source import find_source

    loaded = load(find_source(Path(run), tensor=tensor))
    metrics = evaluate_tasks(loaded, ["local_choice"], folder=Path(folder))
    model = HarnessModel(loaded, batch_tokens=16, sequences=2)

    def ask(kind: str, arguments: list[tuple]) -> list:
        requests = [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]
        return getattr(model, kind)(requests)

    pairs = [(q["question"], choice) for q in QUESTIONS for choice in q["choices"]]
    text = "".join(question for question, _ in pairs) * 2
    options = {"until": ["e"], "max_gen_toks": 8}
    return (
        metrics["local_choice"],
        ask("loglikelihood", pairs),
        ask("loglikelihood_rolling", [(text,)]),
        ask("generate_until", [(question, options) for question, _ in pairs[:3]]),
    )


def by_hand(run: str) -> tuple[list[float], list[bool], list[str]]:
    """Likelihoods from a forward a text, and greedy texts from a forward a token."""
    from mixtron.launch.inference.generate import Request, generate
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.sampling import Sampling
    from mixtron.launch.inference.source import find_source
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.model import forward

    loaded = load(find_source(Path(run)))
    source = loaded.source
    chances, greedy = [], []
    for question in QUESTIONS:
        for choice in question["choices"]:
            whole, given = (
                source.tokenizer.encode_batch([x])[0].tolist()
                for x in (question["question"] + choice, question["question"])
            )
            batch = make_batch([len(whole) - 1], step=0, device="cpu")
            with torch.no_grad():
                logits = forward(
                    *(loaded.chunk, source.config.model, loaded.ranks),
                    *(torch.tensor([whole[:-1]]), batch),
                )[0]
            rows, asked = logits[len(given) - 1 :], torch.tensor(whole[len(given) :])
            chances.append(float(rows.double().log_softmax(-1).gather(1, asked[:, None]).sum()))
            greedy.append(bool((rows.argmax(-1) == asked).all()))
    prompts = [q["question"] for q in QUESTIONS for _ in q["choices"]][:3]
    texts = generate(loaded, Request(prompts, 8, Sampling(0.0)), lambda text: None)
    ends = [t[len(p) :].split("e")[0] for t, p in zip(texts, prompts, strict=True)]
    return chances, greedy, ends


def test_the_harness_sees_the_models_own_numbers(every_mixer_run, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (tmp_path / "local_choice.yaml").write_text(CHOICE.format(data=data))
    run = str(every_mixer_run)
    [(chances, greedy, ends)] = run_on_ranks(1, by_hand, run)
    best = [int(chances[2 * i + 1] > chances[2 * i]) for i in range(3)]
    accuracy = sum(b == q["answer"] for b, q in zip(best, QUESTIONS, strict=True)) / 3
    found = run_on_ranks(2, evaluated, run, str(tmp_path), 2)
    for metrics, pairs, (rolling,), texts in found:
        assert metrics["acc,none"] == pytest.approx(accuracy)
        # fp32 sums in another order: two ranks, texts packed.
        assert [value for value, _ in pairs] == pytest.approx(chances, rel=1e-5)
        assert [flag for _, flag in pairs] == greedy
        assert texts == ends
        assert -1000 < rolling < -50
    assert found[0] == found[1]


def refusal(task: str) -> str:
    from mixtron.launch.inference.harness import evaluate_tasks
    from mixtron.megatron_ext.errors import ConfigError

    try:
        evaluate_tasks(None, [task])  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        return str(error)
    return "evaluated"


def test_an_unknown_task_is_refused():
    [message] = run_on_ranks(1, refusal, "arc_eazy")
    assert message == "--tasks arc_eazy: the harness has no such task; did you mean 'arc_easy'?"
