"""Generate reports and summaries from a small seeded grammar: the data of the tiny tasks.

A report states five facts about one agency. Each is stated in three sentences of different words, and all sentences are
shuffled. A value follows its kind, so a model of reports learns to read `cost` and to copy the cost stated earlier. A
summary has only the five values in a fixed order, and ends with random comment words. LoRA must learn this format, and
to copy each value after another fact's value instead of after its own kind. The comment is unpredictable, so the loss
on a summary has a minimum: NUM_COMMENTS * log(len(COMMENT)) / 16 tokens = 0.69 nats. All
words of summaries occur in reports too, because LoRA does not train the embeddings. One word is one token.
"""

import random

import numpy as np

from bench.errors import ConfigError
from jobs.ranks.progress import tracked

PAD, REPORT, END = "<pad>", "<report>", "<end>"

FACTS = {
    "agency": ("auditors visited agency {}", "staff met agency {}", "we reviewed agency {}"),
    "program": ("funds reached program {}", "they began program {}", "we reviewed program {}"),
    "cost": ("auditors found cost {}", "they planned cost {}", "funds met cost {}"),
    "state": ("offices in state {}", "auditors visited state {}", "work in state {}"),
    "year": ("they began year {}", "data in year {}", "we planned year {}"),
}
NUM_VALUES = 16
REMARKS = ("no summary yet", "interviews took place", "data were reliable", "summary is public")
SUMMARY = ("in", "summary")
COMMENT = ("visited", "found", "planned", "reviewed")
NUM_COMMENTS = 8


def vocabulary() -> list[str]:
    """Return all words; a word's index is its token."""
    words = dict.fromkeys((PAD, REPORT, END, ".", *SUMMARY))
    texts = [t for templates in FACTS.values() for t in templates] + list(REMARKS)
    words |= dict.fromkeys(w for text in texts for w in text.split() if w != "{}")
    words |= dict.fromkeys(f"{kind}-{i}" for kind in FACTS for i in range(NUM_VALUES))
    return list(words)


def rows(num_rows: int, *, seq_length: int, seed: int, with_summaries: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, int32 [num_rows, seq_length], and which of them count in the loss, bool of the same shape.

    Documents are packed until the next one does not fit; the rest of a row is padding, which never counts. With
    summaries, a document is a report and its summary, and only the summary counts; without, it is a report, and every
    token counts.

    Raises:
        ConfigError: a document is longer than a row.
    """
    rng, index = random.Random(seed), {token: i for i, token in enumerate(vocabulary())}
    tokens = np.full((num_rows, seq_length), index[PAD], dtype=np.int32)
    counts = np.zeros((num_rows, seq_length), dtype=bool)
    report, summary = document(rng, with_summaries)
    for row in tracked(range(num_rows), what="rows", total=num_rows, unit="rows"):
        start = 0
        while (end := start + len(report) + len(summary)) <= seq_length:
            tokens[row, start:end] = [index[token] for token in report + summary]
            counts[row, start + len(report) if with_summaries else start : end] = True
            start = end
            report, summary = document(rng, with_summaries)
        if start == 0:
            raise ConfigError(
                f"a generated document may have up to 96 words, but data.seq_length is only {seq_length}",
                where="data.seq_length",
                fix="set data.seq_length to 96 or more",
            )
    return tokens, counts


def document(rng: random.Random, with_summary: bool) -> tuple[list[str], list[str]]:
    """Return the words of a report and of its summary (empty without)."""
    facts = {kind: f"{kind}-{rng.randrange(NUM_VALUES)}" for kind in FACTS}
    sentences = [template.format(value) for kind, value in facts.items() for template in FACTS[kind]]
    sentences.append(rng.choice(REMARKS))
    rng.shuffle(sentences)
    report = [REPORT, *" . ".join(sentences).split(), "."]
    if not with_summary:
        return [*report, END], []
    return report, [*SUMMARY, *facts.values(), *rng.choices(COMMENT, k=NUM_COMMENTS), END]
