"""Which line of the user's program does this belong to?

An equation remembers the Python stack under which it was traced. The user's line is the innermost frame that is neither
JAX's, ours, the standard library's nor that of an installed package.
"""

# The trap: a library function that is jitted (`jnp.where`, `jnp.clip`) is traced once and its equations are shared by
# all its callers, so that the frames in them belong to whoever called it first. For those the line has to come
# from the equation that makes the call; `is_library` is how the walk notices.

import functools
import os
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from types import FrameType

import jax
from jax.extend.core import Jaxpr, JaxprEqn


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    os.path.join(root, "") for root in (_HERE, os.path.dirname(jax.__file__), sysconfig.get_paths()["stdlib"])
)
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@functools.cache
def is_users(file: str) -> bool:
    return not (file.startswith(("<", *_LIBRARIES)) or any(folder in file for folder in _PACKAGES))


def user_site(eqn: JaxprEqn) -> Site | None:
    """The user's line that made this equation; None if no line of the user is on its stack."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return None
    return next((Site(f.file_name, f.line_num) for f in traceback.frames if is_users(f.file_name)), None)


def call_site() -> Site:
    """The user's line that is being executed: the innermost frame of the Python stack that is the user's.

    Where there is none (a prompt, code passed to `exec`), the outermost frame.
    """
    frame: FrameType = sys._getframe(1)
    while not is_users(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)


def warn_user(text: str) -> None:
    """Warns in the name of the user's line that is being executed, however deep in the library we are."""
    site = call_site()
    warnings.warn_explicit(text, UserWarning, site.file, site.line)


def is_library(body: Jaxpr) -> bool:
    """Whether `body` was traced from a function that is not the user's, so that its equations name someone's line."""
    file = body.debug_info.func_filename
    return file is None or not is_users(file)
