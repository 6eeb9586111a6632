"""The parameters of the tests of a session, for fixtures that train for all of them in one start of the ranks."""

import pytest


def chosen(request: pytest.FixtureRequest, *names: str) -> set[tuple[str, ...]]:
    """Return the values of these parameters in the tests that use the fixture, without tests that were deselected."""
    items = [item for item in request.session.items if item.path == request.path]
    params = [
        item.callspec.params for item in items if request.fixturename in item.fixturenames and hasattr(item, "callspec")
    ]
    return {tuple(one[name] for name in names) for one in params if one.keys() >= set(names)}
