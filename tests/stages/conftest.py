"""One training step of the embedded policy."""

from tests.main.conftest import wired  # noqa: F401
