"""Reports and their summaries from a small seeded grammar: the data of the tiny tasks.

A report states facts about one agency, in an order and in words of its own, among remarks that matter to nobody. Its
summary states the facts again in one fixed order. So a model of reports has seen every word, yet must learn where in
the report to look: what LoRA teaches it. One word is one token.
"""

import random

import numpy as np

PAD, REPORT, END = "<pad>", "<report>", "<end>"

FACTS = {
    "agency": ("the agency {} reported", "auditors visited agency {}", "staff of agency {} met"),
    "program": ("funds went to program {}", "work on program {} began", "program {} is new"),
    "cost": ("cost {} was planned", "they spent cost {}", "the audit found cost {}"),
    "state": ("offices are in state {}", "most work is in state {}", "state {} is the site"),
    "year": ("it began in year {}", "year {} was reviewed", "data are from year {}"),
}
NUM_VALUES = 16
REMARKS = ("no summary was made", "interviews took place", "data were reliable", "a summary is public")
SUMMARY = ("in", "summary")


def vocabulary() -> list[str]:
    """Return all words; a word's index is its token."""
    words = dict.fromkeys((PAD, REPORT, END, ".", *SUMMARY))
    texts = [t for templates in FACTS.values() for t in templates] + list(REMARKS)
    words |= dict.fromkeys(w for text in texts for w in text.split() if w != "{}")
    words |= dict.fromkeys(f"{kind}-{i}" for kind in FACTS for i in range(NUM_VALUES))
    return list(words)


def rows(num_rows: int, *, seq_length: int, seed: int, with_summaries: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, int32 [num_rows, seq_length], and which of them count in the loss, bool of the same shape.

    With summaries, documents are a report and its summary and only summaries count; without, reports alone and every
    token counts. Documents are packed until the next one does not fit; the rest of a row is padding, which never counts.
    """
    rng, index = random.Random(seed), {word: i for i, word in enumerate(vocabulary())}
    tokens = np.full((num_rows, seq_length), index[PAD], dtype=np.int32)
    counts = np.zeros((num_rows, seq_length), dtype=bool)
    for row in range(num_rows):
        filled = 0
        while True:
            report, summary = document(rng, with_summaries)
            words = report + summary
            if filled + len(words) > seq_length:
                break
            end = filled + len(words)
            tokens[row, filled:end] = [index[w] for w in words]
            counts[row, filled + len(report) if with_summaries else filled : end] = True
            filled = end
    return tokens, counts


def document(rng: random.Random, with_summary: bool) -> tuple[list[str], list[str]]:
    """Return the words of a report and of its summary (empty without)."""
    facts = {kind: f"{kind}-{rng.randrange(NUM_VALUES)}" for kind in FACTS}
    sentences = [rng.choice(FACTS[kind]).format(value) for kind, value in facts.items()]
    sentences += [rng.choice(FACTS[kind]).format(value) for kind, value in facts.items()]
    sentences.append(rng.choice(REMARKS))
    rng.shuffle(sentences)
    report = [REPORT, *(" . ".join(sentences)).split(), "."]
    if not with_summary:
        return [*report, END], []
    return report, [*SUMMARY, *facts.values(), END]
