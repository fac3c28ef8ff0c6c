"""A model of ours for lm-evaluation-harness (the extra `eval`): its tasks, our checkpoints.

Requests are packed: several texts lie in one stream as documents, which do not see each other.
Every tensor-parallel rank runs the whole evaluation and sees the same.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mixtron.launch.inference.decoding import decode
from mixtron.launch.inference.model import Loaded
from mixtron.launch.inference.sampling import Sampling
from mixtron.megatron_ext.batch import EVALUATION_STEP, make_batch
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.model import forward

NEW_TOKENS = 256
"""Of a generation whose task does not say."""
Pair = tuple[list[int], list[int]]
"""Tokens that are given, and those whose likelihood is asked for."""


def evaluate_tasks(
    loaded: Loaded,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    batch_tokens: int = 4096,
    sequences: int = 8,
) -> dict[str, dict[str, Any]]:
    """Metrics of each task, by the harness's names.

    Args:
        folder: of task files of one's own.
        limit: documents of a task.
        batch_tokens: of a stream; a longer text is a stream of its own.
        sequences: generated side by side.

    Raises:
        ConfigError: no such task.
    """
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for task in tasks:
        if not manager.match_tasks([task]):
            close = difflib.get_close_matches(task, manager.all_tasks, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"--tasks {task}: the harness has no such task{hint}")
    found: Any = simple_evaluate(
        model=HarnessModel(loaded, batch_tokens, sequences),
        tasks=list(tasks),
        num_fewshot=fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {name: dict(numbers) for name, numbers in found["results"].items()}


class HarnessModel(TemplateLM):
    def __init__(self, loaded: Loaded, batch_tokens: int = 4096, sequences: int = 8):
        super().__init__()
        self.loaded, self.batch_tokens, self.sequences = loaded, batch_tokens, sequences
        source = loaded.source
        self.text, self.eot = source.tokenizer, source.tokenizer.eod_id
        self.longest = source.longest or source.config.data.sequence_length

    @property
    def eot_token_id(self) -> int:
        return self.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self.text.encode_batch([string])[0].tolist()

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        return self.likelihoods([(context, asked) for _, context, asked in requests])

    def likelihoods(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Log-likelihood of what is asked for, in nats, and whether it is the likeliest text.

        What is given is shortened from its beginning where both are too long for the model.
        """
        streams = [(*context, *asked)[-(self.longest + 1) :] for context, asked in pairs]
        found: dict[int, tuple[float, bool]] = {}
        for numbers in self._packed(streams):
            logits_TV = self._logits([streams[i][:-1] for i in numbers])
            end = 0
            for i in numbers:
                end += len(streams[i]) - 1
                asked = torch.tensor(pairs[i][1][-(len(streams[i]) - 1) :], device=logits_TV.device)
                rows_AV = logits_TV[end - len(asked) : end]
                chance_A = rows_AV.log_softmax(-1).gather(1, asked[:, None])
                likeliest = bool((rows_AV.argmax(-1) == asked).all())
                found[i] = (float(chance_A.double().sum()), likeliest)
        return [found[i] for i in range(len(pairs))]

    def _packed(self, streams: list[tuple[int, ...]]) -> Iterator[list[int]]:
        """Numbers of texts that lie in one stream together, the longest first."""
        taken, tokens = [], 0
        for i in sorted(range(len(streams)), key=lambda i: -len(streams[i])):
            if taken and tokens + len(streams[i]) - 1 > self.batch_tokens:
                yield taken
                taken, tokens = [], 0
            taken.append(i)
            tokens += len(streams[i]) - 1
        if taken:
            yield taken

    @torch.no_grad()
    def _logits(self, documents: list[tuple[int, ...]]) -> torch.Tensor:
        """[T, V] of documents one after another."""
        loaded = self.loaded
        device = loaded.ranks.device
        stream_BT = torch.tensor([[i for ids in documents for i in ids]], device=device)
        batch = make_batch([len(ids) for ids in documents], step=EVALUATION_STEP, device=device)
        return forward(loaded.chunk, loaded.source.config.model, loaded.ranks, stream_BT, batch)[0]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, cut where they are too long, each token from all before it in its cut."""
        found = []
        for request in requests:
            cuts = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot,
                max_seq_len=self.longest,
                context_len=1,
            )
            pairs = [make_disjoint_window(cut) for cut in cuts]
            found.append(sum(value for value, _ in self.likelihoods(pairs)))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        found: list[str] = []
        for first in range(0, len(requests), self.sequences):
            group = [request.args for request in requests[first : first + self.sequences]]
            options = [arguments[1] for arguments in group]
            if any(option != options[0] for option in options):
                found += [text for arguments in group for text in self._generate([arguments])]
            else:
                found += self._generate(group)
        return found

    def _generate(self, group: Sequence[tuple[str, dict]]) -> list[str]:
        """Continuations up to a text of `until`, or an end of document."""
        options = group[0][1]
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        tokens = min(options.get("max_gen_toks", NEW_TOKENS), self.longest - 1)
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        sampling = Sampling(temperature, options.get("top_k"), options.get("top_p", 1.0))
        room = self.longest - tokens
        prompts = [(self.tok_encode(text) or [self.eot])[-room:] for text, _ in group]
        ids: list[list[int]] = [[] for _ in group]
        texts, ended = [""] * len(group), [False] * len(group)
        for step in decode(self.loaded, prompts, tokens, sampling):
            for i, token in enumerate(step):
                if ended[i] or token is None:
                    ended[i] = True
                    continue
                ids[i].append(token)
                texts[i] = self._after(prompts[i], ids[i])
                cut = [texts[i].index(stop) for stop in stops if stop and stop in texts[i]]
                if cut:
                    texts[i], ended[i] = texts[i][: min(cut)], True
            if all(ended):
                break
        return texts

    def _after(self, prompt: list[int], added: list[int]) -> str:
        """The text of what was added, with the space that may stand before it."""
        return self.text.decode(prompt + added)[len(self.text.decode(prompt)) :]
