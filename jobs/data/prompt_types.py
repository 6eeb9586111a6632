"""What stands around a question and its context: the prompt types. The answer follows at once."""

from bench.contract.data import PromptType


def prompt(question: str, context: str, kind: PromptType) -> str:
    """Return the text before an answer; a context of nothing but spaces is left out, with its heading."""
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
