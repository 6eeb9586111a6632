"""databricks-dolly-15k: JSON lines of instruction, context (often empty), response; `category` is not read.

Source: the data set card of databricks/databricks-dolly-15k on Hugging Face.
"""

from bench.contract.data import PromptType
from jobs.data import prompt_types


def parts(record: dict[str, str], prompt_type: PromptType) -> tuple[str, str]:
    """Return the prompt and the answer."""
    return prompt_types.prompt(record["instruction"], record["context"], prompt_type), record["response"]
