"""Long-context tasks after RULER (Hsieh et al. 2024, arXiv 2404.06654), as long as a budget of tokens allows.

Wording and words are our own, and short, so that 128 tokens of a small vocabulary hold every task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

from tokenizers import Tokenizer

FOUR = 4  # values of a key, keys of a question: RULER's numbers
HOPS = 3  # assignments of a chain of variables
COMMON, RARE = 3, 6  # words of a block: each common one once, the others in turn
SLACK = 4  # tokens a completion may spend on what stands around its answers
# Without plurals and without words that stand within others: an answer must stand in a text once
THINGS, COLOURS, ANIMALS, ACTIONS = (
    line.split(",")
    for line in (
        "anchor,apple,arrow,barrel,basket,bell,bottle,bridge,bucket,button,candle,carpet,castle,chain,clock,coat,compass,"
        "copper,cradle,crown,curtain,drum,feather,fence,flute,garden,hammer,harbor,helmet,honey,island,ivory,jacket,"
        "kettle,ladder,lantern,lemon,marble,mirror,needle,orchard,paddle,pepper,piano,pillow,pocket,quilt,ribbon,rocket,"
        "saddle,sailor,shovel,silver,spoon,statue,table,thunder,ticket,tower,valley,violin,wagon,window,winter",
        "amber,beige,black,blue,brown,cherry,coral,cream,crimson,golden,green,grey,indigo,jade,lilac,lime",
        "badger,bear,bee,cat,cow,crow,deer,dog,duck,fox,frog,goat,goose,hare,hen,horse,lamb,mole,mouse,owl",
        "ate early,came home,dug deep,fell down,hid well,lay still,ran away,sat there,slept,went by",
    )
)


@dataclass(frozen=True)
class Example:
    """Prompt token ids, and what a completion must hold, all of it, to count as right."""

    prompt: list[int]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """A text, a question about it, and the answer as it stands in the text."""

    text: str
    question: str
    answer: str


@dataclass(frozen=True)
class Puzzle:
    """What a task asks before it has a length: ``planted`` lines, in order, are strewn among those of ``filler``."""

    opening: str
    planted: list[str]
    filler: Iterator[str]
    question: str
    answers: tuple[str, ...]
    least: int = 0


def examples(
    task: str, tokenizer: Tokenizer, length: int, count: int, seed: int, documents: Sequence[Passage] | None = None
) -> list[Example]:
    """``count`` prompts of ``task`` that, with a first token and ``room`` for the answers, fill ``length`` tokens.

    As near to it as whole lines come; for qa as far as ``documents`` reach. The i-th is a function of (task, seed, i)
    and the documents. ValueError for an unknown task, a length that holds no task, and qa without documents.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r}: there are {', '.join(TASKS)}")
    found = []
    for number in range(count):
        rng = Random(f"{task} {seed} {number}")
        puzzle = TASKS[task](rng, documents)
        budget = length - 1 - room(tokenizer, puzzle.answers)
        text = _fill(puzzle, lambda text: len(_ids(tokenizer, text)), budget, rng)
        if text is None:
            raise ValueError(f"length={length} is too short for {task} with this tokenizer: take twice as many tokens")
        found.append(Example(_ids(tokenizer, text), puzzle.answers))
    return found


def room(tokenizer: Tokenizer, answers: tuple[str, ...]) -> int:
    """Tokens to grant a completion: the answers' own, with ", " between them, and a few more."""
    return len(_ids(tokenizer, " " + ", ".join(answers))) + SLACK


def solved(example: Example, completion: str) -> bool:
    """Whether every answer occurs in the completion."""
    return all(answer in completion for answer in example.answers)


def lesson(task: str, characters: int, seed: int) -> str:
    """A text of at most ``characters`` to learn the task from: prompt and answers. ValueError if too few hold it."""
    rng = Random(f"lesson {task} {seed}")
    puzzle = TASKS[task](rng, None)
    end = f" {', '.join(puzzle.answers)}.\n"
    text = _fill(puzzle, len, characters - len(end), rng)
    if text is None:
        raise ValueError(f"{characters} characters are too few for {task}: take twice as many")
    return text + end


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _fill(puzzle: Puzzle, size: Callable[[str], int], budget: int, rng: Random) -> str | None:
    """The puzzle's text with as much filler as the budget allows; None if that is less than the least."""
    seed, filler = rng.random(), []
    left = budget - size(_text(puzzle, filler, seed))
    for line in puzzle.filler:
        left -= size(f" {line}")
        if left < 0:
            break
        filler.append(line)
    while len(filler) >= puzzle.least:
        text = _text(puzzle, filler, seed)
        if size(text) <= budget:
            return text
        if not filler:
            break
        filler.pop()  # the whole may take more tokens than its lines
    return None


def _text(puzzle: Puzzle, filler: list[str], seed: float) -> str:
    rng, lines = Random(seed), list(filler)
    places = sorted((rng.randint(0, len(filler)) for _ in puzzle.planted), reverse=True)
    for place, line in zip(places, reversed(puzzle.planted), strict=True):
        lines.insert(place, line)
    return f"{puzzle.opening}\n{' '.join(lines)}\n{puzzle.question}"


# Parts ------------------------------------------------------------------------------------------------------------


def _values(rng: Random) -> Iterator[str]:
    """Numbers of four digits, none twice; none can stand within another."""
    drawn: set[int] = set()
    while True:
        if (value := rng.randint(1000, 9999)) not in drawn:
            drawn.add(value)
            yield str(value)


def _keys(rng: Random) -> Iterator[str]:
    """Things, then coloured things, none twice."""
    yield from rng.sample(THINGS, len(THINGS))
    coloured = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    yield from rng.sample(coloured, len(coloured))


def _sentences(rng: Random) -> Iterator[str]:
    while True:
        yield f"The {rng.choice(COLOURS)} {rng.choice(ANIMALS)} {rng.choice(ACTIONS)}."


def _needle(key: str, value: str) -> str:
    return f"The code of {key} is {value}."


# Tasks ------------------------------------------------------------------------------------------------------------


def _single(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    key, value = next(_keys(rng)), next(_values(rng))
    return Puzzle("Note the code.", [_needle(key, value)], _sentences(rng), f"The code of {key} is", (value,))


def _multikey(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    """Every line is a needle, as far as there are keys, and one is asked for."""
    others = map(_needle, keys := _keys(rng), values := _values(rng))
    key, value = next(keys), next(values)
    filler = chain(others, _sentences(rng))
    return Puzzle("Note the codes.", [_needle(key, value)], filler, f"The code of {key} is", (value,), least=1)


def _multivalue(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    key, values = next(_keys(rng)), tuple(islice(_values(rng), FOUR))
    planted = [_needle(key, value) for value in values]
    return Puzzle("Note the codes.", planted, _sentences(rng), f"The {FOUR} codes of {key} are", values)


def _multiquery(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    keys, values = islice(_keys(rng), FOUR), tuple(islice(_values(rng), FOUR))
    keys = list(keys)
    question = f"The codes of {', '.join(keys)} are"
    return Puzzle("Note the codes.", [*map(_needle, keys, values)], _sentences(rng), question, values)


def _variables(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    """Two chains of assignments; the value at the start of one is asked for by the name at its end."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names = [a + b for a, b in rng.sample([(a, b) for a in letters for b in letters], 2 * HOPS)]
    ours, others = names[:HOPS], names[HOPS:]
    value, other = islice(_values(rng), 2)
    steps = [_assignments(ours, value), _assignments(others, other)]
    order = [0] * HOPS + [1] * HOPS
    rng.shuffle(order)
    planted = [steps[which].pop(0) for which in order]
    return Puzzle("Note the values.", planted, _sentences(rng), f"Value of {ours[-1]}:", (value,))


def _assignments(names: list[str], value: str) -> list[str]:
    return [f"Let {name} = {before}." for name, before in zip(names, [value, *names], strict=False)]


def _common_words(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    """Blocks in which each common word stands once and every other word at most once in ten blocks."""
    things = rng.sample(THINGS, len(THINGS))
    common, rare = tuple(things[:COMMON]), things[COMMON:]

    def blocks() -> Iterator[str]:
        turn = 0
        while True:
            block = [*common, *(rare[(turn + i) % len(rare)] for i in range(RARE))]
            rng.shuffle(block)
            turn += RARE
            yield " ".join(block)

    return Puzzle("Words:", [], blocks(), f"The {COMMON} most frequent words:", common, least=2)


def _qa(rng: Random, documents: Sequence[Passage] | None) -> Puzzle:
    if not documents:
        raise ValueError("task qa asks about texts of yours: give documents with text, question and answer")
    chosen = rng.choice(documents)
    if chosen.answer not in chosen.text:
        raise ValueError(f"qa: the answer {chosen.answer!r} does not stand in the text of its question: mend that row")
    others = {document.text for document in documents if chosen.answer not in document.text}
    filler = sorted(others)
    rng.shuffle(filler)
    question = f"Question: {chosen.question}\nAnswer:"
    return Puzzle("Answer from the texts.", [chosen.text], iter(filler), question, (chosen.answer,))


TASKS: dict[str, Callable[[Random, Sequence[Passage] | None], Puzzle]] = {
    "needle": _single,
    "needle_multikey": _multikey,
    "needle_multivalue": _multivalue,
    "needle_multiquery": _multiquery,
    "variables": _variables,
    "common_words": _common_words,
    "qa": _qa,
}
