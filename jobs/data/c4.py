"""C4: JSON lines, gzipped or not, whose `text` holds one web page. `timestamp` and `url` are not read.

Source: the data set card of allenai/c4 on Hugging Face.
"""


def parts(record: dict[str, str], prompt_type: None = None) -> tuple[str, str]:
    """Return the prompt, which is empty, and the text."""
    return "", record["text"]
