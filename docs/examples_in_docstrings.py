"""How do the examples in docstrings look on the site? As code, between fences; by itself `>>>` would be a quotation."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
"""A prompt, and all lines up to the next empty one."""


class ExamplesInDocstrings(griffe.Extension):
    """Puts a fence around each run of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each class, function and attribute that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """The docstring with its examples between fences."""
    return EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", docstring)
