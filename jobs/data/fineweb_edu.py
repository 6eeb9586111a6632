"""FineWeb-Edu: parquet whose column `text` holds one web page. Its other columns are not read.

Source: the data set card of HuggingFaceFW/fineweb-edu on Hugging Face.
"""


def parts(record: dict[str, str], prompt_type: None = None) -> tuple[str, str]:
    """Return the prompt, which is empty, and the text."""
    return "", record["text"]
