"""Chat turns derived mechanically from the corpus.

Every question is built from a definition's name, docstring or code, and every answer is text
of the same file, so a chat turn yields Python in a fence or prose about Python.
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from drafters.train.embedded.data import SourceFile
from drafters.train.embedded.template import Message

_MAX_CHARACTERS = 1800  # about 600 tokens: question and answer fit into a row of 1,024
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You write Python.",
)
_GREETINGS = (
    ("Hi", "Hello! Ask me about Python."),
    ("Hello!", "Hello! Ask me about Python."),
    ("Who are you?", "I am a small model trained on the Python standard library."),
    ("What can you do?", "I can write, complete and describe short pieces of Python."),
    ("Thanks!", "You are welcome."),
)


@dataclass(frozen=True, slots=True)
class ChatSample:
    """One conversation and the file that it was derived from."""

    path: str
    kind: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Definition:
    """A function or class, with its code as in the file but dedented."""

    name: str
    noun: str  # "function", "class" or "test"
    code: str
    docstring: str

    @property
    def summary(self) -> str:
        return self.docstring.split("\n\n")[0].replace("\n", " ").strip()


def chat_samples(files: Iterable[SourceFile], seed: int) -> list[ChatSample]:
    """All conversations of `files`, in file order; `seed` decides their wording."""
    samples: list[ChatSample] = []
    for file in files:
        rng = random.Random(f"{seed}:{file.path}")
        samples.extend(_samples_of(file, rng))
    return samples


def _samples_of(file: SourceFile, rng: random.Random) -> Iterator[ChatSample]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the library's own test files
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            return
    if file.path == "pydoc_data/topics.py":
        yield from _topics(file.path, tree, rng)
    module = ast.get_docstring(tree)
    if module and len(module) <= _MAX_CHARACTERS:
        name = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        question = rng.choice(("What is the `{}` module?", "Describe the Python module `{}`."))
        yield _sample(file.path, "module", question.format(name), module, rng)
    for definition in _definitions(tree, file.text):
        for builder in _builders(definition, rng):
            question, answer, kind = builder(definition, rng)
            if len(question) + len(answer) <= _MAX_CHARACTERS:
                yield _sample(file.path, kind, question, answer, rng)


def _definitions(tree: ast.Module, text: str) -> Iterator[_Definition]:
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
        code = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        noun = "class" if isinstance(node, ast.ClassDef) else "function"
        if node.name.startswith("test") and noun == "function":
            noun = "test"
        if 40 <= len(code) <= _MAX_CHARACTERS and _parses(code):
            docstring = ast.get_docstring(node) or ""
            yield _Definition(node.name, noun, code, inspect.cleandoc(docstring))


def _parses(code: str) -> bool:
    """Whether dedented code parses: a multi-line string can prevent dedenting."""
    try:
        return len(ast.parse(code).body) == 1
    except (SyntaxError, ValueError):
        return False


_Builder = Callable[[_Definition, random.Random], tuple[str, str, str]]


def _builders(definition: _Definition, rng: random.Random) -> Sequence[_Builder]:
    """Two questions about a documented definition, one about an undocumented one."""
    if len(definition.summary) >= 12:
        return rng.sample((_write, _explain, _complete), 2)
    return (_complete,) if rng.random() < 0.6 else (_write,)


def _write(definition: _Definition, rng: random.Random) -> tuple[str, str, str]:
    noun = "unit test" if definition.noun == "test" else f"Python {definition.noun}"
    verb = rng.choice(("Write", "Show me", "Give me", "Implement"))
    summary = definition.summary.rstrip(".")
    tail = f" that does this: {summary}." if summary else "."
    return f"{verb} a {noun} `{definition.name}`{tail}", _fence(definition.code), "write"


def _explain(definition: _Definition, rng: random.Random) -> tuple[str, str, str]:
    opening = rng.choice(("What does this {} do?", "Explain this {}.", "Describe this {}."))
    code = _without_docstring(definition.code)
    return f"{opening.format(definition.noun)}\n{_fence(code)}", definition.docstring, "explain"


def _complete(definition: _Definition, rng: random.Random) -> tuple[str, str, str]:
    lines = definition.code.splitlines()
    cut = rng.randint(1, max(1, len(lines) // 2))
    opening = rng.choice(("Complete this code:", "Continue this code:", "Finish this code:"))
    question = f"{opening}\n{_fence(chr(10).join(lines[:cut]))}"
    return question, _fence("\n".join(lines[cut:]) or "    pass"), "complete"


def _topics(path: str, tree: ast.Module, rng: random.Random) -> Iterator[ChatSample]:
    """Conversations from pydoc's topics, a dictionary of prose about the language."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            text = ast.literal_eval(value)
            paragraphs = [part for part in str(text).split("\n\n") if len(part) > 120]
            for paragraph in paragraphs[:12]:
                opening = rng.choice(("Explain {} in Python.", "Tell me about {} in Python."))
                answer = textwrap.dedent(paragraph).strip()
                if len(answer) <= _MAX_CHARACTERS:
                    yield _sample(path, "topic", opening.format(f"`{key.value}`"), answer, rng)


def _sample(path: str, kind: str, question: str, answer: str, rng: random.Random) -> ChatSample:
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    if rng.random() < 0.02:
        greeting, reply = rng.choice(_GREETINGS)
        messages.append({"role": "user", "content": greeting})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
    return ChatSample(path, kind, tuple(messages))


def _without_docstring(code: str) -> str:
    """The code without its docstring, so that the answer is not in the question."""
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if ast.get_docstring(node) is None or len(node.body) == 1:
        return code.splitlines()[0]
    lines = code.splitlines()
    docstring = node.body[0]
    return "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"
