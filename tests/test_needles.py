"""Long-context tasks: answers stand where they should, the budget is kept, and only a model that reads can score."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gatedlm.data import tokenizer as own
from gatedlm.data.corpora import documents, signature
from gatedlm.data.needles import TASKS, Example, Passage, examples, lesson, room, solved
from gatedlm.recipe import DataSpec

PROSE = ["The code of a table is its name. A brown fox ran away and 1234 words came home. "] * 5
PASSAGES = [
    Passage(f"The {animal} lives in {town} and likes it.", f"Where does the {animal} live?", town)
    for animal, town in [("fox", "Oslo"), ("cat", "Lima"), ("owl", "Bern"), ("bee", "Rome"), ("crow", "Kiel")]
]
ONCE = [task for task in TASKS if task != "common_words"]


def unigram() -> Tokenizer:
    """Pieces with a mark for the space before a word, the other large family beside byte-level BPE."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    alphabet = ["\n", *map(chr, range(33, 127))]
    trainer = trainers.UnigramTrainer(vocab_size=140, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*PROSE, "".join(alphabet)], trainer)
    return tokenizer


TOKENIZERS = {
    "bytes": own.train(PROSE, 257),
    "bpe": own.train([*PROSE, *map(str, own.ASCII)], 420),
    "pieces": unigram(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_budget_and_hold_each_answer_once(task: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for length in (480, 3000):
        for example in examples(task, tokenizer, length, 4, seed=5, documents=PASSAGES):
            text = tokenizer.decode(example.prompt)
            used = len(example.prompt) + room(tokenizer, example.answers) + 1
            assert used <= length, "the first token and the answers have their place"
            assert task == "qa" or used > length - 100, "filled up to less than a line"
            counts = [text.count(answer) for answer in example.answers]
            assert counts == [1] * len(counts) if task in ONCE else min(counts) > 1


def test_a_small_vocabulary_holds_every_task_in_128_tokens() -> None:
    tokenizer = own.train([lesson(task, 1500, seed) for task in TASKS if task != "qa" for seed in range(9)], 700)
    for task in TASKS:
        for example in examples(task, tokenizer, 128, 9, seed=0, documents=PASSAGES):
            assert 0 < len(example.prompt) < 128


def test_common_words_are_more_frequent_than_all_others() -> None:
    for example in examples("common_words", TOKENIZERS["bytes"], 4000, 3, seed=0):
        words = TOKENIZERS["bytes"].decode(example.prompt).split("\n")[1].split()
        counts = Counter(words)
        first, *_, third, fourth = counts.most_common(4)
        assert {word for word, _ in counts.most_common(3)} == set(example.answers)
        assert first[1] == third[1] > 5 * fourth[1]


def test_a_chain_of_variables_leads_to_its_value() -> None:
    for example in examples("variables", TOKENIZERS["bytes"], 900, 5, seed=1):
        text = TOKENIZERS["bytes"].decode(example.prompt)
        values = {}
        for line in text.split("."):
            if "Let" in line:
                name, value = line.split("Let ")[1].split(" = ")
                values[name] = values.get(value, value)
        assert len(values) == 6
        assert (values[text.split("Value of ")[1].rstrip(":")],) == example.answers


def test_the_seed_alone_decides() -> None:
    draw = [examples("needle", TOKENIZERS["bpe"], 300, 6, seed) for seed in (3, 3, 4)]
    assert draw[0] == draw[1]
    assert draw[0][:2] == examples("needle", TOKENIZERS["bpe"], 300, 2, 3), "more examples leave the first as they are"
    assert not {e.answers for e in draw[0]} & {e.answers for e in draw[2]}
    places = [TOKENIZERS["bpe"].decode(e.prompt).index(f"is {e.answers[0]}") for e in draw[0]]
    assert len(set(places)) > 3, "needles lie at all depths"


@pytest.mark.parametrize("task", TASKS)
def test_a_cheating_model_scores_100_and_a_blind_one_0(task: str) -> None:
    drawn = examples(task, TOKENIZERS["bytes"], 700, 20, seed=0, documents=PASSAGES)

    def score(model) -> float:
        return 100 * sum(solved(example, model(example)) for example in drawn) / len(drawn)

    def blind(example: Example) -> str:
        """Repeats the question, which is all it sees."""
        return TOKENIZERS["bytes"].decode(example.prompt).rsplit("\n", 1)[1] + " 1234, 5678"

    assert score(lambda example: " " + ", ".join(example.answers)) == 100
    assert score(blind) == 0
    some = [example for example in drawn if len(example.answers) > 1]
    assert not any(solved(example, example.answers[0]) for example in some), "one of several answers is not enough"


def test_128k_tokens_are_a_matter_of_a_second() -> None:
    (example,) = examples("needle_multikey", TOKENIZERS["bytes"], 131_072, 1, seed=0)
    assert 131_072 - 100 < len(example.prompt) + room(TOKENIZERS["bytes"], example.answers) < 131_072
    assert TOKENIZERS["bytes"].decode(example.prompt).count(example.answers[0]) == 1


def test_lessons_end_with_their_answers() -> None:
    text = lesson("needle", 400, seed=1)
    assert 300 < len(text) <= 400
    value = text.rstrip(".\n").rsplit(" ", 1)[1]
    assert value.isdecimal() and text.count(value) == 2
    assert lesson("needle", 400, 1) == text != lesson("needle", 400, 2)
    with pytest.raises(ValueError, match="40 characters are too few for variables"):
        lesson("variables", 40, 0)


@pytest.mark.parametrize(
    ("task", "length", "documents", "says"),
    [
        ("needles", 500, None, "there are needle,"),
        ("needle", 40, None, "length=40 is too short for needle"),
        ("common_words", 100, None, "length=100 is too short"),
        ("qa", 500, None, "give documents"),
        ("qa", 500, [Passage("The fox is here.", "Where?", "there")], "does not stand in the text"),
    ],
)
def test_what_cannot_be_asked_is_said(task: str, length: int, documents: list[Passage] | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        examples(task, TOKENIZERS["bytes"], length, 1, 0, documents)


def test_the_corpus_of_lessons_is_half_text() -> None:
    read = [*islice(documents(DataSpec(corpus="needles")), 100)]
    again = [*islice(documents(DataSpec(corpus="needles")), 100)]
    assert read == again
    begun = max(place for place, document in enumerate(read) if document.domain != "needles")
    taught = [document.text for document in read[:begun] if document.domain == "needles"]
    texts = [document.text for document in read[:begun] if document.domain != "needles"]
    assert 1 <= sum(map(len, taught)) / sum(map(len, texts)) < 1.5
    assert texts == [document.text for document in islice(documents(DataSpec(corpus="stdlib")), len(texts))]
    assert len({*taught}) == len(taught) and max(map(len, taught)) <= 1600
    assert signature(DataSpec(corpus="needles")) != signature(DataSpec(corpus="stdlib"))
