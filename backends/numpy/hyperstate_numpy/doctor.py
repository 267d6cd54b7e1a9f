"""What `hyperstate doctor` tells of the reference backend."""

from __future__ import annotations

from typing import Any


def facts() -> dict[str, Any]:
    """Ranks are threads of one process, which exchange arrays."""
    return {"devices": ["cpu"], "collectives": ["threads"]}
