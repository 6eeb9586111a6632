"""PubMedQA pqa-artificial, each record a question about an abstract, the abstract, and its conclusion as the answer.

One JSON object {question, context, answer} on each line, or an array of them. PubMedQA's own ori_pqaa.json has other
names (QUESTION, CONTEXTS, LONG_ANSWER) and must be converted first.

Source: Metrum AI's report with Dell on fine-tuning over RoCE (2024), which shows two records.
"""

from bench.contract.data import PromptType
from jobs.data import prompt_types


def parts(record: dict[str, str], prompt_type: PromptType) -> tuple[str, str]:
    """Return the prompt and the answer."""
    return prompt_types.prompt(record["question"], record["context"], prompt_type), record["answer"]
