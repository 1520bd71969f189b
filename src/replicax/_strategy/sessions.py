"""What did a strategy want of a session? A configuration is passed on with it, as there are no sessions that would read it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

from replicax._errors import message

ISOLATED: Mapping[str, Any] = {"isolate_session_state": True}
"""What strategies asked for whose variables belonged to one session."""


def updated(config: Any, settings: Mapping[str, Any]) -> Any:
    """A copy of `config` with `settings` in it."""
    if config is None:
        return dict(settings)
    if isinstance(config, Mapping) and not isinstance(config, MutableMapping):
        return {**copy.deepcopy(dict(config)), **settings}
    twin = copy.deepcopy(config)
    settle(twin, settings)
    return twin


def settle(config: Any, settings: Mapping[str, Any]) -> None:
    """Writes `settings` into `config`, if it can be written to."""
    if isinstance(config, MutableMapping):
        config.update(settings)
    elif config is None or isinstance(config, Mapping):
        return
    elif any(not hasattr(config, name) for name in settings) or isinstance(config, (str, int, float, list, tuple)):
        raise _not_a_configuration(config)
    else:
        for name, value in settings.items():
            setattr(config, name, value)


def _not_a_configuration(given: Any) -> TypeError:
    return TypeError(
        message(
            "A session is configured by a mapping, or by an object with the fields of a `tf.ConfigProto`",
            [f"{' '.join(repr(given).split())[:100]} of type {type(given).__name__}"],
            instead=['{"allow_soft_placement": True}', "leave it out: there are no sessions here"],
        )
    )
