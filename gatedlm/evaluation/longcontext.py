"""Long context: tasks of any length in tokens, and the loss position by position, beyond the trained length too."""

from __future__ import annotations

from collections.abc import Sequence

from gatedlm.data.needles import Passage, examples, room, solved
from gatedlm.evaluation.reader import Reader, Row
from gatedlm.evaluation.score import Advance, Outcome, Score, ratio
from gatedlm.evaluation.text import Text


def needles(
    reader: Reader,
    task: str,
    lengths: Sequence[int],
    count: int,
    seed: int,
    passages: Sequence[Passage] | None,
    advance: Advance,
) -> Outcome:
    """acc at each length: in how many of ``count`` prompts the greedy completion holds every answer.

    A length counts the first token, the prompt and the completion; a model reads all of it, whatever its context.
    """
    scores, told = [], {}
    for length in lengths:
        asked = examples(task, reader.tokenizer, length, count, seed, passages)
        tokens = max(room(reader.tokenizer, one.answers) for one in asked)
        written = reader.write([[*reader.opening, *one.prompt] for one in asked], tokens, advance)
        right = [float(solved(one, text)) for one, text in zip(asked, written, strict=True)]
        scores.append(ratio(str(length), "acc", right))
        told[length] = [[*one.answers, text] for one, text in zip(asked, written, strict=True)]
    return Outcome(scores, {"told": told})


def positions(reader: Reader, text: Text, length: int, count: int, advance: Advance) -> Outcome:
    """Nats per token at positions 1 to ``length``, in parts that double: what so many tokens before it are good for.

    Read from the first ``count`` stretches of ``length`` tokens that lie within one document, each opened by the first
    token. ValueError where no document is so long.
    """
    documents = [reader.encode(one) for texts in text.documents.values() for one in texts]
    starts = [(ids, i) for ids in documents for i in range(0, len(ids) - length + 1, length)][:count]
    if not starts:
        longest = max(map(len, documents))
        raise ValueError(
            f"positions over {length} tokens: the longest document of {text.origin} has {longest}, write "
            f"lengths={longest} or fewer"
        )
    told = reader.nats([Row([reader.first, *ids[i : i + length]], 1) for ids, i in starts], advance)
    scores = [_part([one.nats[low - 1 : high].tolist() for one in told], low, high) for low, high in parts(length)]
    return Outcome(scores, {"text": text.origin, "fingerprint": text.fingerprint, "context": reader.context})


def parts(length: int) -> list[tuple[int, int]]:
    """First and last position of each part: 1 to 16, 17 to 32, 33 to 64 and so on; the last ends at ``length``."""
    ends = [16]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    return [(low, min(high, length)) for low, high in zip([1, *(end + 1 for end in ends)], ends, strict=False)]


def _part(nats: list[list[float]], low: int, high: int) -> Score:
    return ratio(f"{low}-{high}", "loss", [sum(one) for one in nats], [len(one) for one in nats])
