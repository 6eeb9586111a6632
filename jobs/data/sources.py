"""Prompt and answer of a record, with one function per source."""

from bench.contract.data import PromptType


def prompt(question: str, context: str, kind: PromptType) -> str:
    """Return the text before an answer; an empty context is omitted with its heading."""
    has_context = bool(context.strip())
    match kind:
        case PromptType.plain:
            parts = [question, context] if has_context else [question]
            return "\n\n".join(parts) + "\n\n"
        case PromptType.headings:
            middle = f"### Context:\n{context}\n\n" if has_context else ""
            return f"### Instruction:\n{question}\n\n{middle}### Response:\n"
        case PromptType.inst:
            body = f"{question}\n\n{context}" if has_context else question
            return f"[INST] {body} [/INST] "


def c4(record: dict[str, str], prompt_type: None = None) -> tuple[str, str]:
    """Return an empty prompt and the text."""
    return "", record["text"]


def fineweb_edu(record: dict[str, str], prompt_type: None = None) -> tuple[str, str]:
    """Return an empty prompt and the text."""
    return "", record["text"]


def text(record: dict[str, str], prompt_type: None = None) -> tuple[str, str]:
    """Return an empty prompt and the text."""
    return "", record["text"]


def dolly(record: dict[str, str], prompt_type: PromptType) -> tuple[str, str]:
    return prompt(record["instruction"], record["context"], prompt_type), record["response"]


def pubmedqa(record: dict[str, str], prompt_type: PromptType) -> tuple[str, str]:
    return prompt(record["question"], record["context"], prompt_type), record["answer"]
