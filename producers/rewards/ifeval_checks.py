"""The checks of `ifeval`, by the names of IFEval's data; each is told the response and the instruction's arguments.

Left out are the two that need a language detector or a sentence model to be exact: `language:response_language`, and
sentences are counted by their end marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]

_YES_NO = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _relation(count: int, arguments: Arguments, limit: str, relation: str = "relation") -> bool:
    """`at least` or `less than` so many."""
    most = int(arguments[limit])
    return count < most if arguments.get(relation) == "less than" else count >= most


def _found(word: str, text: str, whole: bool = False) -> int:
    pattern = re.escape(word)
    return len(re.findall(rf"\b{pattern}\b" if whole else pattern, text, re.IGNORECASE))


def _capitals(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"\b[\w'-]+\b", text))


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<![.!?])[.!?]++[\"')\]]*+(?:\s+|$)", text) if part.strip()])


def _paragraphs(text: str, mark: str) -> list[str]:
    return [part.strip() for part in re.split(mark, text)]


def _first_word(text: str, a: Arguments) -> bool:
    parts = [part for part in _paragraphs(text, r"\n\n") if part]
    nth = int(a["nth_paragraph"])
    if len(parts) != int(a["num_paragraphs"]) or not 1 <= nth <= len(parts):
        return False
    word = re.match(r"[\"'(]*([^\s.,?!\"')]+)", parts[nth - 1])
    return word is not None and word[1].lower() == str(a["first_word"]).lower()


def _number_paragraphs(text: str, a: Arguments) -> bool:
    parts = _paragraphs(text, r"\s?\*\*\*\s?")
    inner = parts[not parts[0] : len(parts) - (not parts[-1])]
    return all(inner) and len(inner) == int(a["num_paragraphs"])


def _two_responses(text: str, a: Arguments) -> bool:
    parts = _paragraphs(text, r"\*{6}")
    inner = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _json(text: str, a: Arguments) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", text, flags=re.IGNORECASE).strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _postscript(text: str, a: Arguments) -> bool:
    letters = [re.escape(letter) for letter in str(a["postscript_marker"]) if letter.isalpha()]
    return re.search(r"\s*\.?\s?".join(letters), text, re.IGNORECASE) is not None


def _highlights(text: str, a: Arguments) -> bool:
    marked = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool((two or one).strip()) for two, one in marked) >= int(a["num_highlights"])


def _sections(text: str, a: Arguments) -> bool:
    return len(re.findall(rf"\s?{re.escape(str(a['section_spliter']))}\s?\d+\s?", text)) >= int(a["num_sections"])


def _repeats(text: str, a: Arguments) -> bool:
    return text.lower().startswith(str(a["prompt_to_repeat"]).strip().lower())


def _ends(text: str, a: Arguments) -> bool:
    return text.strip('"').rstrip().lower().endswith(str(a["end_phrase"]).strip().lower())


CHECKS: dict[str, Callable[[str, Arguments], bool]] = {
    "keywords:existence": lambda text, a: all(_found(str(word), text) for word in a["keywords"]),
    "keywords:frequency": lambda text, a: _relation(_found(str(a["keyword"]), text), a, "frequency"),
    "keywords:forbidden_words": lambda text, a: not any(_found(str(w), text, True) for w in a["forbidden_words"]),
    "keywords:letter_frequency": lambda text, a: _relation(
        text.lower().count(str(a["letter"]).lower()), a, "let_frequency", "let_relation"
    ),
    "length_constraints:number_words": lambda text, a: _relation(len(re.findall(r"\w+", text)), a, "num_words"),
    "length_constraints:number_sentences": lambda text, a: _relation(_sentences(text), a, "num_sentences"),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, a: (
        len(re.findall(r"\[[^\[\]]*\]", text)) >= int(a["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, a: (
        len(re.findall(r"^\s*(?:\*[^*]|-)", text, re.MULTILINE)) == int(a["num_bullets"])
    ),
    "detectable_format:constrained_response": lambda text, a: any(option in text for option in _YES_NO),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text, a: re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", text) is not None,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "startend:quotation": lambda text, a: len(text) > 1 and text[0] == text[-1] == '"',
    "change_case:english_capital": lambda text, a: text.isupper(),
    "change_case:english_lowercase": lambda text, a: text.islower(),
    "change_case:capital_word_frequency": lambda text, a: _relation(
        _capitals(text), a, "capital_frequency", "capital_relation"
    ),
    "punctuation:no_comma": lambda text, a: "," not in text,
}
