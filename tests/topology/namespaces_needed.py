"""Marks tests that need the right to make network namespaces."""

import pytest

from topology.namespaces import why_unavailable

_reason = why_unavailable()

needs_namespaces = pytest.mark.skipif(_reason is not None, reason=f"no network namespaces here: {_reason}")
