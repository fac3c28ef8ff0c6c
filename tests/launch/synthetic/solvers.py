"""Each task solved token by token, from its definition, with nothing of the generators' code.

A solver gets the tokens up to and with the position that asks, and says the answer.
"""

from collections.abc import Callable
from itertools import permutations

from mixtron.launch.synthetic.task import Examples, Task


def mqar(task, seen: list[int]) -> int:
    told = dict(zip(seen[0 : 2 * task.pairs[0] : 2], seen[1 : 2 * task.pairs[0] : 2], strict=True))
    return told[seen[-1]]


def selective_copying(task, seen: list[int]) -> int:
    marker = task.alphabet - 1
    copied = [token for token in seen if token not in (0, marker)]
    return copied[seen.count(marker) - 1]


def palindrome(task, seen: list[int]) -> int:
    middle = seen.index(0)
    return seen[middle - 1 - (len(seen) - 1 - middle)]


def stack(task, seen: list[int]) -> int:
    stacks: dict[int, list[int]] = {}
    for i in range(0, len(seen) - 2, 3):
        operation, name, element = seen[i : i + 3]
        if operation == 1:
            stacks.setdefault(name, []).append(element)
        else:
            assert stacks[name].pop() == element
    assert seen[-2] == 2
    return stacks[seen[-1]][-1]


def flip_flop(task, seen: list[int]) -> int:
    last_write = max(i for i in range(0, len(seen), 2) if seen[i] == 0)
    return seen[last_write + 1]


def word_problem(task, seen: list[int]) -> int:
    elements, multiply = group(task.group)
    product = elements[0]
    for token in seen:
        product = multiply(product, elements[token])
    return elements.index(product)


def mqrar(task, seen: list[int]) -> int:
    given = [seen[i + 1] for i in range(0, len(seen) - 1, 2) if seen[i] == seen[-1]]
    return given[-task.n_back]


def s_niah(task, seen: list[int]) -> int:
    """The key is the question's last but `n` words; the needle holds it before the question."""
    colon, question = vocabulary(":"), vocabulary("What")
    asked_at = len(seen) - 1 - seen[::-1].index(question)
    needle = seen.index(colon)
    assert seen[asked_at + 7] == seen[needle - 2], "the question is about another key"
    answered = len(seen) - 1 - (len(seen) - 1 - seen[::-1].index(vocabulary("is")))
    return seen[needle + 1 + answered]


def vocabulary(word: str) -> int:
    from mixtron.launch.synthetic.tasks.s_niah import IDS

    return IDS[word]


def group(name: str) -> tuple[list, Callable]:
    """Elements in the order of their ids, and the product."""

    def compose(g, h):
        return tuple(h[x] for x in g)

    def alternating(n):
        def swaps(p):
            p, count = list(p), 0
            for i in range(n):
                while p[i] != i:
                    j = p[i]
                    p[i], p[j] = p[j], p[i]
                    count += 1
            return count

        return [p for p in permutations(range(n)) if swaps(p) % 2 == 0]

    if name == "s5":
        return list(permutations(range(5))), compose
    if name == "a5":
        return alternating(5), compose
    if name == "z60":
        return list(range(60)), lambda g, h: (g + h) % 60
    pairs = [(a, z) for a in alternating(4) for z in range(5)]
    return pairs, lambda g, h: (compose(g[0], h[0]), (g[1] + h[1]) % 5)


def solve(task: Task, examples: Examples) -> list[tuple[int, int]]:
    """(answer, label) for every position that asks, sequence by sequence."""
    solver = globals()[task.task]
    pairs = []
    for inputs, labels, mask in zip(
        examples.inputs_NT.tolist(),
        examples.labels_NT.tolist(),
        examples.mask_NT.tolist(),
        strict=True,
    ):
        for t, asked in enumerate(mask):
            if asked:
                pairs.append((solver(task, inputs[: t + 1]), labels[t]))
    return pairs
