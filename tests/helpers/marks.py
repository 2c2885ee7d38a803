"""What `make test` leaves to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest
import transformers
from packaging.version import Version


def cases(names: str, values: Iterable[Any], *fast: Any, **more: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with values that are all slow but `fast`.

    Those are values or what `str` makes of them. Where `names` has several arguments, each value is
    a tuple of what they get, and the first of it will do.
    """
    values, several = list(values), "," in names
    known = [(x, str(x), *([x[0], str(x[0])] if several else [])) for x in values]
    missing = [x for x in fast if not any(x in names_of for names_of in known)]
    if missing:
        raise ValueError(f"no such parameters: {missing}")
    found = [
        value
        if any(x in fast for x in names_of)
        else pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)
        for value, names_of in zip(values, known, strict=True)
    ]
    return pytest.mark.parametrize(names, found, **more)


def since(release: str) -> pytest.MarkDecorator:
    """Skip the test with transformers before `release`, which cannot do what it needs."""
    return pytest.mark.skipif(older_than(release), reason=f"needs transformers {release}")


def older_than(release: str) -> bool:
    """Whether transformers is older than `release`."""
    return Version(transformers.__version__) < Version(release)
